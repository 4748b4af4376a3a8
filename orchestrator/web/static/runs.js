import {$, el, live, replace} from "/static/dom.js";

const list = $("runs"), filter = $("filter");

function show(item) {
  const text = item.querySelector("[data-find]")?.dataset.find.toLowerCase() ?? "";
  item.hidden = !filter.value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

filter.addEventListener("input", () => [...list.children].forEach(show));

live("/api/runs", ({parts, order}) => {
  for (const [id, html] of Object.entries(parts)) {
    if (id === "summary") { replace($("summary"), html); continue; }
    let item = $(id);
    if (!item) { item = el("li", {id}); list.append(item); }
    replace(item, html);
    show(item);
  }
  const ids = order.filter((id) => id !== "summary");
  const present = [...list.children].map((item) => item.id);
  if (ids.join() !== present.join()) {
    const known = new Set(ids);
    for (const item of [...list.children]) if (!known.has(item.id)) item.remove();
    ids.forEach((id, index) => { if (list.children[index]?.id !== id) list.insertBefore($(id), list.children[index] ?? null); });
  }
  $("empty").hidden = ids.length > 0;
});
