// What the server computes of the latest run when it is asked: attention maps and the logit lens.

import { Pane, css, el, heat, sized } from "/pane.js";
import { seen, visible } from "/trace.js";

const MOST_SMALL = 192; // tokens of a text whose heads are all drawn small

async function answered(response) {
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Error(told.error || `the server says ${response.status}`);
}

/** A head's map as an image of T x T points. */
function image(bytes, t) {
  const colours = heat(), canvas = el("canvas", { width: t, height: t });
  const g = canvas.getContext("2d"), data = g.createImageData(t, t);
  for (let i = 0; i < t * t; i++) {
    const [r, gr, b] = colours[bytes[i]];
    data.data.set([r, gr, b, 255], i * 4);
  }
  g.putImageData(data, 0, 0);
  return canvas;
}

export function attentionView(state, parts) {
  const maps = new Map(); // "layer head" to bytes, of this run
  let drawn = null, asking = "", problem = "", small = "";
  const t = () => state.run.tokens.length;
  const key = () => `${parts.layer.value} ${parts.head.value}`;
  const pane = new Pane(parts.box, {
    layout: (w, h) => {
      if (why()) return why();
      if (!maps.has(key())) return problem || "Computing …";
      const [left, top] = [92, 16];
      const size = Math.max(0.5, Math.min((Math.min(w - left, h - top) - 6) / t(), 34));
      return { columns: t(), rows: t(), width: size, height: size, left, top };
    },
    draw: (g, v) => {
      const map = maps.get(key());
      if (drawn?.map !== map) drawn = { map, image: image(map, t()) };
      g.imageSmoothingEnabled = v.width < 1.5;
      g.drawImage(drawn.image, v.x(0), v.y(0), t() * v.width, t() * v.height);
      g.fillStyle = css("--panel"); g.fillRect(0, 0, v.left - 2, v.h); g.fillRect(0, 0, v.w, v.top - 1);
      g.strokeStyle = css("--pos"); g.lineWidth = 1.5;
      g.strokeRect(v.x(pane.column), v.y(pane.row), Math.max(3, v.width), Math.max(3, v.height));
      g.font = `11px ${css("--mono")}`; g.textBaseline = "middle"; g.textAlign = "right";
      const every = Math.ceil(11 / v.height);
      for (let i = v.firstRow; i < v.endRow; i++) {
        if (i % every && i !== pane.row) continue;
        g.fillStyle = css(i === pane.row ? "--text" : "--muted");
        g.fillText(visible(state.run.tokens[i][1]).slice(0, 12), v.left - 6, v.y(i) + v.height / 2);
      }
      g.textAlign = "center"; g.fillStyle = css("--text");
      g.fillText(visible(state.run.tokens[pane.column]?.[1] ?? "").slice(0, 12), Math.max(v.x(pane.column), v.left + 24), v.top / 2);
    },
    choose: tell, hover: tell,
  });

  function why() {
    if (!state.run) return "Run a prompt to see where each token looks.";
    if (!state.run.live) return "A trace file holds a few samples of each value, not whole attention maps. Start the command with a model and run a prompt to see them.";
    if (!state.run.finished) return "Attention maps are computed when the run has ended.";
    return "";
  }

  function tell(row, column) {
    const map = maps.get(key());
    if (!map) return;
    const [from, to] = [row, column].map((i) => `${i} “${visible(state.run.tokens[i][1])}”`);
    parts.told.textContent = column > row ? `${from} cannot see what comes later` : `${from} looks at ${to}: ${((map[row * t() + column] / 255) * 100).toFixed(1)} %`;
  }

  async function fetched(run, layer, head) {
    const k = `${layer} ${head}`;
    if (!maps.has(k)) {
      const got = await answered(await fetch(`/viz/attention?layer=${layer}&head=${head}`));
      const bytes = new Uint8Array(await got.arrayBuffer());
      if (state.run !== run || bytes.length !== t() ** 2) throw new Error("another run has begun");
      if (maps.size > 256) maps.delete(maps.keys().next().value);
      maps.set(k, bytes);
    }
    return maps.get(k);
  }

  async function ask() {
    pane.redraw();
    if (why() || parts.panel.hidden || asking === key()) return;
    const run = state.run, now = (asking = key());
    const [layer, head] = now.split(" ").map(Number);
    try {
      await fetched(run, layer, head);
      problem = "";
      if (asking === now) { tell(Math.min(pane.row, t() - 1), Math.min(pane.column, t() - 1)); pane.redraw(); await heads(run, layer); }
    } catch (e) { problem = e.message; pane.redraw(); }
    if (asking === now) asking = "";
  }

  async function heads(run, layer) {
    const n = state.heads(), mark = `${layer} ${n} ${t()}`;
    if (small !== mark) {
      small = mark;
      parts.heads.replaceChildren();
      if (t() > MOST_SMALL) return;
      for (let head = 0; head < n; head++) {
        const canvas = el("canvas"), button = el("button", { type: "button", ariaLabel: `Head ${head}`, onclick: () => { parts.head.value = head; ask(); } }, canvas, String(head));
        parts.heads.append(button);
        const map = await fetched(run, layer, head);
        if (small !== mark) return;
        const g = sized(canvas, 58, 58);
        g.drawImage(image(map, t()), 0, 0, 58, 58);
      }
    }
    [...parts.heads.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === Number(parts.head.value))));
  }

  function bounded(input, most) {
    const v = Math.round(Number(input.value));
    input.value = Number.isFinite(v) ? Math.max(0, Math.min(most, v)) : 0;
    asking = "";
    ask();
  }
  parts.layer.addEventListener("change", () => bounded(parts.layer, state.layers() - 1));
  parts.head.addEventListener("change", () => bounded(parts.head, state.heads() - 1));

  return {
    show: ask,
    redraw: () => { drawn = null; small = ""; ask(); },
    reset: () => { maps.clear(); drawn = null; asking = small = problem = ""; pane.row = pane.column = 0; parts.heads.replaceChildren(); parts.told.textContent = ""; ask(); },
    limits: () => { parts.layer.max = state.layers() - 1; parts.head.max = state.heads() - 1; },
    layer: (layer) => { parts.layer.value = layer; asking = ""; },
  };
}

export function lensView(state, parts) {
  let lens = null, asked = null, problem = "";
  const pane = new Pane(parts.box, {
    layout: (w, h) => {
      if (!state.run) return "Run a prompt to see what the model would say after each layer.";
      if (!state.run.live) return "The logit lens needs the model: start the command with one and run a prompt.";
      if (!state.run.finished) return "The logit lens is computed when the run has ended.";
      if (!lens) return problem || "Computing …";
      const rows = lens.ids.length;
      return { columns: lens.ids[0].length, rows, width: 76, height: Math.max(19, Math.min(28, (h - 24) / rows)), left: 34, top: 22 };
    },
    draw: (g, v) => {
      const colours = heat(), last = lens.ids.length - 1;
      const [text, panel, muted, mono] = ["--text", "--panel", "--muted", "--mono"].map(css);
      g.textBaseline = "middle"; g.textAlign = "left";
      for (let row = v.firstRow; row < v.endRow; row++) {
        for (let column = v.firstColumn; column < v.endColumn; column++) {
          const layer = last - row, p = lens.probabilities[layer][column], id = lens.ids[layer][column];
          const rgb = colours[Math.round(p * p * 200)];
          g.fillStyle = `rgb(${rgb.join(" ")})`;
          g.fillRect(v.x(column), v.y(row), v.width - 1, v.height - 1);
          const dark = rgb[0] * 0.3 + rgb[1] * 0.59 + rgb[2] * 0.11 < 145;
          g.fillStyle = dark ? "#ffffff" : "#14161a";
          g.font = `${id === lens.ids[last][column] ? "600 " : ""}11.5px ${mono}`;
          g.fillText(seen(lens.text[id], id).slice(0, 10), v.x(column) + 5, v.y(row) + v.height / 2);
        }
      }
      g.strokeStyle = css("--pos"); g.lineWidth = 2;
      g.strokeRect(v.x(pane.column), v.y(pane.row), v.width - 1, v.height - 1);
      g.fillStyle = panel; g.fillRect(0, 0, v.left - 1, v.h); g.fillRect(0, 0, v.w, v.top - 1);
      g.font = `11px ${mono}`;
      for (let column = v.firstColumn; column < v.endColumn; column++) {
        if (v.x(column) < v.left - v.width / 2) continue;
        g.fillStyle = column === pane.column ? text : muted;
        g.fillText(visible(state.run.tokens[column][1]).slice(0, 10), v.x(column) + 5, v.top / 2);
      }
      g.textAlign = "right";
      for (let row = v.firstRow; row < v.endRow; row++) {
        g.fillStyle = row === pane.row ? text : muted;
        if (v.y(row) >= v.top - v.height / 2) g.fillText(last - row, v.left - 6, v.y(row) + v.height / 2);
      }
    },
    choose: tell, hover: tell,
  });

  function tell(row, column) {
    if (!lens) return;
    const layer = lens.ids.length - 1 - row, id = lens.ids[layer][column];
    parts.told.textContent = `after layer ${layer}, at ${column} “${visible(state.run.tokens[column][1])}”: “${seen(lens.text[id], id)}” with ${(lens.probabilities[layer][column] * 100).toFixed(1)} %`;
  }

  async function ask() {
    pane.redraw();
    const run = state.run;
    if (!run?.live || !run.finished || asked === run || parts.panel.hidden) return;
    asked = run;
    try {
      const found = await (await answered(await fetch("/viz/lens"))).json();
      if (state.run !== run) return;
      if (found.ids[0].length !== run.tokens.length) throw new Error("another run has begun");
      lens = found;
      parts.note.textContent = "The likeliest token after each layer, the last on top. Bold: what the last layer says too.";
    } catch (e) { problem = e.message; }
    pane.paint();
    if (lens) pane.go(0, lens.ids[0].length - 1); // where the answer is
  }

  return {
    show: ask, redraw: () => pane.redraw(),
    reset: () => { lens = asked = null; problem = ""; pane.row = pane.column = 0; parts.note.textContent = parts.told.textContent = ""; ask(); },
  };
}
