// Elements, text that can be trusted not to act, and numbers as people read them.

/** An element. Strings among the children become text, so nothing from a model is ever markup. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

// Controls, and what has no width or turns the direction of text: a reader must see that they are
// there, and they must not rearrange what stands around them.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}]/gu;

/** Text as nodes, in which every character that cannot be seen is named. */
export function visible(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(UNSEEN)) {
    if (found.index > end) nodes.push(document.createTextNode(text.slice(end, found.index)));
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(el("span", { class: "unseen", title: "a character that cannot be seen" }, `U+${code}`));
    end = found.index + found[0].length;
  }
  if (end < text.length) nodes.push(document.createTextNode(text.slice(end)));
  return nodes;
}

const NONE = "\u2013";
const MINUS = "\u2212";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** A number with so many decimals, or a dash. */
export function number(value, decimals = 0) {
  if (!isNumber(value)) return NONE;
  return value.toFixed(decimals).replace("-", MINUS);
}

/** A number with about three significant digits. */
export function short(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e6) return `${number(value / 1e6, 1)}M`;
  if (size >= 1e4) return `${number(value / 1e3, 1)}k`;
  if (size >= 100 || Number.isInteger(value)) return number(value);
  return number(value, size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

export const percent = (share) => (isNumber(share) ? `${number(share * 100)}%` : NONE);

/** Seconds, as long as they are worth saying. */
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  if (seconds < 90) return `${number(seconds, seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${number(seconds / 60)} min`;
  return seconds < 172800 ? `${number(seconds / 3600, 1)} h` : `${number(seconds / 86400)} d`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
export const bytes = (count) =>
  count < 1 << 20 ? `${number(count / 1024)} KiB` : `${number(count / (1 << 20), 1)} MiB`;
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** A shape beside every colour, since not everybody tells colours apart. */
export function mark(state) {
  const shapes = {
    passed: "M4.5 8.4l2.4 2.4 4.8-5.4",
    failed: "M5 5l6 6M11 5l-6 6",
    waiting: "M5 8h6",
  };
  const icon = svg("svg", { viewBox: "0 0 16 16", class: `mark ${state}`, "aria-hidden": "true" });
  icon.append(svg("circle", { cx: 8, cy: 8, r: 7.25 }), svg("path", { d: shapes[state] }));
  return icon;
}

/** Make a container's children these nodes, moving none that is in place, so that focus stays. */
export function arrange(container, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...container.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, index) => {
    if (container.children[index] !== node) {
      container.insertBefore(node, container.children[index] ?? null);
    }
  });
}
