// The list of groups: filters, keys, and new groups that do not push away what somebody reads.

import { get } from "./api.js";
import { arrange, byId, clock, duration, el, number, plural, short, svg, visible } from "./dom.js";

const PAGE = 50;
const MOST_REFRESHED = 200;
const NARROW = matchMedia("(max-width: 760px)");

const rows = new Map();
let shown = [];
let matching = 0;
let selected = null;
let asked = 0;
let onSelect = () => {};
let onError = () => {};

export const newestShown = () => shown[0]?.seq ?? 0;
export const selectedSummary = () => rows.get(selected)?.group;

export function mountGroups(handlers) {
  ({ onSelect, onError } = handlers);
  const filters = byId("filters");
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("input", () => refresh({ announce: true }));
  filters.addEventListener("reset", () => setTimeout(() => refresh({ announce: true })));
  byId("older").addEventListener("click", () => loadOlder().catch(onError));
  byId("newer").addEventListener("click", () => {
    byId("list").scrollTop = 0;
    refresh({ force: true });
  });
  byId("list").addEventListener("keydown", onKey);
}

function query() {
  const found = {};
  for (const control of byId("filters").elements) {
    if (control.name && control.value && control.checkValidity()) found[control.name] = control.value;
  }
  return found;
}

/** Ask for the newest groups again; unless forced, new ones wait while somebody reads further down. */
export async function refresh({ announce = false, force = false } = {}) {
  const turn = ++asked;
  const limit = Math.min(MOST_REFRESHED, Math.max(PAGE, announce ? PAGE : shown.length));
  let answer;
  try {
    answer = await get("viewer/groups", { ...query(), limit });
  } catch (error) {
    onError(error);
    return;
  }
  if (turn !== asked) return; // a later question was asked meanwhile
  const newest = newestShown();
  const fresh = shown.length ? answer.groups.filter((group) => group.seq > newest) : [];
  if (!announce && !force && fresh.length && byId("list").scrollTop > 8) {
    // Groups that are shown already may have got rewards.
    answer.groups.filter((group) => group.seq <= newest).forEach(row);
    byId("newer").hidden = false;
    byId("newer").textContent = fresh.length >= limit ? `${limit} or more newer groups` : `${plural(fresh.length, "newer group")}`;
    return;
  }
  byId("newer").hidden = true;
  const oldestAnswered = answer.groups.at(-1)?.seq ?? 0;
  const kept = announce ? [] : shown.filter((group) => group.seq < oldestAnswered);
  show([...answer.groups, ...kept], answer.matching);
  if (announce) byId("announcer").textContent = `${plural(matching, "group")} found`;
}

async function loadOlder() {
  const oldest = shown.at(-1)?.seq;
  if (!oldest) return;
  const before = shown.length;
  const answer = await get("viewer/groups", { ...query(), limit: PAGE * 4, before: oldest });
  show([...shown, ...answer.groups], answer.matching);
  rows.get(shown[before]?.id)?.node.focus();
}

function show(groups, count) {
  shown = groups;
  matching = count;
  arrange(byId("list"), groups.map((group) => row(group)));
  const ids = new Set(groups.map((group) => group.id));
  for (const id of rows.keys()) if (!ids.has(id)) rows.delete(id);
  if (selected && !rows.has(selected)) selected = null;
  const first = rows.get(selected) ?? rows.get(groups[0]?.id);
  for (const { node } of rows.values()) node.tabIndex = node === first?.node ? 0 : -1;
  byId("older").hidden = shown.length >= matching;
  byId("empty").hidden = groups.length > 0;
  const filtered = Object.keys(query()).length > 0;
  byId("empty").textContent = filtered
    ? "No group that is kept matches these filters."
    : "No groups yet. They appear here as soon as somebody posts to /rollout.";
  byId("groups-count").textContent = groups.length
    ? `${groups.length} of ${matching}${filtered ? " that match" : ""}, newest first`
    : "";
}

function row(group) {
  const key = JSON.stringify(group);
  const kept = rows.get(group.id);
  if (kept?.key === key) return kept.node;
  const node = kept?.node ?? newRow(group.id);
  node.replaceChildren(
    el("span", { class: "prompt" }, visible(group.prompt.replace(/\s+/g, " ") || "(empty prompt)")),
    bars(group),
    el("span", { class: "meta" }, meta(group)),
  );
  rows.set(group.id, { node, key, group });
  return node;
}

function newRow(id) {
  const node = el("div", { class: "row", role: "option", "aria-selected": "false", "data-id": id });
  node.addEventListener("click", () => {
    select(id);
    if (NARROW.matches) byId("detail").scrollIntoView();
  });
  return node;
}

function meta(group) {
  const [oldest, newest] = group.versions;
  const parts = [
    el("span", {}, oldest === newest ? `v${oldest}` : `v${oldest}\u2013${newest}`),
    el("span", {}, `${short(group.mean_length)} tok`),
    el("time", { title: `took ${duration(group.seconds)}` }, clock(group.finished_at)),
  ];
  if (group.rewards) {
    const { mean, spread } = group.rewards;
    parts.unshift(el("strong", {}, `${number(mean, 2)} \u00b1${number(spread, 2)}`));
  }
  if (group.problem) parts.push(el("span", { class: "chip bad" }, "damaged"));
  if (group.truncated) {
    parts.push(el("span", { class: "chip warn" }, `${group.truncated} of ${group.samples} cut off`));
  }
  if (group.distinct <= 1 && group.samples > 1) parts.push(el("span", { class: "chip" }, "all equal"));
  if (group.purpose === "eval") parts.push(el("span", { class: "chip" }, "eval"));
  if (group.policy !== "default") parts.push(el("span", { class: "chip" }, group.policy));
  return parts;
}

/** One bar for each sample: as high as it is long, full if it was better than its group. */
function bars(group) {
  const [step, height] = [7, 18];
  const drawn = svg("svg", {
    class: "bars", width: group.bars.length * step, height, role: "img",
    "aria-label": `${plural(group.samples, "sample")}, ${group.distinct} different`,
  });
  const longest = Math.max(1, ...group.bars.map((bar) => bar[0]));
  group.bars.forEach(([length, cut, reward], index) => {
    const tall = Math.max(2, (length / longest) * (height - 3));
    const better = reward !== null && group.rewards && reward > group.rewards.mean;
    const kind = reward === null ? "unscored" : better ? "better" : "worse";
    drawn.append(svg("rect", {
      class: kind, x: index * step + 0.5, y: height - tall - 0.5, width: step - 3, height: tall,
    }));
    if (cut) {
      drawn.append(svg("rect", { class: "cut", x: index * step, y: 0, width: step - 2, height: 2 }));
    }
  });
  return drawn;
}

/** Show a group, and say which it is in the address, so that a reload shows it again. */
export function select(id, { focus = false } = {}) {
  for (const [other, { node }] of rows) {
    node.setAttribute("aria-selected", String(other === id));
    node.tabIndex = other === id ? 0 : -1;
  }
  selected = id;
  history.replaceState(null, "", `#group-${id}`);
  if (focus) rows.get(id)?.node.focus();
  onSelect(id);
}

function onKey(event) {
  const index = shown.findIndex((group) => rows.get(group.id)?.node === document.activeElement);
  const last = shown.length - 1;
  const moves = {
    ArrowDown: index + 1, ArrowUp: index - 1, PageDown: index + 10, PageUp: index - 10, Home: 0, End: last,
  };
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    if (index >= 0) select(shown[index].id);
    byId("detail").focus();
  } else if (event.key in moves && last >= 0) {
    event.preventDefault();
    select(shown[Math.min(last, Math.max(0, moves[event.key]))].id, { focus: true });
  }
}

