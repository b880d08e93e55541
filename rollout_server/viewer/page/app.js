// The page's heart: asks the server what is new, and hands it to those who draw it.

import { Refusal, forgetToken, get, rememberToken } from "./api.js";
import { mountCharts, updateCharts } from "./charts.js";
import { showGroup, showNothing, shownGroup } from "./detail.js";
import { byId } from "./dom.js";
import { mountGroups, refresh, select, selectedSummary } from "./groups.js";
import { showLights, showPolicies, showRunning, showServer } from "./overview.js";

const EVERY_MS = 1500;
const AFTER_ERROR_MS = 5000;

let paused = false;
let revision = -1;
let timer = null;
let verdicts = "";

async function turn() {
  clearTimeout(timer);
  let wait = EVERY_MS;
  try {
    if (!paused && !document.hidden) say(await update());
  } catch (error) {
    wait = handle(error);
  }
  if (wait) timer = setTimeout(turn, wait);
}

/** Show what is new; returns what is wrong with the engine, or nothing. */
async function update() {
  const state = await get("viewer/state");
  byId("sign-in").hidden = true;
  byId("content").hidden = false;
  showServer(state);
  if (!state.server) {
    showLights([]);
    revision = -1;
    return state.engine.reason;
  }
  showLights(state.lights);
  announceVerdicts(state.lights);
  showRunning(state.running, state.running_rollouts);
  showPolicies(state.policies);
  // Publishes and queues change figures without a new group.
  const [history] = await Promise.all([
    get("viewer/history"),
    state.revision === revision ? null : refresh(),
  ]);
  revision = state.revision;
  updateCharts(history);
  await followSelection();
  return state.engine.reason;
}

/** Open what the address names, and show rewards that came after a group was opened. */
async function followSelection() {
  const named = location.hash.match(/^#group-([0-9a-f]+)$/)?.[1];
  const shown = shownGroup();
  if (!shown && named) {
    select(named);
  } else if (shown) {
    const summary = selectedSummary();
    if (summary && JSON.stringify(summary.rewards) !== JSON.stringify(shown.rewards)) {
      await showGroup(shown.id);
    }
  } else {
    showNothing();
  }
}

function announceVerdicts(lights) {
  const now = lights.map((light) => `${light.title}: ${light.state}`).join(". ");
  if (verdicts && now !== verdicts) byId("announcer").textContent = now;
  verdicts = now;
}

/** What to do about an error; returns after how long to try again, 0 for not at all. */
function handle(error) {
  if (!(error instanceof Refusal)) throw error;
  if (error.status === 401 || error.status === 403) {
    askForToken(error);
    return 0;
  }
  say(`${error.message}; trying again`);
  return AFTER_ERROR_MS;
}

function say(message) {
  byId("banner").hidden = !message;
  byId("banner").textContent = message;
}

function askForToken(error) {
  const hadToken = sessionStorage.length > 0;
  forgetToken();
  say("");
  byId("content").hidden = true;
  byId("sign-in").hidden = false;
  // A token is asked for without reproach.
  byId("sign-in-problem").textContent = hadToken || error.status === 403 ? error.message : "";
  byId("token").focus();
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  rememberToken(byId("token").value.trim());
  byId("token").value = "";
  turn();
});

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Go on" : "Pause";
  byId("announcer").textContent = paused ? "Updates are paused" : "Updates go on";
  if (!paused) turn();
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) turn();
});

mountCharts();
mountGroups({
  onSelect: (id) => showGroup(id).catch(handle),
  onError: handle,
});
showNothing();
turn();
