// The graph as a table: a row for each name, a column for each layer, a strip of samples in each cell.

import { Pane, css, el, scale, sized } from "/pane.js";

const LEFT = 112, TOP = 22, NARROWEST = 12;

/** What the colour of a number is measured by: three times the samples' mean size. */
function reach(samples) {
  let sum = 0, n = 0;
  for (const v of samples) if (Number.isFinite(v)) { sum += Math.abs(v); n += 1; }
  return n && sum ? (3 * sum) / n : 1;
}

export function graphView(box, state, choose) {
  let zoom = 0; // 0 to fit
  const pane = new Pane(box, {
    layout: (w, h) => {
      const phase = state.phase();
      if (!phase) return "The model's values stand here, a column a layer, when a prompt has run or a trace is open.";
      const [columns, rows] = [phase.columns.length, phase.rows.length];
      const fit = Math.max(NARROWEST, (w - LEFT - 2) / columns);
      return {
        columns, rows, left: LEFT, top: TOP,
        width: zoom || fit, height: Math.max(18, Math.min(44, (h - TOP - 2) / rows)),
      };
    },
    draw,
    choose: (row, column) => {
      const slot = state.phase().at.get(`${row} ${column}`);
      if (slot !== undefined) choose(slot);
    },
    hover: (row, column) => {
      const phase = state.phase(), slot = phase.at.get(`${row} ${column}`);
      pane.canvas.title = slot === undefined ? "" : phase.nodes[slot].name;
    },
  });

  function draw(g, v) {
    const phase = state.phase(), step = state.step(), colour = scale();
    const name = state.colour, [text, muted, panel] = ["--text", "--muted", "--panel"].map(css);
    const gap = v.width > 24 ? 4 : v.width > 14 ? 3 : 2;
    const most = name === "samples" || !step ? null : rowReach(phase, step, name);
    for (let row = v.firstRow; row < v.endRow; row++) {
      for (let column = v.firstColumn; column < v.endColumn; column++) {
        const slot = phase.at.get(`${row} ${column}`);
        if (slot === undefined) continue;
        cell(g, colour, { x: v.x(column), y: v.y(row), w: v.width - gap, h: v.height - 3 }, step, slot, name, most?.[row]);
      }
    }
    links(g, v, phase);
    g.fillStyle = panel;
    g.fillRect(0, 0, LEFT, v.h);
    g.fillRect(0, 0, v.w, TOP);
    g.font = "12px " + css("--mono"); g.textBaseline = "middle";
    for (let row = v.firstRow; row < v.endRow; row++) {
      if (v.y(row) < TOP - v.height / 2) continue;
      const own = state.node !== null && phase.cells[state.node]?.[0] === row;
      g.fillStyle = own ? text : muted;
      g.textAlign = "right";
      g.fillText(phase.rows[row], LEFT - 8, v.y(row) + v.height / 2 - 1);
    }
    const every = v.width > 22 ? 1 : v.width > 12 ? 2 : 5;
    g.textAlign = "center";
    for (let column = v.firstColumn; column < v.endColumn; column++) {
      const label = phase.columns[column], own = state.node !== null && phase.cells[state.node]?.[1] === column;
      if (v.x(column) < LEFT - v.width / 2 || !(own || Number.isNaN(Number(label)) || (Number(label) % every === 0 && (column > 1 || every === 1)))) continue;
      g.fillStyle = own ? text : muted;
      const half = g.measureText(label).width / 2; // the last one stays inside
      g.fillText(label, Math.min(v.x(column) + v.width / 2, Math.max(v.w - half - 2, LEFT + half)), TOP / 2 + 1);
    }
  }

  function cell(g, colour, r, step, slot, name, most) {
    g.fillStyle = css("--cell");
    const samples = step ? step.samples(slot) : [];
    if (name !== "samples" || !samples.length) {
      const value = step && name !== "samples" ? step.stat(slot, name) : NaN;
      if (Number.isFinite(value)) g.fillStyle = colour(Math.sign(value) * Math.sqrt(Math.abs(value) / (most || 1)));
      g.fillRect(r.x, r.y, r.w, r.h);
      return;
    }
    const n = Math.max(1, Math.min(samples.length, Math.floor(r.w / 1.5)));
    const by = reach(samples);
    for (let i = 0; i < n; i++) {
      const v = samples[Math.floor((i * samples.length) / n)];
      g.fillStyle = Number.isFinite(v) ? colour(v / by) : css("--cell");
      g.fillRect(r.x + (i * r.w) / n, r.y, r.w / n + 0.3, r.h);
    }
  }

  /** The chosen value, what it is made of, and what is made of it. */
  function links(g, v, phase) {
    const chosen = state.node, from = chosen === null ? null : phase.cells[chosen];
    if (!from) return;
    const centre = ([row, column]) => [v.x(column) + v.width / 2 - 1, v.y(row) + v.height / 2 - 1];
    const outline = ([row, column], width) => {
      g.lineWidth = width;
      g.strokeRect(v.x(column) - 1, v.y(row) - 1, v.width, v.height);
    };
    g.strokeStyle = css("--select");
    outline(from, 2.5);
    const [x, y] = centre(from);
    for (const other of [...phase.sources[chosen], ...phase.users[chosen]]) {
      const to = phase.cells[other];
      if (!to) continue;
      const [tx, ty] = centre(to);
      outline(to, 1);
      g.globalAlpha = 0.55;
      g.beginPath(); g.moveTo(x, y);
      g.quadraticCurveTo((x + tx) / 2 + (ty === y ? 0 : v.width / 2), (y + ty) / 2 - (tx === x ? 0 : v.height / 2), tx, ty);
      g.stroke();
      g.globalAlpha = 1;
    }
  }

  return {
    redraw: () => pane.redraw(),
    zoom: (factor) => {
      const now = pane.at?.width ?? 20, fit = (box.clientWidth - LEFT - 2) / (pane.at?.columns ?? 32);
      zoom = Math.min(160, now * factor);
      if (zoom <= fit) zoom = 0;
      pane.redraw();
    },
    show: (slot) => {
      const cell = state.phase()?.cells[slot];
      if (cell) { [pane.row, pane.column] = cell; pane.show(); }
      pane.redraw();
    },
  };
}

function rowReach(phase, step, name) {
  const most = new Array(phase.rows.length).fill(0);
  phase.cells.forEach((cell, slot) => {
    const v = cell && Math.abs(step.stat(slot, name));
    if (Number.isFinite(v)) most[cell[0]] = Math.max(most[cell[0]], v);
  });
  return most;
}

const short = (v) => (Number.isFinite(v) ? Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(3) : String(Number(v.toPrecision(5))) : "–");

/** All that is known of the chosen value. */
export function nodeView(box, state, choose) {
  return () => {
    const phase = state.phase(), slot = state.node;
    if (!phase || slot === null || !phase.nodes[slot]) {
      box.replaceChildren(el("p", { className: "empty", textContent: "Choose a value in the graph." }));
      return;
    }
    const node = phase.nodes[slot], step = state.step(), meta = node.meta || {};
    const facts = [];
    if (step) for (const name of phase.stats) facts.push([name, short(step.stat(slot, name))]);
    facts.push(["op", node.op]);
    const shape = (node.shape || []).slice().reverse();
    while (shape.length > 1 && shape[0] === 1 && shape.length > (meta.axes ? meta.axes.split(" ").length : 1)) shape.shift();
    if (shape.length) facts.push(["shape", `${shape.join(" × ")}${meta.axes ? `  (${meta.axes})` : ""}`]);
    if (step?.sizes[slot * 3]) facts.push(["samples", `${step.sizes[slot * 3]} of ${step.sizes[slot * 3 + 2]}`]);
    const weights = Object.entries(meta.weights || {}).map(([k, v]) => (typeof v === "string" ? `${k} ${v}` : k));
    if (weights.length) facts.push(["weights", weights.join(", ")]);
    if (meta.llama_cpp) facts.push(["llama.cpp", meta.llama_cpp]);
    const list = el("dl", {}, ...facts.flatMap(([k, v]) => [el("dt", { textContent: k }), el("dd", { textContent: v })]));
    const made = [el("h3", { textContent: node.name })];
    if (meta.what) made.push(el("p", { className: "fact", textContent: meta.what }));
    made.push(list);
    const canvases = [];
    if (step?.sizes[slot * 3]) {
      made.push(el("p", { className: "fact", textContent: "Samples" }), ...[strip, bars].map((draw) => {
        const canvas = el("canvas");
        canvases.push([canvas, (g, w, h) => draw(g, w, h, step.samples(slot)), draw === strip ? 18 : 56]);
        return canvas;
      }));
      const others = state.run.steps.filter((one) => one.phase === phase);
      const name = phase.stats.at(-1);
      if (others.length > 1) {
        const canvas = el("canvas");
        made.push(el("p", { className: "fact", textContent: `${name} over the ${others.length} steps` }), canvas);
        canvases.push([canvas, (g, w, h) => line(g, w, h, others.map((one) => one.stat(slot, name)), others.indexOf(step)), 44]);
      }
    }
    for (const [label, found] of [["Made of", phase.sources[slot]], ["Used by", phase.users[slot]]]) {
      if (!found.length) continue;
      made.push(el("p", { className: "fact", textContent: label }), el("div", { className: "links" }, ...found.map((i) =>
        el("button", { type: "button", textContent: phase.nodes[i].name, disabled: !phase.cells[i], onclick: () => choose(i) }))));
    }
    box.replaceChildren(...made);
    for (const [canvas, draw, h] of canvases) { const w = box.clientWidth; draw(sized(canvas, w, h), w, h); }
  };
}

function strip(g, w, h, samples) {
  const colour = scale(), by = reach(samples);
  samples.forEach((v, i) => {
    g.fillStyle = Number.isFinite(v) ? colour(v / by) : css("--cell");
    g.fillRect((i * w) / samples.length, 0, w / samples.length + 0.3, h);
  });
}

function bars(g, w, h, samples) {
  const most = samples.reduce((m, v) => (Number.isFinite(v) ? Math.max(m, Math.abs(v)) : m), 0) || 1;
  const [pos, neg] = [css("--pos"), css("--neg")];
  g.fillStyle = css("--line"); g.fillRect(0, h / 2, w, 1);
  samples.forEach((v, i) => {
    if (!Number.isFinite(v)) return;
    const high = (Math.abs(v) / most) * (h / 2 - 1);
    g.fillStyle = v < 0 ? neg : pos;
    g.fillRect((i * w) / samples.length, v < 0 ? h / 2 + 1 : h / 2 - high, Math.max(1, w / samples.length - 1), high);
  });
}

function line(g, w, h, values, chosen) {
  const fine = values.filter(Number.isFinite), low = Math.min(...fine), high = Math.max(...fine);
  const x = (i) => 3 + (i * (w - 6)) / Math.max(1, values.length - 1);
  const y = (v) => h - 4 - ((v - low) / (high - low || 1)) * (h - 8);
  g.strokeStyle = css("--accent"); g.lineWidth = 1.5; g.beginPath();
  let begun = false;
  values.forEach((v, i) => {
    if (!Number.isFinite(v)) { begun = false; return; }
    begun ? g.lineTo(x(i), y(v)) : g.moveTo(x(i), y(v));
    begun = true;
  });
  g.stroke();
  if (Number.isFinite(values[chosen])) {
    g.fillStyle = css("--pos"); g.beginPath(); g.arc(x(chosen), y(values[chosen]), 3, 0, 7); g.fill();
  }
}
