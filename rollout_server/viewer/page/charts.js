// Small charts of what the server did over time, drawn as SVG on one common time axis.

import { byId, clock, duration, el, percent, short, svg } from "./dom.js";

const HEIGHT = 64;
const LIMIT_TRUNCATED = 0.15;

const CHARTS = [
  { key: "reward", title: "Reward", note: "mean of what trainers posted back", show: short },
  {
    key: "truncated", title: "Truncated", note: "share of samples cut off", show: percent,
    floor: 0, least: 0.2, line: LIMIT_TRUNCATED, lineLabel: "15%",
  },
  { key: "length", title: "Length", note: "mean completion, in tokens", show: short, floor: 0 },
  { key: "tokens_per_second", title: "Tokens/s", note: "of completions that ended", show: short, floor: 0, area: true },
  { key: "seconds", title: "Publish", note: "seconds; the dark part stands still", show: duration, floor: 0, publishes: true },
  { key: "staleness", title: "Staleness", note: "versions published meanwhile, at most", show: short, floor: 0, least: 1, steps: true },
  { key: "queued", title: "Queue", note: "samples waiting, at most", show: short, floor: 0, least: 1, area: true },
];

/** Seconds of a publish in which generation stood still. */
export const standstill = (timings) =>
  ["pause", "load", "commit", "resume"].reduce((sum, stage) => sum + (timings[stage] ?? 0), 0);

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.points = [];
    this.value = el("span", { class: "value" }, "\u2013");
    this.when = el("span", { class: "when" });
    this.plot = svg("svg", { class: "plot", height: HEIGHT, "aria-hidden": "true" });
    this.scale = el("div", { class: "scale", "aria-hidden": "true" });
    this.node = el(
      "figure",
      { class: "chart", tabindex: "0", role: "img", "data-chart": spec.key },
      el("figcaption", {}, el("span", { class: "name", title: spec.note }, spec.title), this.when),
      this.value,
      el("div", { class: "frame" }, this.plot, this.scale),
    );
    this.node.addEventListener("pointermove", (event) => this.point(event));
    this.node.addEventListener("pointerleave", () => this.rest());
    this.node.addEventListener("blur", () => this.rest());
    this.node.addEventListener("keydown", (event) => this.step(event));
  }

  update(points, span, publishes) {
    this.points = points.filter((point) => Number.isFinite(point[this.spec.key]));
    this.span = span;
    this.publishes = publishes;
    this.draw();
  }

  get range() {
    const values = this.points.map((point) => point[this.spec.key]);
    const { floor, least } = this.spec;
    let low = floor ?? Math.min(...values);
    let high = Math.max(...values, least ?? -Infinity);
    if (high === low) high = low + (Math.abs(low) || 1);
    if (floor === undefined) [low, high] = [low - (high - low) * 0.08, high + (high - low) * 0.08];
    return [low, high];
  }

  draw() {
    const width = Math.max(60, this.plot.clientWidth);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.plot.replaceChildren();
    this.scale.replaceChildren();
    if (!this.points.length) return this.rest();
    const [low, high] = this.range;
    const [from, to] = this.span;
    this.x = (at) => 1 + ((at - from) / Math.max(to - from, 1e-9)) * (width - 2);
    this.y = (value) => HEIGHT - 2 - ((value - low) / (high - low)) * (HEIGHT - 6);
    if (!this.spec.publishes) this.drawTicks();
    if (this.spec.line !== undefined) this.drawLimit(width);
    if (this.spec.publishes) this.drawBars();
    else this.drawLine();
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.plot.append(this.cursor);
    this.scale.append(el("span", {}, this.spec.show(high)), el("span", {}, this.spec.show(low)));
    this.rest();
  }

  drawTicks() {
    for (const { at } of this.publishes) {
      if (at < this.span[0]) continue;
      this.plot.append(
        svg("line", { class: "tick", x1: this.x(at), x2: this.x(at), y1: HEIGHT - 4, y2: HEIGHT }),
      );
    }
  }

  drawLimit(width) {
    const y = this.y(this.spec.line);
    const over = this.points.at(-1)[this.spec.key] > this.spec.line;
    this.plot.append(
      svg("line", { class: `limit${over ? " over" : ""}`, x1: 0, x2: width, y1: y, y2: y }),
    );
    const label = svg("text", { class: "limit-label", x: 2, y: y - 3 });
    label.textContent = this.spec.lineLabel;
    this.plot.append(label);
  }

  drawLine() {
    const { key, steps, area } = this.spec;
    const xy = this.points.map((point) => [this.x(point.middle), this.y(point[key])]);
    let path = `M${xy[0][0].toFixed(1)} ${xy[0][1].toFixed(1)}`;
    for (const [x, y] of xy.slice(1)) {
      path += steps ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `L${x.toFixed(1)} ${y.toFixed(1)}`;
    }
    if (area) {
      const base = this.y(this.range[0]).toFixed(1);
      const closed = `${path}V${base}H${xy[0][0].toFixed(1)}Z`;
      this.plot.append(svg("path", { class: "area", d: closed }));
    }
    this.plot.append(svg("path", { class: "line", d: path }));
    const [x, y] = xy.at(-1);
    this.plot.append(svg("circle", { class: "last", cx: x, cy: y, r: 2.5 }));
  }

  drawBars() {
    const width = Math.max(2, Math.min(6, 200 / this.points.length));
    for (const point of this.points) {
      const x = Math.max(0, this.x(point.at) - width / 2);
      for (const [name, seconds] of [["whole", point.seconds], ["still", point.still]]) {
        const top = this.y(seconds);
        this.plot.append(
          svg("rect", { class: `bar ${name} ${point.state}`, x, y: top, width, height: HEIGHT - 2 - top }),
        );
      }
    }
  }

  /** Show one point under the pointer or the keyboard's cursor. */
  show(index) {
    this.shown = index;
    const point = this.points[index];
    const x = this.x(point.middle ?? point.at);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    this.cursor.setAttribute("visibility", "visible");
    this.say(point, clock(point.middle ?? point.at));
  }

  say(point, when) {
    this.value.textContent = this.spec.show(point[this.spec.key]);
    this.when.textContent = [point.version ? `v${point.version}` : "", when].join(" ").trim();
    this.label(when);
  }

  rest() {
    this.shown = undefined;
    this.cursor?.setAttribute("visibility", "hidden");
    if (this.points.length) {
      this.say(this.points.at(-1), "");
    } else {
      this.value.textContent = "\u2013";
      this.when.textContent = "nothing yet";
      this.label("");
    }
  }

  label(when) {
    const { title, note, show } = this.spec;
    const values = this.points.map((point) => point[this.spec.key]);
    const range = values.length
      ? `; from ${show(Math.min(...values))} to ${show(Math.max(...values))}, ${values.length} points`
      : "; nothing yet";
    const now = when ? `at ${when}` : "now";
    const limit = this.spec.lineLabel ? `; limit ${this.spec.lineLabel}` : "";
    this.node.setAttribute(
      "aria-label", `${title}, ${note}: ${this.value.textContent} ${now}${range}${limit}`,
    );
  }

  point(event) {
    if (!this.points.length) return;
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    const distance = (point) => Math.abs(this.x(point.middle ?? point.at) - x);
    let nearest = 0;
    this.points.forEach((point, index) => {
      if (distance(point) < distance(this.points[nearest])) nearest = index;
    });
    this.show(nearest);
  }

  step(event) {
    const last = this.points.length - 1;
    const from = this.shown ?? last;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.show(Math.min(last, Math.max(0, to)));
  }
}

const charts = CHARTS.map((spec) => new Chart(spec));

export function mountCharts() {
  byId("chart-grid").replaceChildren(...charts.map((chart) => chart.node));
  new ResizeObserver(() => charts.forEach((chart) => chart.span && chart.draw())).observe(
    byId("chart-grid"),
  );
}

export function updateCharts(history) {
  const { points, publishes, width } = history;
  for (const point of points) point.middle = point.at + width / 2;
  for (const publish of publishes) publish.still = standstill(publish.timings);
  const busy = points.filter((point) => point.groups || point.queued || point.reward !== null);
  const start = busy.length ? busy[0].at : history.start;
  const end = Math.max(start + width, ...points.map((point) => point.at + width));
  const inSpan = publishes.filter((publish) => publish.at >= start - 60 && publish.at <= end);
  const span = [Math.min(start, ...inSpan.map((publish) => publish.at)), end];
  for (const chart of charts) {
    chart.update(chart.spec.publishes ? inSpan : withIdle(points, width, chart.spec), span, inSpan);
  }
  byId("charts-span").textContent = points.length
    ? `${clock(span[0])} to ${clock(span[1])}, one point for ${duration(width)}; ticks are publishes`
    : "";
}

/** Rates and queues are zero where nothing happened; means simply have no value there. */
function withIdle(points, width, { key, area }) {
  if (!area) return points;
  const filled = [];
  for (const point of points) {
    const before = filled.at(-1);
    if (before && point.at - before.at > width * 1.5) {
      for (const middle of [before.middle + width, point.middle - width]) {
        filled.push({ at: middle - width / 2, middle, [key]: 0 });
      }
    }
    filled.push(point);
  }
  return filled;
}
