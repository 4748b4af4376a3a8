import {$, el, json, number} from "/static/dom.js";
import {drawCurve, marksOf, newChart} from "/static/curves.js";

const run = $("run"), api = run.dataset.api, started = new Date(run.dataset.started), box = $("charts");
const charts = new Map();
let answer = null, timeline = null, busy = false, again = false, lastLook = 0;

const axis = () => document.querySelector("input[name=axis]:checked").value;

async function load() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const smooth = Number($("smooth").value);
    [answer, timeline] = await Promise.all([json(`${api}/curves?axis=${axis()}&smooth=${smooth}`), json(`${api}/timeline`)]);
    show();
  } catch (error) {
    $("no-charts").textContent = error.message;
    $("no-charts").hidden = false;
  }
  busy = false;
  if (again) { again = false; load(); }
}

function show() {
  const words = $("metric-filter").value.toLowerCase().split(/\s+/), used = new Set();
  const marks = $("marks").checked ? marksOf(timeline, answer.axis, started) : [];
  for (const curve of answer.charts) {
    if (!words.every((word) => curve.name.toLowerCase().includes(word))) continue;
    const key = `${answer.axis} ${curve.name}`;
    used.add(key);
    if (!charts.has(key)) charts.set(key, newChart(box, curve, answer.axis));
    drawCurve(charts.get(key), curve, {marks, log: $("log").checked});
  }
  for (const [key, chart] of charts) if (!used.has(key)) { chart.remove(); charts.delete(key); }
  $("no-charts").hidden = answer.charts.length > 0;
  table();
}

function table() {
  const value = (v) => v === null ? "nan" : number(v);
  const rows = answer.table.map((one) => el("tr", {}, el("td", {class: "wrap"}, el("bdi", {}, one.name)), el("td", {}, one.stage), el("td", {}, value(one.last)),
    el("td", {}, number(one.last_step)), el("td", {}, `${value(one.best)} (${one.mode})`), el("td", {}, number(one.best_step)), el("td", {}, number(one.values))));
  const head = ["metric", "stage", "last", "at step", "best", "at step", "values"].map((text) => el("th", {scope: "col"}, text));
  $("metric-table").replaceChildren(el("table", {class: "plain"}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}

$("controls").addEventListener("submit", (event) => event.preventDefault());
document.querySelectorAll("input[name=axis]").forEach((input) => input.addEventListener("change", load));
$("smooth").addEventListener("input", () => { const v = Number($("smooth").value); $("smooth-value").textContent = v ? v.toFixed(2) : "off"; });
$("smooth").addEventListener("change", load);
for (const id of ["log", "marks"]) $(id).addEventListener("change", () => answer && show());
$("metric-filter").addEventListener("input", () => answer && show());
document.addEventListener("kgorch:update", () => { if (Date.now() - lastLook > 2500) { lastLook = Date.now(); load(); } });
lastLook = Date.now();
load();
