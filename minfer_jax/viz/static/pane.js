// A table drawn on one canvas as large as what is seen of it, inside a box that scrolls.

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function el(tag, props = {}, ...children) {
  const { style, ...rest } = props;
  const made = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(style || {})) made.style.setProperty(name, value);
  made.append(...children);
  return made;
}

/** A canvas of w x h CSS pixels, sharp on any screen; gives its context. */
export function sized(canvas, w, h) {
  const ratio = window.devicePixelRatio || 1;
  const [pw, ph] = [Math.max(1, Math.round(w * ratio)), Math.max(1, Math.round(h * ratio))];
  if (canvas.width !== pw || canvas.height !== ph) { canvas.width = pw; canvas.height = ph; }
  canvas.style.width = `${w}px`; canvas.style.height = `${h}px`;
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, w, h);
  return g;
}

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

/** A function from -1..1 to a colour: one side, the cell's own colour, the other side. */
export function scale() {
  const [neg, zero, pos] = ["--neg", "--cell", "--pos"].map((name) => channels(css(name)));
  return (t) => {
    const side = t < 0 ? neg : pos;
    const a = Math.min(1, Math.abs(t));
    return `rgb(${zero.map((c, i) => Math.round(c + (side[i] - c) * a)).join(" ")})`;
  };
}

/** 256 colours from the panel's own to the heat's. */
export function heat() {
  const [from, to] = ["--panel", "--heat"].map((name) => channels(css(name)));
  return Array.from({ length: 256 }, (_, v) => from.map((c, i) => Math.round(c + (to[i] - c) * Math.sqrt(v / 255))));
}

export class Pane {
  /**
   * layout() -> {columns, rows, width, height, left, top}, sizes in pixels, or a message;
   * draw(g, view) -> draws what view shows; choose(row, column) and hover(row, column) are told.
   */
  constructor(box, { layout, draw, choose, hover }) {
    Object.assign(this, { box, layout, draw, choose, hover, row: 0, column: 0, asked: false });
    this.canvas = el("canvas");
    this.size = el("div", { className: "size" });
    this.message = el("p", { className: "message" });
    this.size.append(this.canvas); // which stays in sight while that is scrolled
    box.append(this.size, this.message);
    box.addEventListener("scroll", () => this.redraw());
    box.addEventListener("click", (e) => { const at = this.under(e); if (at) this.go(...at); });
    box.addEventListener("mousemove", (e) => { const at = this.under(e); if (at) this.hover?.(...at); });
    box.addEventListener("keydown", (e) => this.key(e));
    new ResizeObserver(() => this.redraw()).observe(box);
  }

  redraw() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.paint(); });
  }

  paint() {
    if (!this.box.clientWidth) return;
    const found = this.layout(this.box.clientWidth, this.box.clientHeight);
    const shown = typeof found !== "string";
    this.message.textContent = shown ? "" : found;
    this.message.hidden = shown; this.size.hidden = !shown;
    this.at = shown ? found : null;
    if (!shown) return;
    const { columns, rows, width, height, left, top } = found;
    this.size.style.width = `${left + columns * width}px`;
    this.size.style.height = `${top + rows * height}px`;
    // Once more, as a scroll bar may have come or gone.
    const [w, h] = [this.box.clientWidth, this.box.clientHeight];
    const g = sized(this.canvas, w, h);
    const [x, y] = [this.box.scrollLeft, this.box.scrollTop];
    const view = {
      w, h, ...found,
      firstColumn: Math.floor(x / width), endColumn: Math.min(columns, Math.ceil((x + w - left) / width)),
      firstRow: Math.floor(y / height), endRow: Math.min(rows, Math.ceil((y + h - top) / height)),
      x: (column) => left + column * width - x, y: (row) => top + row * height - y,
    };
    this.draw(g, view);
  }

  under(event) {
    if (!this.at) return null;
    const box = this.box.getBoundingClientRect();
    const { columns, rows, width, height, left, top } = this.at;
    const [x, y] = [event.clientX - box.left - this.box.clientLeft, event.clientY - box.top - this.box.clientTop];
    if (x < left || y < top) return null;
    const column = Math.floor((x - left + this.box.scrollLeft) / width);
    const row = Math.floor((y - top + this.box.scrollTop) / height);
    return row < rows && column < columns ? [row, column] : null;
  }

  go(row, column) { this.row = row; this.column = column; this.show(); this.choose?.(row, column); this.redraw(); }

  /** Scroll to where the chosen cell is seen. */
  show() {
    if (!this.at) return;
    const { width, height, left, top } = this.at;
    const [x, y] = [this.column * width, this.row * height];
    const [w, h] = [this.box.clientWidth - left, this.box.clientHeight - top];
    if (x < this.box.scrollLeft) this.box.scrollLeft = x;
    if (x + width > this.box.scrollLeft + w) this.box.scrollLeft = x + width - w;
    if (y < this.box.scrollTop) this.box.scrollTop = y;
    if (y + height > this.box.scrollTop + h) this.box.scrollTop = y + height - h;
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -1e9], End: [0, 1e9] };
    const move = moves[event.key];
    if (!move || !this.at) return;
    event.preventDefault();
    const within = (v, n) => Math.max(0, Math.min(n - 1, v));
    this.go(within(this.row + move[0], this.at.rows), within(this.column + move[1], this.at.columns));
  }
}
