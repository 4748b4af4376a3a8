// Every page of a run: its changing parts, and the actions with their dialog.
import {$, el, live, post, replace, toast} from "/static/dom.js";

const run = $("run"), api = run.dataset.api, name = run.dataset.name;

live(`${api}/updates?page=${encodeURIComponent(run.dataset.page)}`, ({parts}) => {
  for (const [part, html] of Object.entries(parts)) {
    const node = $(`part-${part}`);
    if (node) replace(node, html);
  }
  document.dispatchEvent(new CustomEvent("kgorch:update"));
});

document.querySelector(".tabs [aria-current]").scrollIntoView({inline: "center", block: "nearest"}); // on a narrow screen

const ACTIONS = {
  save: {title: "Save a checkpoint now?", text: "Training continues.", ok: "Save", verb: "save RUN"},
  stop: {title: "Stop the session?", text: "It saves a checkpoint, then ends. Resume continues at the exact sample.", ok: "Save and stop", verb: "stop RUN"},
  resume: {title: "Resume the run?", text: "A session starts on this machine, supervised in the background.", ok: "Resume", verb: "resume RUN"},
  queue: {title: "Put the run into the queue?", text: "The daemon starts it when it is due and there is room.", ok: "Queue", verb: "queue add RUN",
    fields: [{name: "at", label: "due at (empty: now)", type: "text", placeholder: "18:30"}, {name: "priority", label: "priority, -100 to 100 (empty: the plan's)", type: "number"}]},
  priority: {title: "Change the priority", text: "Among runs that wait for the same machine the highest starts first.", ok: "Change", verb: "queue add RUN --priority N",
    fields: [{name: "priority", label: "priority, -100 to 100", type: "number", required: true}]},
  unqueue: {title: "Take the run out of the queue?", text: "The daemon does not start it any more; Resume does.", ok: "Take out", verb: "queue drop RUN"},
  extend: {title: "Train longer?", text: "Give what is to change in the plan. The run goes on from its final checkpoint, by the queue.", ok: "Extend and queue",
    verb: "start PLAN --extend --set KEY=VALUE --queue",
    fields: [{name: "set", label: "KEY=VALUE, several with spaces between", type: "text", placeholder: "stage.train.args.epochs=20", required: true}]},
  pin: {title: "Keep this checkpoint?", text: "It stays until it is unpinned, whatever the plan keeps.", ok: "Pin", verb: "checkpoints pin RUN --step N"},
  unpin: {title: "Unpin this checkpoint?", text: "It is deleted when the plan does not keep it any more.", ok: "Unpin", verb: "checkpoints unpin RUN --step N"},
  drop: {title: "Delete this checkpoint?", text: "Its files are deleted for good. The newest verified one cannot be deleted.", ok: "Delete", verb: "checkpoints drop RUN --step N"},
};

const dialog = $("dialog"), form = $("dialog-form"), progress = $("dialog-progress"), ok = $("dialog-ok"), cancel = $("dialog-cancel");
let current = null;

run.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if ("export" in button.dataset) download(button);
  else if (button.dataset.action) ask(button);
});

function ask(button) {
  const action = ACTIONS[button.dataset.action], {stage, step} = button.dataset;
  current = {action: button.dataset.action, values: step ? {stage, step} : {}, opener: button.id, isOver: false};
  $("dialog-title").textContent = action.title;
  $("dialog-text").textContent = (step ? `Step ${step} of ${stage}. ` : "") + action.text;
  $("dialog-verb").textContent = `kgorch ${action.verb.replace("RUN", name).replace(" N", ` ${step ?? "N"}`)}`;
  $("dialog-fields").replaceChildren(...(action.fields ?? []).map((field) => el("label", {}, field.label,
    el("input", {name: field.name, type: field.type, placeholder: field.placeholder, required: field.required,
      value: field.name === "priority" ? button.dataset.value ?? "" : "", autocomplete: "off"}))));
  progress.textContent = "";
  progress.className = "";
  ok.textContent = action.ok;
  ok.hidden = false;
  ok.disabled = false;
  cancel.textContent = "Cancel";
  dialog.showModal();
}

const close = () => { dialog.close(); $(current?.opener)?.focus(); };
cancel.addEventListener("click", close);

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const mine = current, values = {...mine.values, ...Object.fromEntries(new FormData(form))};
  const tell = (text, kind = "") => {
    if (current === mine && dialog.open) { progress.textContent = text; progress.className = kind; }
    else if (kind) toast(`${ACTIONS[mine.action].ok}: ${text}`, kind === "bad");
  };
  ok.disabled = true;
  cancel.textContent = "Close";
  tell("asking …");
  try {
    const answer = await post(`${api}/actions/${mine.action}`, values);
    if (!answer.ok) throw new Error((await answer.text()).slice(0, 500));
    await lines(answer, (line) => {
      if (line.error) { tell(line.error + (line.next ? `\nnext: ${line.next}` : ""), "bad"); ok.disabled = false; }
      else if (line.done !== undefined) { tell(line.done, "good"); ok.hidden = true; cancel.focus(); }
      else tell(`${line.says} …`);
    });
  } catch (error) {
    tell(String(error.message || error), "bad");
    ok.disabled = false;
  }
});

async function lines(answer, take) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    rest += value ?? "";
    const parts = rest.split("\n");
    rest = parts.pop();
    parts.filter(Boolean).forEach((part) => take(JSON.parse(part)));
    if (done) return;
  }
}

async function download(button) {
  const {stage, step} = button.dataset;
  button.disabled = true;
  try {
    const answer = await post(`${api}/export`, {stage, step});
    if (!answer.ok) throw new Error((await answer.json()).error);
    const link = el("a", {href: URL.createObjectURL(await answer.blob()), download: `${name}-${stage}-${step}.safetensors`});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    toast(`step ${step} is exported`);
  } catch (error) {
    toast(`not exported: ${error.message}`, true);
  }
  button.disabled = false;
}
