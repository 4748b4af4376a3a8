// From the answers of /curves and /timeline to charts.
import {Chart} from "/static/chart.js";

export function marksOf(timeline, axis, started) {
  if (!timeline || axis === "epoch") return [];
  const hours = (at) => (new Date(at) - started) / 3600000, marks = [];
  for (const one of timeline.sessions.slice(1)) marks.push({x: axis === "step" ? one.first_step : hours(one.from), kind: "session", text: `session ${one.number}`});
  for (const mark of timeline.marks) {
    const kind = mark.best ? "best" : mark.kind;
    if (["best", "crash", "rung", "remedy"].includes(kind) && (axis === "hours" || mark.step !== null)) marks.push({x: axis === "step" ? mark.step : hours(mark.at), kind, text: mark.text});
  }
  return marks;
}

export function drawCurve(chart, curve, {marks, log}) {
  const many = curve.series.length > 1, series = [];
  curve.series.forEach((one, index) => {
    const label = (many ? one.stage : curve.name) + (one.not_finite ? ` (${one.not_finite} not a number)` : "");
    if (one.raw) series.push({label: `${label} raw`, x: one.x, y: one.raw, faint: true, colour: index});
    series.push({label, x: one.x, y: one.y, colour: index});
  });
  chart.draw({series, marks, log});
}

export const newChart = (container, curve, axis) => new Chart(container, {title: curve.name + (curve.mode ? ` (${curve.mode === "min" ? "lower" : "higher"} is better)` : ""), x: axis, sync: "curves"});
