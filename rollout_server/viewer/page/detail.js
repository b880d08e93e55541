// One group: its prompt, its samples side by side, and their tokens by how likely each was.

import { get } from "./api.js";
import { byId, clock, duration, el, number, percent, plural, short, visible } from "./dom.js";

const AT_ONCE = 24;
// Bounds between the shades, as probabilities: the less likely a token was, the stronger its shade.
const SHADES = [0.9, 0.5, 0.2, 0.05, 0.01];
const ORDERS = {
  sampled: { label: "as sampled", by: (sample) => sample.index },
  best: { label: "best reward first", by: (sample) => -(sample.reward ?? -Infinity) },
  worst: { label: "worst reward first", by: (sample) => sample.reward ?? Infinity },
  longest: { label: "longest first", by: (sample) => -sample.length },
  unlikely: { label: "least likely first", by: (sample) => sample.mean_logprob ?? 0 },
};

let group = null;
let coloured = false;
let order = "sampled";
let wanted = null;

export const shownGroup = () => group;

/** Fetch a group and show it. */
export async function showGroup(id) {
  wanted = id;
  byId("detail").setAttribute("aria-busy", "true");
  try {
    const found = await get(`viewer/groups/${id}`);
    if (wanted !== id) return; // another one was chosen meanwhile
    const again = group?.id === id;
    group = found;
    render();
    if (!again) byId("detail").scrollTop = 0;
  } catch (error) {
    if (wanted !== id) return;
    if (error.status !== 404) throw error;
    group = null;
    byId("detail").replaceChildren(el("p", { class: "empty" }, "This group has been let go of."));
  } finally {
    if (wanted === id) byId("detail").removeAttribute("aria-busy");
  }
}

export function showNothing() {
  if (group) return;
  byId("detail").replaceChildren(
    el("p", { class: "empty" }, "Choose a group to see its samples side by side."),
  );
}

function render() {
  group.samples.forEach((sample, index) => { sample.index = index; });
  const detail = byId("detail");
  const samples = el("div", { class: "samples" });
  detail.replaceChildren(heading(), promptNode(), toolbar(samples), legend(), samples);
  fill(samples);
}

function heading() {
  const [oldest, newest] = group.versions;
  const facts = [
    ["Policy", group.policy],
    ["Version", oldest === newest ? `v${oldest}` : `v${oldest} to v${newest}`],
    ["Reward", group.rewards ? `${number(group.rewards.mean, 3)} \u00b1${number(group.rewards.spread, 3)}` : "\u2013"],
    ["Different", `${group.distinct} of ${group.samples.length}`],
    ["Cut off", `${group.truncated} of ${group.samples.length}`],
    ["Mean length", short(group.mean_length)],
    ["Mean logprob", number(group.mean_logprob, 3)],
    ["Temperature", number(group.temperature, 2)],
    ["max_tokens", group.max_tokens],
    ["Took", duration(group.seconds)],
    ["Stale by", group.staleness],
    ["For", group.caller],
  ];
  return el("header", {},
    el("a", { class: "back", href: "#groups" }, "Back to the groups"),
    el("h3", {}, `Group ${group.seq}`, el("small", {},
      `prompt ${group.group_id} of its rollout, finished ${clock(group.finished_at)}, ` +
      `${group.purpose === "train" ? "for training" : "for evaluation"}`)),
    group.problem ? el("p", { class: "problem" }, visible(group.problem)) : null,
    el("dl", { class: "pairs" }, facts.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, visible(String(value)))))),
  );
}

function promptNode() {
  return el("section", { class: "asked", "aria-label": "Prompt" },
    el("h4", {}, "Prompt", el("small", {}, plural(group.prompt_tokens, "token"))),
    el("pre", { class: "text", dir: "auto", tabindex: "0" }, visible(group.prompt)),
  );
}

function toolbar(samples) {
  const toggle = el("button", { type: "button", "aria-pressed": String(coloured), id: "colour" },
    "Shade tokens by probability");
  toggle.addEventListener("click", () => {
    coloured = !coloured;
    toggle.setAttribute("aria-pressed", String(coloured));
    byId("legend").hidden = !coloured;
    for (const card of samples.querySelectorAll(".sample")) paint(card);
  });
  const select = el("select", {}, Object.entries(ORDERS).map(([name, { label }]) =>
    el("option", { value: name, selected: name === order }, label)));
  select.addEventListener("change", () => {
    order = select.value;
    fill(samples);
  });
  return el("div", { class: "toolbar" }, toggle, el("label", {}, "Order ", select));
}

function legend() {
  const shades = [...SHADES.map((bound) => `${percent(bound)} or more`), `below ${percent(SHADES.at(-1))}`];
  return el("div", { class: "legend", id: "legend", hidden: !coloured },
    shades.map((label, shade) => el("span", { class: `token shade-${shade}` }, label)),
    el("output", { id: "readout" }, "Point at a token, or move through them with the arrow keys."),
  );
}

function fill(samples, most = AT_ONCE) {
  const { by } = ORDERS[order];
  const sorted = [...group.samples].sort((a, b) => by(a) - by(b) || a.index - b.index);
  const letters = answerLetters(group.samples);
  samples.replaceChildren(...sorted.slice(0, most).map((sample) => card(sample, letters)));
  if (sorted.length > most) {
    const more = el("button", { type: "button", class: "older" },
      `Show ${Math.min(AT_ONCE * 4, sorted.length - most)} more of ${sorted.length}`);
    more.addEventListener("click", () => fill(samples, most + AT_ONCE * 4));
    samples.append(more);
  }
  if (coloured) for (const node of samples.querySelectorAll(".sample")) paint(node);
}

/** A letter for each different answer that more than one sample gave. */
function answerLetters(samples) {
  const counts = new Map();
  for (const { text } of samples) counts.set(text, (counts.get(text) ?? 0) + 1);
  const repeated = [...counts].filter(([, count]) => count > 1);
  return new Map(repeated.map(([text, count], index) =>
    [text, { letter: index < 26 ? String.fromCharCode(65 + index) : `${index + 1}`, count }]));
}

function card(sample, letters) {
  const same = letters.get(sample.text);
  const ends = { stop: "stopped", length: "cut off", abort: "aborted" }[sample.finish_reason];
  const versions = sample.spans.length > 1
    ? sample.spans.map((span) => `v${span.version} to token ${span.end}`).join(", ")
    : `v${sample.version}`;
  const node = el("section", { class: `sample ${sample.finish_reason}`, "data-index": sample.index,
    "aria-label": `Sample ${sample.index + 1}` },
    el("header", {},
      el("span", { class: "index" }, `${sample.index + 1}`),
      sample.reward === null ? null : rewardNode(sample),
      same ? el("span", { class: "chip", title: `${same.count} samples are this answer` }, `${same.letter} \u00d7${same.count}`) : null,
      el("span", { class: `chip ${sample.finish_reason === "stop" ? "" : "warn"}` }, ends),
    ),
    el("pre", { class: "text", dir: "auto", tabindex: "0" }, sample.text ? visible(sample.text) : el("i", {}, "(empty)")),
    el("footer", { class: "meta" },
      el("span", {}, `${sample.length} tok`),
      el("span", { title: "mean logprob of its tokens, in nats" }, `logprob ${number(sample.mean_logprob, 3)}`),
      el("span", { title: sample.digest }, versions)),
  );
  node.sample = sample;
  return node;
}

function rewardNode(sample) {
  const better = group.rewards && sample.reward > group.rewards.mean;
  const worse = group.rewards && sample.reward < group.rewards.mean;
  const arrow = better ? "\u25b2" : worse ? "\u25bc" : "\u2022";
  const made = Object.entries(sample.components);
  const title = better ? "above its group's mean" : worse ? "below its group's mean" : "at its group's mean";
  return el("span", { class: `reward ${better ? "better" : worse ? "worse" : ""}`, title },
    el("span", { "aria-hidden": "true" }, arrow), el("span", { class: "visually-hidden" }, `reward, ${title}: `),
    number(sample.reward, 2),
    made.length ? el("small", {}, made.map(([name, value]) => [" ", ...visible(name), ` ${number(value, 2)}`])) : null);
}

async function paint(node) {
  const { sample } = node;
  const text = node.querySelector(".text");
  if (!coloured || !sample.length) {
    if (sample.length) text.replaceChildren(...visible(sample.text));
    text.classList.remove("tokens");
    return;
  }
  try {
    sample.tokens ??= await get(`viewer/groups/${group.id}/samples/${sample.index}/tokens`);
  } catch (error) {
    text.replaceChildren(el("i", {}, error.message));
    return;
  }
  if (!coloured || !node.isConnected) return;
  text.classList.add("tokens");
  text.replaceChildren(...sample.tokens.tokens.map(tokenNode));
  const rest = sample.length - (sample.tokens.next ?? sample.length);
  if (rest) text.append(moreTokens(node, rest));
  text.onkeydown = (event) => walk(event, text);
}

function moreTokens(node, rest) {
  const button = el("button", { type: "button" }, `${plural(rest, "token")} more`);
  button.addEventListener("click", async () => {
    const { sample } = node;
    const path = `viewer/groups/${group.id}/samples/${sample.index}/tokens`;
    const more = await get(path, { start: sample.tokens.next });
    sample.tokens = { next: more.next, tokens: [...sample.tokens.tokens, ...more.tokens] };
    paint(node);
  });
  return button;
}

function tokenNode(token) {
  const probability = Math.exp(token.logprob);
  const found = SHADES.findIndex((bound) => probability >= bound);
  const shade = found < 0 ? SHADES.length : found;
  const node = el("span", { class: `token shade-${shade}` }, token.text ? visible(token.text) : "\u2205");
  node.addEventListener("pointerenter", () => read(token, node));
  node.token = token;
  return node;
}

function read(token, node) {
  document.querySelector(".token.current")?.classList.remove("current");
  node.classList.add("current");
  const ids = token.ids.length > 1 ? `ids ${token.ids.join(", ")}` : `id ${token.ids[0]}`;
  byId("readout").replaceChildren(
    el("code", {}, visible(JSON.stringify(token.text))),
    ` token ${token.at + 1}, ${ids}, probability ${short(Math.exp(token.logprob) * 100)}%, ` +
    `logprob ${number(token.logprob, 3)}, v${token.version}`,
  );
}

/** Arrow keys move from token to token; the whole text is one stop of the tab key. */
function walk(event, text) {
  const tokens = [...text.querySelectorAll(":scope > .token")];
  const from = tokens.findIndex((node) => node.classList.contains("current"));
  const to = { ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if (to === undefined || !tokens.length) return;
  event.preventDefault();
  const node = tokens[Math.min(tokens.length - 1, Math.max(0, to))];
  read(node.token, node);
  node.scrollIntoView({ block: "nearest" });
}
