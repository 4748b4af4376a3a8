// What all pages share. Text from the server enters the page as textContent, or as HTML that a template has escaped.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const $ = (id) => document.getElementById(id);

// formats

export function duration(s) {
  if (s === null || s === undefined || !isFinite(s)) return "–";
  if (s > 0 && s < 0.95) return `${Math.round(1000 * s)}ms`;
  if (s < 10) return `${s.toFixed(1)}s`;
  const whole = Math.round(s), two = (n) => String(n).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)}h ${two(Math.floor(whole % 3600 / 60))}m`;
  return `${Math.floor(whole / 86400)}d ${Math.floor(whole % 86400 / 3600)}h`;
}

export function size(count) {
  if (count === null || count === undefined) return "–";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(count) < 1024) return `${unit === "B" ? Math.round(count) : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} TiB`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!isFinite(value)) return "nan";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

const DAY = new Intl.DateTimeFormat("en-GB", {weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit"});
const CLOCK = new Intl.DateTimeFormat("en-GB", {hour: "2-digit", minute: "2-digit", second: "2-digit"});

export function day(at) {
  const date = new Date(at);
  return date.toDateString() === new Date().toDateString() ? CLOCK.format(date).slice(0, 5) : DAY.format(date).replace(",", "");
}

export const exact = (at) => `${DAY.format(new Date(at)).replace(",", "")}:${String(new Date(at).getSeconds()).padStart(2, "0")}`;

// Times are written by the server in UTC; here they become local, and relative ones go on counting.
function tell(node) {
  const at = new Date(node.dateTime);
  if (isNaN(at)) return;
  const s = (at - Date.now()) / 1000;
  let text;
  if ("ago" in node.dataset) text = s > 1 ? "just now" : `${duration(-s)} ago`; // a clock may have been set back
  else if ("in" in node.dataset) text = s > 0 ? `in ${duration(s)}` : `${duration(-s)} ago`;
  else text = day(at);
  if (node.textContent !== text) node.textContent = text;
  if (!node.title) node.title = at.toLocaleString();
}

export const times = (root = document) => root.querySelectorAll("time").forEach(tell);
times();
setInterval(() => { if (!document.hidden) times(); }, 1000);

// server

export async function json(url) {
  const answer = await fetch(url, {headers: {accept: "application/json"}, credentials: "same-origin"});
  const value = await answer.json().catch(() => ({error: `the server answered ${answer.status}`}));
  if (!answer.ok) throw new Error(value.error || answer.statusText);
  return value;
}

const csrf = document.querySelector("meta[name=csrf]").content;

export const post = (url, values) => fetch(url, {
  method: "POST", credentials: "same-origin", body: JSON.stringify(values),
  headers: {"content-type": "application/json", "x-csrf-token": csrf},
});

export function toast(text, isBad = false) {
  const note = el("p", {class: isBad ? "bad" : ""}, text);
  $("toasts").append(note);
  setTimeout(() => note.remove(), 8000);
}

// Replaces the content of a part. The focus stays where it was, by id.
export function replace(node, html) {
  const focused = node.contains(document.activeElement) ? document.activeElement.id : "";
  const open = [...node.querySelectorAll("details[open]")].length > 0;
  node.innerHTML = html;
  if (open) node.querySelectorAll("details").forEach((one) => { one.open = true; });
  times(node);
  if (focused) $(focused)?.focus();
}

// A stream of changed parts. onParts({parts: {id: html}, order: [ids]}).
export function live(url, onParts) {
  const link = $("link");
  const say = (text, isOff) => { if (link.textContent !== text) link.textContent = text; link.classList.toggle("off", isOff); };
  let source;
  const open = () => {
    source = new EventSource(url);
    source.addEventListener("parts", (event) => { say("live", false); onParts(JSON.parse(event.data)); });
    source.addEventListener("trouble", (event) => say(`cannot read: ${JSON.parse(event.data).text.slice(0, 200)}`, true));
    source.addEventListener("gone", () => { source.close(); say("this run was removed", true); });
    source.onerror = () => say("not connected: is kgorch web running?", true);
  };
  open();
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });
}
