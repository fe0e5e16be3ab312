// A run as it is shown: the same whether it comes event by event or out of a file.

const SAMPLES = 64;

/** One phase: a graph, and where each of its nodes stands in a table of layers and names. */
export class Phase {
  constructor(kind, graph) {
    this.kind = kind;
    this.nodes = graph.nodes;
    this.slot = new Map(graph.nodes.map((node, i) => [node.id, i]));
    this.byName = new Map(graph.nodes.map((node, i) => [node.name, i]));
    this.stats = []; // names, as the first node has them
    this.place(graph.nodes);
    this.sources = graph.nodes.map((n) => (n.src || []).map((id) => this.slot.get(id)).filter((i) => i !== undefined));
    this.users = graph.nodes.map(() => []);
    this.sources.forEach((from, i) => from.forEach((j) => this.users[j].push(i)));
  }

  /** Rows are names, columns layers; what belongs to no layer stands before or after them. */
  place(nodes) {
    const rows = new Map();
    let layers = 0;
    this.cells = []; // of each node: [row, column], or null for an input
    nodes.forEach((node) => {
      const found = /^blk\.(\d+)\.(.+)$/.exec(node.name);
      if (node.op === "input") { this.cells.push(null); return; }
      const short = found ? found[2] : node.name;
      if (!rows.has(short)) rows.set(short, rows.size);
      if (found) layers = Math.max(layers, Number(found[1]) + 1);
      this.cells.push([rows.get(short), found ? Number(found[1]) + 1 : layers ? Infinity : 0]);
    });
    this.layers = layers;
    this.rows = [...rows.keys()];
    this.columns = ["in", ...Array.from({ length: layers }, (_, i) => String(i)), "out"];
    this.at = new Map();
    this.cells.forEach((cell, i) => {
      if (!cell) return;
      cell[1] = Math.min(cell[1], this.columns.length - 1);
      this.at.set(`${cell[0]} ${cell[1]}`, i);
    });
  }
}

/** The numbers of one step, as flat arrays: a long run has some 500 nodes a step. */
class Step {
  constructor(phase) {
    this.phase = phase;
    this.token = null; this.text = ""; this.top = []; this.entropy = null; this.exact = false;
    const n = phase.nodes.length;
    this.values = new Float32Array(n * SAMPLES).fill(NaN);
    this.stats = new Float64Array(n * 4).fill(NaN);
    this.sizes = new Float64Array(n * 3); // samples, stride, n
  }

  put(slot, node) {
    const names = Object.keys(node.stats || {});
    if (!this.phase.stats.length) this.phase.stats = names.slice(0, 4);
    this.phase.stats.forEach((name, i) => {
      const value = node.stats?.[name];
      this.stats[slot * 4 + i] = typeof value === "number" ? value : NaN;
    });
    const values = Array.isArray(node.values) ? node.values.slice(0, SAMPLES) : [];
    values.forEach((v, i) => { this.values[slot * SAMPLES + i] = typeof v === "number" ? v : NaN; });
    this.sizes.set([values.length, Number(node.stride) || 1, Number(node.n) || values.length], slot * 3);
  }

  samples(slot) { return this.values.subarray(slot * SAMPLES, slot * SAMPLES + this.sizes[slot * 3]); }
  stat(slot, name) { return this.stats[slot * 4 + this.phase.stats.indexOf(name)]; }

  finish(step) {
    this.token = typeof step.token === "number" ? step.token : null;
    this.text = String(step.text ?? "");
    this.top = (step.logits_top || []).map(([id, p], i) => ({ id, p, text: step.top_text?.[i] ?? null }));
    this.exact = typeof step.entropy === "number";
    this.entropy = this.exact ? step.entropy : atLeast(this.top.map((one) => one.p));
    return this;
  }
}

/** Entropy in bits if all that is not among the top were one token: the least that it can be. */
function atLeast(top) {
  const rest = Math.max(0, 1 - top.reduce((a, b) => a + b, 0));
  return [...top, rest].reduce((sum, p) => sum - (p > 0 ? p * Math.log2(p) : 0), 0);
}

export class Run {
  constructor(model, prompt) {
    this.model = model; this.prompt = prompt; this.tokens = [];
    this.texts = new Map(); // of token ids, as far as they are known
    this.phases = []; this.steps = []; this.answer = ""; this.live = false; this.finished = false;
  }

  begin(kind, graph) { this.phases.push(new Phase(kind, graph)); }

  /** A trace file's object as a run. */
  static of(trace) {
    if (trace?.format !== "minfer-trace") throw new Error(`its format is ${JSON.stringify(trace?.format) ?? "missing"}, expected "minfer-trace"`);
    if (trace.version !== 1) throw new Error(`it is of version ${trace.version}, expected 1`);
    if (!Array.isArray(trace.phases)) throw new Error("it has no phases");
    const run = new Run(String(trace.model ?? "unknown"), String(trace.prompt ?? ""));
    for (const part of trace.phases) {
      if (!Array.isArray(part?.graph?.nodes) || !Array.isArray(part.steps)) throw new Error("a phase has no graph or no steps");
      run.begin(String(part.kind), part.graph);
      const phase = run.phases.at(-1);
      phase.graph = part.graph;
      for (const one of part.steps) {
        const step = new Step(phase);
        for (const node of one.nodes || []) {
          const slot = phase.slot.get(node.id);
          if (slot !== undefined) step.put(slot, node);
        }
        run.add(step.finish(one));
      }
    }
    run.answer = run.steps.map((step) => step.text).join("");
    run.finished = true;
    return run;
  }

  /** The run as a trace file's object. */
  toTrace() {
    const number = (v) => (Number.isFinite(v) ? Number(v.toPrecision(7)) : null);
    return {
      format: "minfer-trace", version: 1, model: this.model, prompt: this.prompt,
      phases: this.phases.map((phase) => ({
        kind: phase.kind, graph: phase.graph,
        steps: this.steps.filter((step) => step.phase === phase).map((step) => ({
          token: step.token, text: step.text, logits_top: step.top.map((one) => [one.id, one.p]),
          ...(step.top.some((one) => one.text !== null) && { top_text: step.top.map((one) => one.text) }),
          ...(step.exact && { entropy: step.entropy }),
          nodes: phase.nodes.flatMap((node, slot) => step.sizes[slot * 3] ? [{
            id: node.id, dtype: node.dtype,
            stats: Object.fromEntries(phase.stats.map((name) => [name, number(step.stat(slot, name))])),
            values: Array.from(step.samples(slot), number),
            stride: step.sizes[slot * 3 + 1], n: step.sizes[slot * 3 + 2],
          }] : []),
        })),
      })),
    };
  }

  add(step) {
    this.steps.push(step);
    if (step.token !== null) this.texts.set(step.token, step.text);
    for (const one of step.top) if (one.text !== null) this.texts.set(one.id, one.text);
  }

  /** A token as it can be seen. */
  shown(id) { return seen(this.texts.get(id) ?? "", id); }

  newStep() { return new Step(this.phases.at(-1)); }
}

/** Text of a token as it can be seen; its number where there is nothing to see. */
export function seen(text, id) {
  const found = visible(text);
  return found.trim() ? found : `#${id}`;
}

/** Text with its white space. */
export function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·");
}
