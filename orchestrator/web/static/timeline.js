// Sessions, attempts and events over time, as SVG that is drawn anew for each zoom: only what is in view.
import {$, day, duration, el, exact, number} from "/static/dom.js";

const NS = "http://www.w3.org/2000/svg", HEIGHT = 132;
const BAD = new Set(["crashed", "out_of_memory", "diverged", "hung", "lost", "unsaved"]);
const LANES = {session: [6, 26], attempt: [38, 14], save: [62, 12], other: [84, 12]};

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const words = (code) => String(code ?? "").replaceAll("_", " ");

export class Timeline {
  constructor(box, tip, table) {
    Object.assign(this, {box, tip, table, view: null, chosen: -1, items: []});
    box.addEventListener("wheel", (event) => this.wheel(event), {passive: false});
    box.addEventListener("pointerdown", (event) => this.drag(event));
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("keydown", (event) => this.key(event));
    for (const [id, act] of [["zoom-in", () => this.zoom(.5)], ["zoom-out", () => this.zoom(2)], ["pan-left", () => this.pan(-.3)], ["pan-right", () => this.pan(.3)], ["zoom-all", () => this.all()]]) $(id).addEventListener("click", act);
    new ResizeObserver(() => this.draw()).observe(box);
  }

  show(told) {
    this.told = told;
    const first = Date.parse(told.from), last = Math.max(Date.parse(told.to), first + 1000);
    const follows = !this.view || (this.view[0] <= this.first && this.view[1] >= this.last - 1);
    [this.first, this.last] = [first, last + (last - first) * .02];
    if (follows) this.view = [this.first, this.last];
    this.items = [
      ...told.sessions.map((one) => ({lane: "session", from: Date.parse(one.from), to: Date.parse(one.to), css: `session ${one.over ? one.phase : "live"}`, label: String(one.number),
        text: `session ${one.number} at ${one.site}, ${one.over ? words(one.phase) : "running"}${one.why ? ` (${one.why})` : ""}: steps ${number(one.first_step)} to ${number(one.last_step)}, ${duration((Date.parse(one.to) - Date.parse(one.from)) / 1000)}`})),
      ...told.attempts.map((one) => ({lane: "attempt", from: Date.parse(one.from), to: Date.parse(one.to), css: `attempt ${BAD.has(one.outcome) ? "bad" : ""}`,
        text: `attempt ${one.session}.${one.number} of ${one.stage}, ${one.ranks} rank${one.ranks === 1 ? "" : "s"}, ${one.outcome ? words(one.outcome) : "running"}${one.cause ? `: ${one.cause}` : ""}, steps ${number(one.first_step)} to ${number(one.last_step)}`})),
      ...told.marks.map((one) => ({lane: one.kind === "save" ? "save" : one.kind === "wall" ? "wall" : "other", from: Date.parse(one.at), to: Date.parse(one.at),
        css: `m-${["save", "rung", "remedy", "crash", "wall"].includes(one.kind) ? one.kind : "event"}`, kind: one.kind, text: one.text + (one.step !== null && one.kind !== "save" ? `, step ${number(one.step)}` : "")})),
    ];
    this.marks = this.items.filter((one) => one.lane !== "wall").sort((a, b) => a.from - b.from);
    this.draw();
    this.rows();
  }

  draw() {
    const width = this.box.clientWidth;
    if (!this.view || !width) return;
    const [from, to] = this.view, scale = width / (to - from), x = (at) => (at - from) * scale;
    const root = svg("svg", {viewBox: `0 0 ${width} ${HEIGHT}`, role: "presentation", "aria-hidden": "true"}), drawn = new Set();
    for (const tick of ticks(from, to, width)) root.append(svg("line", {class: "axis", x1: x(tick), x2: x(tick), y1: 0, y2: HEIGHT - 18}), svg("text", {x: x(tick) + 3, y: HEIGHT - 5}, label(tick, to - from)));
    this.hit = [];
    for (const one of this.items) {
      if (one.to < from || one.from > to) continue;
      const left = x(one.from), right = x(one.to), isChosen = this.marks[this.chosen] === one ? " chosen" : "";
      if (one.lane === "wall") { root.append(svg("line", {class: "m-wall", x1: left, x2: left, y1: 2, y2: 58})); continue; }
      const [top, height] = LANES[one.lane];
      if (one.from === one.to) {
        const cell = `${one.css} ${Math.round(left)}`;
        if (drawn.has(cell) && !isChosen) continue; // several in one pixel look like one
        drawn.add(cell);
      }
      this.hit.push({left: Math.min(left, (left + right) / 2 - 3), right: Math.max(right, (left + right) / 2 + 3), top, bottom: top + height, one});
      root.append(shape(one, left, right, top, height, isChosen));
      if (one.label && right - left > 22) root.append(svg("text", {class: "label", x: Math.max(left, 0) + 5, y: top + 17}, one.label));
    }
    this.box.replaceChildren(root);
  }

  rows() {
    const body = [...this.told.sessions].reverse().slice(0, 200).map((one) => el("tr", {}, el("td", {}, String(one.number)), el("td", {}, day(one.from)), el("td", {}, duration((Date.parse(one.to) - Date.parse(one.from)) / 1000)),
      el("td", {}, `${number(one.first_step)} → ${number(one.last_step)}`), el("td", {}, one.over ? words(one.phase) : "running"), el("td", {class: "wrap"}, one.why)));
    const head = ["session", "began", "lasted", "steps", "ended", "by"].map((text) => el("th", {scope: "col"}, text));
    this.table.replaceChildren(el("table", {class: "plain"}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)));
  }

  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    const [from, to] = this.view, least = 2000;
    let width = Math.min((to - from) * factor, this.last - this.first);
    width = Math.max(width, least);
    const share = (at - from) / (to - from);
    this.place(at - share * width, width);
  }

  pan(share) { const [from, to] = this.view; this.place(from + share * (to - from), to - from); }
  all() { this.view = [this.first, this.last]; this.draw(); }

  place(from, width) {
    from = Math.max(this.first, Math.min(from, this.last - width));
    this.view = [from, from + width];
    this.draw();
  }

  wheel(event) {
    if (!this.view || !(event.ctrlKey || event.shiftKey || event.altKey) && Math.abs(event.deltaX) < Math.abs(event.deltaY) && !this.box.matches(":focus")) return;
    event.preventDefault();
    const at = this.view[0] + (event.clientX - this.box.getBoundingClientRect().left) / this.box.clientWidth * (this.view[1] - this.view[0]);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / 600);
    else this.zoom(event.deltaY > 0 ? 1.25 : .8, at);
  }

  drag(event) {
    if (!this.view) return;
    const start = event.clientX, [from, to] = this.view;
    const move = (next) => this.place(from - (next.clientX - start) / this.box.clientWidth * (to - from), to - from);
    const end = () => { removeEventListener("pointermove", move); removeEventListener("pointerup", end); removeEventListener("pointercancel", end); };
    addEventListener("pointermove", move); addEventListener("pointerup", end); addEventListener("pointercancel", end);
  }

  point(event) {
    const box = this.box.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const found = (this.hit ?? []).filter((one) => x >= one.left - 3 && x <= one.right + 3 && y >= one.top - 3 && y <= one.bottom + 3).pop();
    if (found) this.say(found.one);
  }

  say(one) { this.tip.textContent = `${exact(one.from)}: ${one.text}`; }

  key(event) {
    if (!this.view) return;
    const act = {ArrowLeft: () => this.pan(-.2), ArrowRight: () => this.pan(.2), "+": () => this.zoom(.5), "=": () => this.zoom(.5), "-": () => this.zoom(2), 0: () => this.all(), n: () => this.choose(1), p: () => this.choose(-1)}[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  choose(by) {
    if (!this.marks.length) return;
    this.chosen = this.chosen < 0 ? (by > 0 ? 0 : this.marks.length - 1) : Math.max(0, Math.min(this.marks.length - 1, this.chosen + by));
    const one = this.marks[this.chosen];
    if (one.from < this.view[0] || one.from > this.view[1]) this.place(one.from - (this.view[1] - this.view[0]) / 2, this.view[1] - this.view[0]);
    this.say(one);
    this.draw();
  }
}

function shape(one, left, right, top, height, isChosen) {
  const middle = top + height / 2;
  if (one.kind === "crash") return svg("path", {class: one.css + isChosen, d: `M${left - 6} ${top + height}L${left} ${top}L${left + 6} ${top + height}Z`});
  if (one.kind === "rung" || one.kind === "remedy") return svg("path", {class: one.css + isChosen, d: `M${left - 6} ${middle}L${left} ${middle - 6}L${left + 6} ${middle}L${left} ${middle + 6}Z`});
  if (one.kind === "save") return svg("rect", {class: one.css + isChosen, x: left - 1.25, y: top, width: 2.5, height, rx: 1});
  if (one.kind) return svg("circle", {class: one.css + isChosen, cx: left, cy: middle, r: 4.5});
  return svg("rect", {class: one.css + isChosen, x: left, y: top, width: Math.max(1.5, right - left - 1), height, rx: 3});
}

function ticks(from, to, width) {
  const wanted = (to - from) / Math.max(2, width / 110);
  const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000].map((s) => 1000 * s);
  const step = steps.find((one) => one >= wanted) ?? Math.ceil(wanted / 2592e6) * 2592e6, zone = new Date(from).getTimezoneOffset() * 60000, found = [];
  for (let at = Math.ceil((from - zone) / step) * step + zone; at < to; at += step) found.push(at);
  return found;
}

function label(at, span) {
  const date = new Date(at), two = (n) => String(n).padStart(2, "0"), clock = `${two(date.getHours())}:${two(date.getMinutes())}`;
  if (span < 900000) return `${clock}:${two(date.getSeconds())}`;
  const name = date.toLocaleDateString("en-GB", {day: "numeric", month: "short"});
  return span < 36e5 * 20 ? clock : date.getHours() || date.getMinutes() ? `${name} ${clock}` : name;
}
