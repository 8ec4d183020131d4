// A line plot on a canvas: columns over one x, bands, ticks, a cursor that plots of a page share, and a range that is dragged.
//
//   new LinePlot(box, {...}) draws into `box`; setData and setSize draw again. Values are in the data's units, places in CSS pixels.

import { el } from "./dom.js";

const FONT = "11px system-ui, sans-serif";
const TOP = 8, RIGHT = 18; // of the plot's area, from the canvas's edges
const TICKS_HEIGHT = 24, LABEL_HEIGHT = 16, TICK = 4;
const X_SPACE = 60, Y_SPACE = 28; // pixels between ticks, at least
const DRAG = 8; // pixels; less is a click
const PADDING = 0.05; // of the range of y, above and below the lines

const shared = new Map(); // name of an x axis -> plots whose cursors move together

/** Ticks of a linear axis: multiples of 1, 2 or 5 times a power of ten, at most `most` of them. */
export function linearTicks(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9); // 3 * 0.1 is above 0.3
  return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

/** Ticks of a logarithmic axis: powers of ten, with 2 and 5 times of them where there are few. */
export function logTicks(low, high, most) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const decades = Array.from({ length: last - first + 1 }, (_, place) => first + place);
  const within = (value) => value >= low && value <= high;
  const powers = decades.map((power) => 10 ** power).filter(within);
  const fine = decades.flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power)).filter(within);
  if (fine.length <= most) return fine.length > 1 ? fine : linearTicks(low, high, most);
  const stride = Math.ceil(powers.length / Math.max(1, most));
  return powers.filter((_, place) => place % stride === 0);
}

/** The index of the x nearest to a value; null where there is none. `x` is ascending. */
export function nearest(x, value) {
  if (!x.length) return null;
  let low = 0, high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - x[low - 1] < x[low] - value ? low - 1 : low;
}

/** Indices of what is worth drawing of a column: all known values, or where pixels are fewer, of each pixel the first, the
 * lowest, the highest and the last. */
export function visible(x, values, [low, high], pixels) {
  // One known value beyond each end, so that lines reach the edges, also over a gap.
  const known = [], before = [], after = [];
  for (let index = 0; index < x.length && !after.length; index += 1) {
    if (values[index] === null || values[index] === undefined) continue;
    if (x[index] < low) before[0] = index;
    else if (x[index] > high) after.push(index);
    else known.push(index);
  }
  known.unshift(...before);
  known.push(...after);
  if (known.length <= 4 * pixels) return known;
  const kept = [], perPixel = (high - low) / pixels;
  for (let start = 0; start < known.length;) {
    const pixel = Math.floor((x[known[start]] - low) / perPixel);
    let end = start, lowest = known[start], highest = known[start];
    while (end < known.length && Math.floor((x[known[end]] - low) / perPixel) === pixel) {
      if (values[known[end]] < values[lowest]) lowest = known[end];
      if (values[known[end]] > values[highest]) highest = known[end];
      end += 1;
    }
    kept.push(...new Set([known[start], lowest, highest, known[end - 1]].sort((a, b) => a - b)));
    start = end;
  }
  return kept;
}

export class LinePlot {
  /** `options`: width, height; `data` [x, ...columns]; `lines`, one a column: {stroke, width, alpha, pointSize} (width 0 draws
   * none); `bands` [{high, low, fill}] by number of columns; `log`; `range`, of x, or null for all; `share`, whose cursors move
   * together; `label` of x; `formatX`, `formatY` of ticks; `muted`, `grid`, `accent`, colours; `onCursor(index or null)`,
   * `onSelect([low, high])`, `onClick(index)`, `onDoubleClick()`, `onDraw(plot)`, once lines are drawn. */
  constructor(box, options) {
    this.options = options;
    this.data = options.data;
    this.cursorIndex = null;
    this.dragFrom = null;
    this.dragTo = null;
    this.canvas = el("canvas");
    this.over = el("canvas", { class: "over" }); // cursor and selection: they move without drawing the lines again
    this.node = el("div", { class: "plot-frame" }, this.canvas, this.over);
    box.append(this.node);
    this.listen();
    if (!shared.has(options.share)) shared.set(options.share, new Set());
    shared.get(options.share).add(this);
    this.setSize(options);
  }

  destroy() {
    shared.get(this.options.share).delete(this);
    this.node.remove();
  }

  setData(data) {
    this.data = data;
    this.draw();
  }

  setSize({ width, height }) {
    this.width = width;
    this.height = height;
    this.draw();
  }

  // ---- scales

  /** Ranges, ticks and the plot's area, by the data of now. */
  measure() {
    const { options, data: [x, ...columns] } = this;
    const all = x.length ? [x[0], x[x.length - 1]] : [0, 1];
    const [low, high] = options.range ?? all;
    this.x = low === high ? [low - 1, low + 1] : [low, high];
    this.y = this.rangeY(x, columns);
    const bottom = TICKS_HEIGHT + (options.label ? LABEL_HEIGHT : 0);
    const height = Math.max(10, this.height - TOP - bottom);
    const most = Math.floor(height / Y_SPACE);
    this.ticksY = options.log ? logTicks(...this.y, most) : linearTicks(...this.y, most);
    const longest = Math.max(3, ...this.ticksY.map((tick) => options.formatY(tick).length));
    const left = 14 + 6.5 * longest;
    this.area = { left, top: TOP, width: Math.max(10, this.width - left - RIGHT), height };
    this.ticksX = linearTicks(...this.x, Math.floor(this.area.width / X_SPACE));
  }

  rangeY(x, columns) {
    let low = Infinity, high = -Infinity;
    for (const values of columns) {
      for (let index = 0; index < x.length; index += 1) {
        const value = values[index];
        const counts = value !== null && value !== undefined && x[index] >= this.x[0] && x[index] <= this.x[1];
        if (counts && value < low) low = value;
        if (counts && value > high) high = value;
      }
    }
    if (low === Infinity) return this.options.log ? [1, 10] : [0, 1];
    if (this.options.log) return low === high ? [low / 2, high * 2] : [low, high];
    const padding = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * PADDING;
    const bottom = low >= 0 ? Math.max(0, low - padding) : low - padding; // no empty room below zero
    return [bottom, high + padding];
  }

  placeX(value) {
    return this.area.left + ((value - this.x[0]) / (this.x[1] - this.x[0])) * this.area.width;
  }

  placeY(value) {
    const scale = this.options.log ? Math.log : (one) => one;
    const share = (scale(value) - scale(this.y[0])) / (scale(this.y[1]) - scale(this.y[0]));
    return this.area.top + (1 - share) * this.area.height;
  }

  /** The x at so many pixels from the area's left edge. */
  valueAt(pixels) {
    return this.x[0] + (pixels / this.area.width) * (this.x[1] - this.x[0]);
  }

  // ---- drawing

  draw() {
    this.measure();
    const { area } = this, context = this.context = this.emptied(this.canvas);
    this.drawAxes(context);
    context.save();
    context.beginPath();
    context.rect(area.left, area.top - 4, area.width, area.height + 8);
    context.clip();
    this.options.bands.forEach((band) => this.drawBand(context, band));
    this.options.lines.forEach((line, column) => this.drawLine(context, line, this.data[column + 1]));
    context.restore();
    this.options.onDraw?.(this);
    this.showCursor(this.cursorIndex);
  }

  /** A canvas of the plot's size with nothing on it, in CSS pixels. */
  emptied(canvas) {
    canvas.width = Math.round(this.width * devicePixelRatio);
    canvas.height = Math.round(this.height * devicePixelRatio);
    const context = canvas.getContext("2d");
    context.scale(devicePixelRatio, devicePixelRatio);
    return context;
  }

  drawAxes(context) {
    const { options, area } = this, bottom = area.top + area.height, right = area.left + area.width;
    context.font = FONT;
    context.fillStyle = options.muted;
    context.strokeStyle = options.grid;
    context.lineWidth = 1;
    const stroke = (...points) => {
      context.beginPath();
      points.forEach(([x, y], place) => (place ? context.lineTo(x, y) : context.moveTo(x, y)));
      context.stroke();
    };
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of this.ticksX) {
      const x = Math.round(this.placeX(tick)) + 0.5;
      stroke([x, area.top], [x, bottom + TICK]);
      context.fillText(options.formatX(tick), x, bottom + TICK + 3);
    }
    if (options.label) context.fillText(options.label, area.left + area.width / 2, bottom + TICKS_HEIGHT);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of this.ticksY) {
      const y = Math.round(this.placeY(tick)) + 0.5;
      stroke([area.left - TICK, y], [right, y]);
      context.fillText(options.formatY(tick), area.left - TICK - 3, y);
    }
  }

  pointsOf(values) {
    const [x] = this.data;
    return visible(x, values, this.x, this.area.width).map((index) => [this.placeX(x[index]), this.placeY(values[index])]);
  }

  drawBand(context, { high, low, fill }) {
    const upper = this.pointsOf(this.data[high]), lower = this.pointsOf(this.data[low]);
    if (upper.length < 2) return;
    context.fillStyle = fill;
    context.beginPath();
    upper.forEach(([x, y]) => context.lineTo(x, y));
    lower.reverse().forEach(([x, y]) => context.lineTo(x, y));
    context.closePath();
    context.fill();
  }

  /** Gaps are spanned: the line goes on from the last known value. */
  drawLine(context, { stroke, width, alpha = 1, pointSize = 0 }, values) {
    if (!width) return;
    const points = this.pointsOf(values);
    context.globalAlpha = alpha;
    context.strokeStyle = context.fillStyle = stroke;
    context.lineWidth = width;
    context.lineJoin = "round";
    context.beginPath();
    points.forEach(([x, y]) => context.lineTo(x, y));
    context.stroke();
    if (pointSize) {
      for (const [x, y] of points) {
        context.beginPath();
        context.arc(x, y, pointSize / 2, 0, 2 * Math.PI);
        context.fill();
      }
    }
    context.globalAlpha = 1;
  }

  // ---- what a person does

  listen() {
    const { over, options } = this;
    const pixels = (event) => Math.min(Math.max(0, event.offsetX - this.area.left), this.area.width);
    over.addEventListener("pointermove", (event) => {
      this.dragTo = pixels(event);
      this.moveCursors(this.valueAt(this.dragTo));
    });
    over.addEventListener("pointerleave", () => { if (this.dragFrom === null) this.moveCursors(null); });
    over.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      over.setPointerCapture(event.pointerId);
      this.dragFrom = this.dragTo = pixels(event);
    });
    over.addEventListener("pointerup", (event) => {
      if (this.dragFrom === null) return;
      const [from, to] = [this.dragFrom, pixels(event)].sort((a, b) => a - b);
      this.dragFrom = null;
      this.drawOver();
      if (to - from >= DRAG) options.onSelect?.([this.valueAt(from), this.valueAt(to)]);
      else if (this.cursorIndex !== null) options.onClick?.(this.cursorIndex);
    });
    over.addEventListener("pointercancel", () => { this.dragFrom = null; this.drawOver(); });
    over.addEventListener("dblclick", () => options.onDoubleClick?.());
  }

  /** Moves the cursors of all plots with this x axis to the point nearest to a value; null takes them away. */
  moveCursors(value) {
    for (const plot of shared.get(this.options.share)) {
      plot.showCursor(value === null ? null : nearest(plot.data[0], value));
      plot.options.onCursor?.(plot.cursorIndex);
    }
  }

  showCursor(index) {
    const at = index === null ? undefined : this.data[0][index];
    const isSeen = at !== undefined && at >= this.x[0] && at <= this.x[1];
    this.cursorIndex = isSeen ? index : null;
    this.drawOver();
  }

  drawOver() {
    const { area, options, dragFrom, dragTo } = this, context = this.emptied(this.over);
    if (dragFrom !== null && Math.abs(dragTo - dragFrom) >= DRAG) {
      context.globalAlpha = 0.25;
      context.fillStyle = options.accent;
      context.fillRect(area.left + Math.min(dragFrom, dragTo), area.top, Math.abs(dragTo - dragFrom), area.height);
      context.globalAlpha = 1;
    }
    if (this.cursorIndex === null) return;
    const x = Math.round(this.placeX(this.data[0][this.cursorIndex])) + 0.5;
    context.strokeStyle = options.muted;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(x, area.top);
    context.lineTo(x, area.top + area.height);
    context.stroke();
    options.lines.forEach(({ stroke, width }, column) => {
      const value = this.data[column + 1][this.cursorIndex];
      if (!width || value === null || value === undefined) return;
      context.fillStyle = stroke;
      context.beginPath();
      context.arc(x, this.placeY(value), 3, 0, 2 * Math.PI);
      context.fill();
    });
  }
}
