import {$, el, json, number, size} from "/static/dom.js";

const api = $("run").dataset.api, log = $("log");
const MAX_LINES = 20000;

if (log) {
  let state = null, busy = false;
  const query = (more) => `${api}/logs?attempt=${encodeURIComponent($("attempt").value)}&file=${encodeURIComponent($("file").value)}${more}`;

  function files() {
    const chosen = $("file").value, names = $("attempt").selectedOptions[0].dataset.files.split(" ");
    $("file").replaceChildren(...names.map((name) => el("option", {value: name}, name.replace(".log", ""))));
    if (names.includes(chosen)) $("file").value = chosen;
  }

  const place = () => { $("log-place").textContent = state ? `bytes ${number(state.begin)} to ${number(state.end)} of ${size(state.size)}` : ""; $("older").hidden = !state || state.begin === 0; };
  const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  const text = (lines) => lines.length ? lines.join("\n") + "\n" : "";

  async function open(before = null) {
    busy = true;
    try {
      state = await json(query(before === null ? "" : `&at=${before}`));
      log.textContent = text(state.lines);
      if (!state.size) log.textContent = "(nothing was printed yet)";
      log.scrollTop = log.scrollHeight;
    } catch (error) { log.textContent = error.message; state = null; }
    place();
    busy = false;
  }

  async function older() {
    if (!state || busy) return;
    busy = true;
    const before = await json(query(`&at=${state.begin}`)), height = log.scrollHeight;
    log.prepend(text(before.lines));
    log.scrollTop += log.scrollHeight - height;
    state.begin = before.begin;
    place();
    busy = false;
  }

  async function follow() {
    if (!state || busy || !$("follow").checked || document.hidden) return;
    busy = true;
    try {
      const more = await json(query(`&what=after&at=${state.end}`));
      if (more.lines.length) {
        const stays = atEnd();
        if (!state.size) log.textContent = "";
        if (more.rotated) log.append("── the log was rotated ──\n");
        if (more.skipped) log.append("── lines were left out ──\n");
        log.append(text(more.lines));
        if (log.childNodes.length > 400) { const all = log.textContent.split("\n"); log.textContent = all.slice(-MAX_LINES).join("\n"); }
        if (stays) log.scrollTop = log.scrollHeight;
      }
      [state.end, state.size] = [more.end, more.size];
      place();
    } catch { /* the next look may succeed */ }
    busy = false;
  }

  let next = null;
  async function search(isMore) {
    const needle = $("search").value;
    if (!needle) { $("hits").hidden = true; return; }
    $("hits").hidden = false;
    $("hits-title").textContent = "Searching …";
    try {
      const found = await json(query(`&what=search&text=${encodeURIComponent(needle)}${isMore ? `&at=${next}` : ""}`));
      const items = found.hits.map((hit) => el("li", {}, marked(hit, needle)));
      if (isMore) $("hits-list").append(...items); else $("hits-list").replaceChildren(...items);
      next = found.next;
      $("hits-more").hidden = next === null;
      $("hits-title").textContent = `${$("hits-list").children.length} lines${next === null ? "" : `; ${size(next)} further back not searched yet`}`;
      if (!isMore) $("hits-title").focus();
    } catch (error) { $("hits-title").textContent = error.message; }
  }

  function marked(hit, needle) {
    const button = el("button", {type: "button"}), lower = hit.text.toLowerCase(), wanted = needle.toLowerCase();
    let at = 0;
    for (let to = lower.indexOf(wanted); to >= 0; to = lower.indexOf(wanted, at)) {
      button.append(hit.text.slice(at, to), el("mark", {}, hit.text.slice(to, to + wanted.length)));
      at = to + wanted.length;
    }
    button.append(hit.text.slice(at));
    button.addEventListener("click", () => { $("follow").checked = false; open(hit.at + 4096).then(() => log.focus()); });
    return button;
  }

  $("attempt").addEventListener("change", () => { files(); open(); });
  $("file").addEventListener("change", () => open());
  $("older").addEventListener("click", older);
  $("follow").addEventListener("change", () => { if ($("follow").checked) open(); });
  $("log-form").addEventListener("submit", (event) => { event.preventDefault(); search(false); });
  $("hits-more").addEventListener("click", () => search(true));
  $("hits-close").addEventListener("click", () => { $("hits").hidden = true; $("search").focus(); });
  setInterval(follow, 1000);
  files();
  open();
}
