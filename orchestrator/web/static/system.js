import {$, json} from "/static/dom.js";
import {Chart} from "/static/chart.js";

const api = $("run").dataset.api, box = $("charts"), charts = new Map();
let busy = false;

async function load() {
  if (busy) return;
  busy = true;
  const recent = document.querySelector("input[name=window]:checked").value;
  try {
    const answer = await json(`${api}/system?session=${encodeURIComponent($("session").value)}&window=${recent}`);
    const used = new Set();
    for (const one of answer.charts) {
      used.add(one.name);
      if (!charts.has(one.name)) charts.set(one.name, new Chart(box, {title: one.title, unit: one.unit, x: "time", sync: "system"}));
      const series = one.lines.map((line) => ({label: line.key, x: answer.t, y: line.y}));
      if (one.limit !== null) series.push({label: "limit", x: answer.t, y: answer.t.map(() => one.limit), limit: true});
      charts.get(one.name).draw({series});
    }
    for (const [name, chart] of charts) if (!used.has(name)) { chart.remove(); charts.delete(name); }
    $("no-charts").hidden = answer.charts.length > 0;
  } catch (error) {
    $("no-charts").textContent = error.message;
    $("no-charts").hidden = false;
  }
  busy = false;
}

$("controls").addEventListener("change", load);
$("controls").addEventListener("submit", (event) => event.preventDefault());
let last = Date.now();
document.addEventListener("kgorch:update", () => { if ($("session").selectedIndex === 0 && Date.now() - last > 2500) { last = Date.now(); load(); } });
load();
