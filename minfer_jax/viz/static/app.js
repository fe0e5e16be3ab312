// The page: a run that comes as events or out of a file, and the views of it.

import { graphView, nodeView } from "/graph.js";
import { attentionView, lensView } from "/maps.js";
import { el } from "/pane.js";
import { Phase, Run, visible } from "/trace.js";

const MOST_BYTES = 2 ** 29; // of a trace file
const ROW = 26; // pixels of a step in the list
const $ = (id) => document.getElementById(id);

const state = {
  run: null, node: null, chosen: -1, colour: "samples", graph: null, structure: null, model: null,
  step() { return this.run?.steps[this.chosen] ?? null; },
  phase() { return this.step()?.phase ?? this.run?.phases.at(-1) ?? (this.run ? null : this.structure); },
  layers() { return this.phase()?.layers || 1; },
  heads() {
    const phase = this.phase(), slot = phase?.byName.get("blk.0.weights");
    return slot === undefined ? 1 : phase?.nodes[slot].shape[2] || 1;
  },
};

const graph = graphView($("graph"), state, chooseNode);
const showNode = nodeView($("node"), state, chooseNode);
const attention = attentionView(state, { box: $("attention"), panel: $("view-attention"), layer: $("layer"), head: $("head"), heads: $("heads"), told: $("attention-told") });
const lens = lensView(state, { box: $("lens"), panel: $("view-lens"), note: $("lens-note"), told: $("lens-told") });

function say(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

// What has changed is drawn once a frame, however many events there were.
let due = false;
function changed() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    graph.redraw(); showNode(); showTop(); showSteps();
    $("answer").textContent = state.run ? state.run.answer : "Run a prompt, or open a trace.";
    $("answer").classList.toggle("empty", !state.run);
    $("save").disabled = !state.run?.finished || !state.run.steps.length;
  });
}

function begin(run) {
  const name = state.node === null ? null : state.phase()?.nodes[state.node]?.name;
  state.run = run; state.chosen = run.steps.length ? 0 : -1;
  state.node = name === null ? null : state.phase()?.byName.get(name) ?? null;
  $("model").textContent = run.model;
  $("steps").scrollTop = 0;
  colours(); attention.limits(); attention.reset(); lens.reset(); changed();
}

function colours() {
  const names = ["samples", ...(state.phase()?.stats ?? [])];
  if ($("colour").options.length === names.length) return;
  $("colour").replaceChildren(...names.map((name) => el("option", { value: name, textContent: name })));
  if (!names.includes(state.colour)) state.colour = "samples";
  $("colour").value = state.colour;
}

function chooseNode(slot) {
  state.node = slot;
  const layer = /^blk\.(\d+)\./.exec(state.phase().nodes[slot].name);
  if (layer) attention.layer(layer[1]);
  graph.show(slot);
  changed();
}

function chooseStep(index) {
  const before = state.phase(), name = state.node === null ? null : before?.nodes[state.node]?.name;
  state.chosen = Math.max(0, Math.min(state.run.steps.length - 1, index));
  if (name !== null && state.phase() !== before) state.node = state.phase().byName.get(name) ?? null;
  const top = state.chosen * ROW, list = $("steps");
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  colours(); changed();
}

function showTop() {
  const step = state.step();
  if (!step) { $("top").replaceChildren(el("p", { className: "empty", textContent: "Nothing yet." })); return; }
  const rows = step.top.map((one) => el("div", { className: "choice" },
    el("span", { textContent: state.run.shown(one.id) }),
    el("div", { className: "bar" }, el("i", { style: { width: `${one.p * 100}%` } })),
    el("span", { className: "number", textContent: `${(one.p * 100).toFixed(1)} %` })));
  const what = step.token === null ? "after the prompt" : `after “${visible(step.text)}”`;
  $("top").replaceChildren(...rows, el("p", { className: "fact", textContent: `Entropy ${step.exact ? "" : "at least "}${step.entropy.toFixed(2)} bits, ${what}.` }));
}

const space = el("div");
function showSteps() {
  const list = $("steps"), steps = state.run?.steps ?? [];
  space.style.height = `${steps.length * ROW}px`;
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 2);
  const end = Math.min(steps.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 2);
  const rows = [];
  for (let i = first; i < end; i++) {
    const step = steps[i];
    rows.push(el("div", { className: "step", id: `step-${i}`, role: "option", ariaSelected: String(i === state.chosen), title: `entropy ${step.entropy.toFixed(2)} bits`, style: { top: `${i * ROW}px` }, onclick: () => pick(i) },
      el("span", { className: "number", textContent: i }),
      el("span", { textContent: step.token === null ? "(prompt)" : state.run.shown(step.token) }),
      el("span", { className: "then", textContent: step.top.length ? `→ ${state.run.shown(step.top[0].id)}` : "" }),
      el("div", { className: "bar" }, el("i", { style: { width: `${Math.min(100, step.entropy * 10)}%` } }))));
  }
  list.replaceChildren(space, ...rows);
  if (state.chosen >= first && state.chosen < end) list.setAttribute("aria-activedescendant", `step-${state.chosen}`);
  else list.removeAttribute("aria-activedescendant");
}

function pick(index) {
  $("follow").checked = index === state.run.steps.length - 1 && !state.run.finished;
  chooseStep(index);
}

$("steps").addEventListener("scroll", changed);
$("steps").addEventListener("keydown", (e) => {
  const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[e.key];
  if (!by || !state.run?.steps.length) return;
  e.preventDefault();
  pick(Math.max(0, Math.min(state.run.steps.length - 1, state.chosen + by)));
});
new ResizeObserver(changed).observe($("steps"));
new ResizeObserver(changed).observe($("right"));

// The run's events.
let pending = null;
const events = {
  hello(e) {
    const run = new Run(e.model, e.prompt ?? "");
    run.tokens = e.tokens ?? []; run.live = true;
    pending = null;
    $("follow").checked = true;
    begin(run);
    say(`running: ${e.prompt_tokens} tokens of prompt`);
    busy(true);
  },
  phase(e) {
    const found = state.graph?.phases.find((phase) => phase.kind === e.kind);
    if (!state.run || !found) return;
    state.run.begin(e.kind, found.graph);
    state.run.phases.at(-1).graph = found.graph;
    attention.limits();
  },
  node(e) {
    if (!state.run?.phases.length) return;
    pending ??= state.run.newStep();
    const slot = pending.phase.slot.get(e.id);
    if (slot !== undefined) pending.put(slot, e);
  },
  step(e) {
    if (!state.run?.phases.length) return;
    const run = state.run, step = (pending ?? run.newStep()).finish(e);
    pending = null;
    run.add(step);
    if (step.token !== null) { run.tokens.push([step.token, step.text]); run.answer += step.text; }
    say(`running: ${run.steps.length - 1} tokens drawn`);
    if ($("follow").checked || state.chosen < 0) chooseStep(run.steps.length - 1);
    changed();
  },
  finish(e) {
    busy(false);
    if (!state.run) return;
    state.run.finished = true; state.run.answer = e.text;
    const why = { stop: "it ended", length: "as many as were asked for", stopped: "stopped" }[e.reason] ?? e.reason;
    say(`${e.tokens} tokens: ${why}`);
    attention.show(); lens.show(); changed();
  },
  error(e) { busy(false); say(e.error, true); },
  lag() { say("this page is slower than the run: some values are missing", true); },
};

function busy(is) {
  $("run").disabled = is || !state.model;
  $("stop").disabled = !is;
}

function listen() {
  const source = new EventSource("/viz/events");
  source.onmessage = (message) => { const e = JSON.parse(message.data); events[e.type]?.(e); };
  source.onerror = () => { say("the server does not answer", true); busy(false); };
  source.onopen = () => { if ($("status").classList.contains("bad")) say("idle"); };
}

async function post(path, body) {
  const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
}

$("form").addEventListener("submit", async (e) => {
  e.preventDefault();
  busy(true);
  say("starting; the first run compiles its programs …");
  try {
    await post("/viz/run", { prompt: $("prompt").value, max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value) });
  } catch (problem) {
    say(problem.message, true);
  }
  busy(false);
});
$("prompt").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) { e.preventDefault(); if (!$("run").disabled) $("form").requestSubmit(); }
});
$("stop").addEventListener("click", () => post("/viz/stop", {}).catch((problem) => say(problem.message, true)));

// Trace files.
function opened(text, name) {
  let run;
  try { run = Run.of(JSON.parse(text)); } catch (e) { say(`${name} is no trace: ${e.message}`, true); return; }
  if (run.prompt) $("prompt").value = run.prompt;
  begin(run);
  say(`${name}: ${run.steps.length} steps`);
}
$("open").addEventListener("change", async () => {
  const file = $("open").files[0];
  $("open").value = "";
  if (!file) return;
  if (file.size > MOST_BYTES) { say(`${file.name} has ${Math.round(file.size / 1e6)} MB, expected at most ${Math.round(MOST_BYTES / 1e6)}`, true); return; }
  say(`reading ${file.name} …`);
  opened(await file.text(), file.name);
});
$("save").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([JSON.stringify(state.run.toTrace())], { type: "application/json" }));
  el("a", { href: url, download: "trace.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
});

// Views.
const tabs = [...document.querySelectorAll('[role="tab"]')];
function view(tab) {
  for (const one of tabs) {
    const own = one === tab;
    one.setAttribute("aria-selected", String(own));
    one.tabIndex = own ? 0 : -1;
    $(one.getAttribute("aria-controls")).hidden = !own;
  }
  attention.show(); lens.show(); graph.redraw();
}
tabs.forEach((tab, i) => {
  tab.addEventListener("click", () => view(tab));
  tab.addEventListener("keydown", (e) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!by) return;
    const next = tabs[(i + by + tabs.length) % tabs.length];
    next.focus(); view(next);
  });
});
$("colour").addEventListener("change", () => { state.colour = $("colour").value; changed(); });
$("wider").addEventListener("click", () => graph.zoom(1.5));
$("narrower").addEventListener("click", () => graph.zoom(1 / 1.5));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { attention.redraw(); lens.redraw(); changed(); });

async function start() {
  changed(); colours(); busy(false);
  const info = await (await fetch("/viz/info")).json();
  if (info.model) {
    $("model").textContent = info.model;
    say("reading the graph …");
    state.graph = await (await fetch("/viz/graph")).json();
    state.model = info.model;
    state.structure = new Phase("decode", state.graph.phases.at(-1).graph);
    attention.limits(); changed();
    listen();
    say(info.running ? "a run is going" : "idle");
    busy(info.running);
  } else {
    $("form").querySelectorAll("textarea, input").forEach((one) => { one.disabled = true; });
    say("no model is loaded");
  }
  if (info.trace) {
    const response = await fetch("/viz/trace");
    if (response.ok) opened(await response.text(), info.trace); else say((await response.json()).error, true);
  }
}
start().catch((e) => say(e.message, true));
