// Charts by uPlot, in the colours of the page. A chart can be read by keyboard: arrows move along it, + and - zoom, 0 shows all.
import {duration, el, exact, number, size} from "/static/dom.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const all = new Set();
const POWERS = Array.from({length: 60}, (_, power) => 2 ** power);
const FORMATS = {
  "%": (v) => `${number(v)}%`, bytes: size, "bytes/s": (v) => `${size(v)}/s`, s: duration, h: (v) => `${number(Math.round(100 * v) / 100)} h`, W: (v) => `${number(v)} W`, "°C": (v) => `${number(v)} °C`,
};

export class Chart {
  // x: "step", "hours", "epoch" or "time". Call draw() with the data.
  constructor(container, {title, unit = "", x = "step", sync = null}) {
    this.x = x; this.sync = sync; this.title = title; this.format = FORMATS[unit] ?? number; this.unit = unit;
    this.plot = el("div", {class: "plot", tabindex: "0", role: "img"});
    this.legend = el("ul", {class: "legend"});
    this.heading = el(container.closest(".card") ? "h3" : "h2", {title}, el("bdi", {}, title));
    this.figure = el("figure", {class: "chart"}, this.heading, this.plot, this.legend);
    container.append(this.figure);
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(this.plot);
    all.add(this);
  }

  // series: [{label, x: [...], y: [...], faint?: bool, dash?: bool, limit?: bool}]; marks: [{x, kind, text}]
  draw({series, marks = [], log = false}) {
    const shape = JSON.stringify([series.map((one) => [one.label, one.faint, one.limit, one.colour]), log, this.x]);
    this.data = {series, marks, log};
    let data = series.length === 1 ? [series[0].x, series[0].y] : uPlot.join(series.map((one) => [one.x, one.y]));
    // Copies, for the caller draws the same arrays again in a linear chart.
    if (log) data = [data[0], ...data.slice(1).map((ys) => ys.map((y) => y <= 0 ? null : y))];
    if (this.u && shape === this.shape) {
      const {min, max} = this.u.scales.x, xs = this.u.data[0];
      const isZoomed = xs.length && (min > xs[0] || max < xs[xs.length - 1]);
      this.u.setData(data, !isZoomed);
      if (isZoomed) this.u.redraw();
    } else {
      this.shape = shape;
      this.u?.destroy();
      this.u = new uPlot(this.options(series, log), data, this.plot);
    }
    this.describe();
  }

  options(series, log) {
    const axis = {stroke: colour("--dim"), grid: {stroke: colour("--grid"), width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif"};
    const short = (v) => v === null ? "" : this.unit === "" && Math.abs(v) >= 1e4 ? Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 2}).format(v) : this.format(v);
    return {
      width: Math.max(120, this.plot.clientWidth), height: this.plot.clientHeight || 210,
      cursor: {sync: this.sync ? {key: this.sync} : undefined, points: {size: 6}, drag: {x: true, y: false, setScale: true}},
      legend: {show: false},
      scales: {x: {time: this.x === "time"}, y: {distr: log ? 3 : 1, range: log ? undefined : (u, min, max) => range(min, max, this.unit, this.data.series)}},
      axes: [
        {...axis, space: 76, size: 28, values: this.x === "time" ? (u, values) => clocks(values) : (u, values) => values.map((v) => v === null ? "" : this.x === "hours" ? `${number(v)} h` : Intl.NumberFormat("en", {notation: "compact"}).format(v))},
        {...axis, size: this.unit.startsWith("bytes") ? 74 : 56, incrs: this.unit.startsWith("bytes") ? POWERS : undefined, values: (u, values) => values.map((v) => v === null ? "" : short(v))},
      ],
      series: [{}, ...series.map((one, index) => ({
        label: one.label, spanGaps: false, points: {show: one.y.length < 40, size: 4},
        stroke: one.limit ? colour("--bad") : colour(`--c${(one.colour ?? index) % 8}`) + (one.faint ? "55" : ""), width: one.faint ? 1 : 1.6, dash: one.limit ? [5, 4] : undefined,
      }))],
      hooks: {draw: [(u) => this.drawMarks(u)], setCursor: [(u) => this.tell(u)]},
    };
  }

  drawMarks(u) {
    const {ctx, bbox} = u, ratio = devicePixelRatio || 1;
    ctx.save();
    for (const mark of this.data.marks) {
      const at = u.valToPos(mark.x, "x", true);
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour({session: "--dim", crash: "--bad", rung: "--c3", remedy: "--c1", best: "--good"}[mark.kind] ?? "--dim");
      ctx.globalAlpha = mark.kind === "session" ? .35 : .8;
      ctx.lineWidth = ratio;
      ctx.setLineDash(mark.kind === "session" ? [2 * ratio, 4 * ratio] : []);
      ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
      if (mark.kind !== "session") { ctx.beginPath(); ctx.arc(at, bbox.top + 4 * ratio, 3.5 * ratio, 0, 7); ctx.fill(); }
    }
    ctx.restore();
  }

  at(v) {
    return this.x === "time" ? exact(1000 * v) : this.x === "hours" ? `${number(Math.round(100 * v) / 100)} h` : `${this.x} ${number(v)}`;
  }

  // The values under the cursor, or the last ones.
  tell(u) {
    const index = u.cursor.idx, shown = this.data.series.map((one, i) => {
      const ys = u.data[i + 1];
      let at = index ?? ys.length - 1;
      while (at >= 0 && (ys[at] === null || ys[at] === undefined)) at--;
      return {one, value: at >= 0 ? ys[at] : null};
    }).filter(({one}) => !one.faint);
    const items = shown.map(({one, value}) => el("li", {class: one.limit ? "limit" : `s${(one.colour ?? this.data.series.indexOf(one)) % 8}`},
      el("span", {}, el("bdi", {}, one.label)), el("b", {}, value === null ? "–" : this.format(value))));
    if (index !== null && index !== undefined && u.data[0].length) items.push(el("li", {class: "where"}, this.at(u.data[0][index])));
    this.legend.replaceChildren(...items);
  }

  describe() {
    const text = this.data.series.filter((one) => !one.faint).map((one) => {
      const known = one.y.filter((y) => y !== null && y !== undefined);
      return known.length ? `${one.label}: last ${this.format(known[known.length - 1])}, lowest ${this.format(Math.min(...known))}, highest ${this.format(Math.max(...known))}` : `${one.label}: no values`;
    }).join("; ");
    this.plot.setAttribute("aria-label", `${this.title}. ${text}. Arrow keys read single values.`);
    this.tell(this.u);
  }

  key(event) {
    const u = this.u, xs = u?.data[0];
    if (!xs?.length) return;
    const {min, max} = u.scales.x, width = max - min, middle = (min + max) / 2;
    const step = {ArrowLeft: -1, ArrowRight: 1, Home: -xs.length, End: xs.length}[event.key];
    if (step) {
      const index = Math.max(0, Math.min(xs.length - 1, (u.cursor.idx ?? xs.length - 1) + step));
      u.setCursor({left: u.valToPos(xs[index], "x"), top: u.bbox.height / 2 / (devicePixelRatio || 1)});
      const values = this.data.series.map((one, i) => [one, u.data[i + 1][index]]).filter(([one, y]) => !one.faint && y !== null && y !== undefined);
      this.plot.setAttribute("aria-label", `${this.at(xs[index])}: ${values.map(([one, y]) => `${one.label} ${this.format(y)}`).join(", ")}`);
    } else if (event.key === "+" || event.key === "=") u.setScale("x", {min: middle - width / 4, max: middle + width / 4});
    else if (event.key === "-") u.setScale("x", {min: Math.max(xs[0], middle - width), max: Math.min(xs[xs.length - 1], middle + width)});
    else if (event.key === "0") u.setScale("x", {min: xs[0], max: xs[xs.length - 1]});
    else return;
    event.preventDefault();
  }

  resize() {
    const width = Math.max(120, this.plot.clientWidth);
    if (this.u && Math.abs(width - this.u.width) > 1) this.u.setSize({width, height: this.plot.clientHeight});
  }

  restyle() {
    if (!this.data) return;
    this.shape = "";
    this.draw(this.data);
  }

  remove() { this.u?.destroy(); this.figure.remove(); all.delete(this); }
}

// 24 hours; the date where a day begins, else at the first tick.
function clocks(values) {
  const two = (n) => String(n).padStart(2, "0"), isFine = values.length > 1 && values[1] - values[0] < 60;
  const dates = values.map((v) => new Date(1000 * v)), isMidnight = (date) => date.getHours() === 0 && date.getMinutes() === 0 && date.getSeconds() === 0;
  const hasMidnight = dates.some(isMidnight);
  return dates.map((date, index) => {
    const name = date.toLocaleDateString("en-GB", {day: "numeric", month: "short"});
    const clock = `${two(date.getHours())}:${two(date.getMinutes())}${isFine ? `:${two(date.getSeconds())}` : ""}`;
    return isMidnight(date) ? name : index === 0 && !hasMidnight && !isFine ? `${clock} ${name}` : clock;
  });
}

function range(min, max, unit, series) {
  if (min === null || max === null) return [0, 1];
  if (unit === "%") return [0, Math.max(100, max)];
  if (unit && !["°C", "h"].includes(unit)) return [0, max * 1.08 || 1];
  const room = (max - min || Math.abs(max) || 1) * .06;
  return [min - room, max + room];
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => all.forEach((chart) => chart.restyle()));
