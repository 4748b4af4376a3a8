import {$, json} from "/static/dom.js";
import {Chart} from "/static/chart.js";
import {drawCurve, marksOf, newChart} from "/static/curves.js";
import {Timeline} from "/static/timeline.js";

const run = $("run"), api = run.dataset.api, started = new Date(run.dataset.started);
const timeline = new Timeline($("timeline"), $("timeline-tip"), $("timeline-table"));
let chart = null, metric, ends = null, busy = false, last = 0;

async function load() {
  if (busy) return;
  busy = true;
  last = Date.now();
  try {
    const told = await json(`${api}/timeline`);
    timeline.show(told);
    const {charts} = await json(`${api}/curves?headline=1`);
    const [curve = null] = charts;
    if (curve?.name !== metric || !curve) { // a chart keeps the title that it was made with
      chart?.remove();
      $("headline").textContent = curve ? "" : "No metrics yet.";
      chart = curve && newChart($("headline"), curve, "step");
      metric = curve?.name;
    }
    if (curve) drawCurve(chart, curve, {marks: marksOf(told, "step", started), log: false});
    const {series} = await json(`${api}/forecasts`);
    $("forecasts").hidden = !series.length;
    if (series.length) {
      ends ??= new Chart($("ends"), {title: "Predicted end", unit: "h", x: "hours"});
      ends.draw({series: series.map((one) => ({...one, limit: one.label === "actual end", faint: ["earliest", "latest"].includes(one.label), colour: 0}))});
    }
  } catch (error) {
    $("timeline-tip").textContent = error.message;
  }
  busy = false;
}

document.addEventListener("kgorch:update", () => { if (Date.now() - last > 2500) load(); });
load();
