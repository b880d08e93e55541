// The header, the three checks, what runs, and the policies.

import { standstill } from "./charts.js";
import {
  arrange, bytes, byId, clock, duration, el, mark, percent, plural, visible,
} from "./dom.js";

const STATES = { passed: "passed", failed: "failed", waiting: "no data yet" };

export function showServer(state) {
  const { engine, server, policies = [] } = state;
  const live = policies[0];
  const ok = engine.state === "ready" ? "passed" : engine.state === "closed" ? "failed" : "waiting";
  const facts = [
    ["Engine", el("span", { class: "state" }, mark(ok), engine.state), engine.reason],
    server && ["Model", el("span", { class: "mono" }, visible(shortName(server.model))), server.model],
    live && ["Live", `v${live.version}`, `digest ${live.digest}`],
    server && ["Numbers", `${server.dtype}, ${server.max_model_len} context`],
  ].filter(Boolean);
  byId("server").replaceChildren(
    ...facts.map(([name, value, title]) =>
      el("div", { title: title || null }, el("dt", {}, name), el("dd", {}, value))),
  );
  const { kept } = state;
  byId("footer").textContent =
    `Kept to look at: ${kept.groups} of at most ${kept.max_groups} groups, ` +
    `${bytes(kept.bytes)} of ${bytes(kept.max_bytes)}. The oldest go first.`;
}

/** The last part of a path; a name on a hub stays whole. */
const shortName = (model) => (/^[./~]/.test(model) ? model.split("/").filter(Boolean).at(-1) : model);

export function showLights(lights) {
  const firstFailed = lights.find((light) => light.state === "failed");
  byId("lights").replaceChildren(...lights.map((light) => lightNode(light, light === firstFailed)));
}

function lightNode(light, first) {
  const gauge = el("div", { class: "gauge", "aria-hidden": "true" });
  if (light.share !== null) {
    const fill = el("div", { class: "fill" });
    fill.style.width = `${Math.min(100, light.share * 100)}%`;
    const limit = el("div", { class: "limit" });
    limit.style.left = `${light.limit * 100}%`;
    gauge.append(fill, limit);
  }
  return el(
    "li",
    { class: `light ${light.state}`, "data-light": light.name },
    mark(light.state),
    el("div", {},
      el("p", { class: "title" }, light.title, el("span", { class: "verdict" }, STATES[light.state])),
      el("div", { class: "row" }, el("strong", {}, percent(light.share)), gauge),
      el("p", { class: "found" }, light.found),
      first ? el("p", { class: "advice" }, light.advice) : null,
    ),
  );
}

export function showRunning(rollouts, total) {
  const rows = rollouts.map((rollout) => {
    const share = rollout.total ? rollout.done / rollout.total : 1;
    const fill = el("div", { class: "fill" });
    fill.style.width = `${share * 100}%`;
    return el("li", {},
      el("p", { class: "prompt" }, visible(rollout.prompt || "(no prompt left)")),
      el("div", { class: "progress", role: "progressbar", "aria-label": "groups finished",
        "aria-valuemin": 0, "aria-valuemax": rollout.total, "aria-valuenow": rollout.done }, fill),
      el("p", { class: "meta" },
        `${rollout.done} of ${plural(rollout.total, "group")} of ${rollout.group_size}, ` +
        `${rollout.policy}, ${rollout.caller}, since ${clock(rollout.began_at)}`),
    );
  });
  if (total > rollouts.length) {
    rows.push(el("li", { class: "meta" }, `and ${total - rollouts.length} more under way`));
  }
  byId("running").replaceChildren(...rows);
}

const policyNodes = new Map();

export function showPolicies(policies) {
  const nodes = policies.map((policy) => {
    const key = JSON.stringify({ ...policy, lease: policy.lease && { ...policy.lease, seconds_left: 0 } });
    let kept = policyNodes.get(policy.name);
    if (!kept || kept.key !== key) {
      const wasOpen = kept?.node.querySelector("details")?.open;
      kept = { key, node: policyNode(policy, wasOpen ?? policies.length < 4) };
      policyNodes.set(policy.name, kept);
    }
    const left = kept.node.querySelector(".lease-left");
    if (left) left.textContent = `${duration(policy.lease.seconds_left)} left`;
    return kept.node;
  });
  arrange(byId("policy-list"), nodes);
  const select = byId("filters").elements.policy;
  const names = ["", ...policies.map((policy) => policy.name)];
  if (names.join() !== [...select.options].map((option) => option.value).join()) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name || "any")));
    select.value = names.includes(chosen) ? chosen : "";
  }
}

function policyNode(policy, open) {
  const { lease } = policy;
  return el(
    "article",
    { class: "policy", "data-policy": policy.name },
    el("h3", {}, policy.name, el("span", { class: "chip" }, policy.kind === "lora" ? "LoRA" : "full weights"),
      policy.state === "live" ? null : el("span", { class: "chip busy" }, policy.state)),
    el("dl", { class: "pairs" },
      pair("Version", `v${policy.version}`),
      pair("Digest", el("code", {}, policy.digest)),
      pair("Lease", lease
        ? [el("span", { class: "mono" }, visible(lease.holder)), ` of ${lease.owner}, fence ${lease.fence}, `,
          el("span", { class: "lease-left" })]
        : "nobody holds it"),
    ),
    policy.history.length
      ? el("details", { open }, el("summary", {}, `Last ${plural(policy.history.length, "publish")}`.replace("publishs", "publishes")),
        historyTable(policy.history))
      : el("p", { class: "meta" }, "Nothing was published since the server started."),
  );
}

const pair = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

function historyTable(history) {
  const head = ["Version", "State", "By", "At", "Took", "Stood still", "Digest"];
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Publishes" },
    el("table", {},
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, history.flatMap(historyRows)),
    ));
}

function historyRows(publish) {
  const seconds = Object.values(publish.timings).reduce((sum, part) => sum + part, 0);
  const failed = publish.state === "rejected" || publish.state === "rolled_back";
  const state = failed ? "failed" : publish.state === "live" ? "passed" : "waiting";
  const stages = Object.entries(publish.timings).map(([stage, took]) => `${stage} ${duration(took)}`);
  const row = el("tr", { class: publish.state },
    el("td", {}, publish.version === null ? "\u2013" : `v${publish.version}`),
    el("td", {}, el("span", { class: "state" }, mark(state), publish.state.replace("_", " "))),
    el("td", {}, visible(publish.publisher)),
    el("td", {}, clock(publish.started_at)),
    el("td", { title: stages.join(", ") || null }, stages.length ? duration(seconds) : "\u2013"),
    el("td", {}, stages.length ? duration(standstill(publish.timings)) : "\u2013"),
    el("td", {}, el("code", {}, publish.digest ? publish.digest.slice(0, 12) : "\u2013")),
  );
  if (!publish.reason) return [row];
  return [row, el("tr", { class: "reason" }, el("td", { colspan: 7 }, visible(publish.reason)))];
}

