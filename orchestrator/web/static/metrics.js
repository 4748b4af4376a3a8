import {$, el, json, number} from "/static/dom.js";
import {drawCurve, marksOf, newChart} from "/static/curves.js";

const run = $("run"), api = run.dataset.api, started = new Date(run.dataset.started), box = $("charts");
const charts = new Map();
const MOST = 60, MOST_LETTERS = 30000; // names of one request, and their letters: servers refuse a longer address
let answer = null, timeline = null, busy = false, again = false, lastLook = 0;

const axis = () => document.querySelector("input[name=axis]:checked").value;
const words = () => $("metric-filter").value.toLowerCase().split(/\s+/).filter((word) => word);
const matching = (asked = words()) => answer.names.filter((name) => asked.every((word) => name.toLowerCase().includes(word)));

// Without names the server answers with the first ones.
function query() {
  const found = new URLSearchParams({axis: axis(), smooth: Number($("smooth").value)});
  if (!answer || answer.names.length <= MOST || !words().length) return found;
  let letters = 0;
  for (const name of matching().slice(0, MOST)) {
    letters += encodeURIComponent(name).length;
    if (letters > MOST_LETTERS) break;
    found.append("name", name);
  }
  return found;
}

async function load() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const isFirst = !answer;
    [answer, timeline] = await Promise.all([json(`${api}/curves?${query()}`), json(`${api}/timeline`)]);
    show();
    if (isFirst) find(); // a browser restores what was typed before a reload
  } catch (error) {
    $("no-charts").textContent = error.message;
    $("no-charts").hidden = false;
  }
  busy = false;
  if (again) { again = false; load(); }
}

function show() {
  const found = matching(), wanted = new Set(found), used = new Set();
  const marks = $("marks").checked ? marksOf(timeline, answer.axis, started) : [];
  for (const curve of answer.charts) {
    if (!wanted.has(curve.name)) continue;
    const key = `${answer.axis} ${curve.name}`;
    used.add(key);
    if (!charts.has(key)) charts.set(key, newChart(box, curve, answer.axis));
    drawCurve(charts.get(key), curve, {marks, log: $("log").checked});
  }
  for (const [key, chart] of charts) if (!used.has(key)) { chart.remove(); charts.delete(key); }
  $("no-charts").hidden = answer.names.length > 0;
  const rest = found.length > used.size ? `${used.size} of ${found.length} metrics are shown. Filter by name to see the others.` : "";
  $("metric-count").textContent = answer.names.length && !found.length ? "No metric has such a name." : rest;
  table();
}

// After the filter has changed: what the answer has is shown at once, and what it does not have is asked for.
function find() {
  show();
  const known = new Set(answer.charts.map((curve) => curve.name));
  if (matching().slice(0, MOST).some((name) => !known.has(name))) load();
}

function table() {
  const value = (v) => v === null ? "nan" : number(v);
  const rows = answer.table.map((one) => el("tr", {}, el("td", {class: "wrap"}, el("bdi", {}, one.name)), el("td", {}, one.stage), el("td", {}, value(one.last)),
    el("td", {}, number(one.last_step)), el("td", {}, one.is_judged ? `${value(one.best)} (${one.mode})` : ""), el("td", {}, one.is_judged ? number(one.best_step) : ""), el("td", {}, number(one.values))));
  const head = ["metric", "stage", "last", "at step", "best", "at step", "values"].map((text) => el("th", {scope: "col"}, text));
  $("metric-table").replaceChildren(el("table", {class: "plain"}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}

$("controls").addEventListener("submit", (event) => event.preventDefault());
document.querySelectorAll("input[name=axis]").forEach((input) => input.addEventListener("change", load));
$("smooth").addEventListener("input", () => { const v = Number($("smooth").value); $("smooth-value").textContent = v ? v.toFixed(2) : "off"; });
$("smooth").addEventListener("change", load);
for (const id of ["log", "marks"]) $(id).addEventListener("change", () => answer && show());
$("metric-filter").addEventListener("input", () => answer && find());
document.addEventListener("kgorch:update", () => { if (Date.now() - lastLook > 2500) { lastLook = Date.now(); load(); } });
lastLook = Date.now();
load();
