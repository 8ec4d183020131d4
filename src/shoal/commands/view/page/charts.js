// Curves: one chart a metric, all of a page with one range of steps. Dragging zooms, a double click shows all.

import { duration, el, num, percent } from "./dom.js";
import { LinePlot } from "./plot.js";

const HEIGHT = 150, LARGE = 240;
const STEPS = { name: "step", toX: (step) => step, toStep: (step) => step };
const LINE = "http://www.w3.org/2000/svg";

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const runColour = (place) => colour(`--s${(place % 3) + 1}`); // no more are compared

/** Points below which a curve is not smoothed: the smoothed end of a short run is far from its last value. */
const LEAST_SMOOTHED = 10;

/** Exponential smoothing that does not lag at the beginning; gaps stay gaps. */
export function smoothed(values, amount) {
  const points = values.filter((value) => value !== null && value !== undefined).length;
  if (!amount || points < LEAST_SMOOTHED) return values;
  let held = 0, weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    held = amount * held + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return held / weight;
  });
}

/** A shape of an SVG picture. */
export function shape(tag, attributes) {
  const node = document.createElementNS(LINE, tag);
  Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
  return node;
}

/** A small curve without axes, and its interval where it has one. */
export function sparkline({ x, y, low, high }, label, width = 150, height = 36) {
  const known = y.map((value, place) => ({ value, at: x[place], low: low?.[place] ?? value, high: high?.[place] ?? value }))
    .filter(({ value }) => value !== null);
  if (known.length < 2) return null;
  const bottom = Math.min(...known.map((one) => one.low)), top = Math.max(...known.map((one) => one.high));
  const first = known[0].at, range = known[known.length - 1].at - first;
  const point = (at, value) => `${(2 + ((at - first) / range) * (width - 4)).toFixed(1)},`
    + `${(height - 2 - ((value - bottom) / (top - bottom || 1)) * (height - 4)).toFixed(1)}`;
  const picture = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label":
    `${label}: ${num(known[0].value)} to ${num(known[known.length - 1].value)}` });
  if (low) {
    const edge = [...known.map((one) => point(one.at, one.low)), ...known.toReversed().map((one) => point(one.at, one.high))];
    picture.append(shape("polygon", { class: "band", points: edge.join(" ") }));
  }
  picture.append(shape("polyline", { class: "line", points: known.map((one) => point(one.at, one.value)).join(" ") }));
  return picture;
}

/** Columns of a series after the steps: its values, those smoothed, and both ends of its interval. */
function columnsOf(one, smoothing, banded) {
  return [one.y, ...(smoothing ? [smoothed(one.y, smoothing)] : []),
    ...(banded ? [one.low ?? one.y.map(() => null), one.high ?? one.y.map(() => null)] : [])];
}

/** A metric of one or several runs as data of a plot: steps, then the columns of each run, then the ends of a recipe's band. */
function chartData(series, smoothing, banded, recipe) {
  const steps = [...new Set([...series.flatMap((one) => one.x), ...recipe?.x ?? []])].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const atSteps = (x, values) => {
    const column = new Array(steps.length).fill(null);
    x.forEach((step, index) => { column[place.get(step)] = values[index]; });
    return column;
  };
  const columns = series.flatMap((one) => columnsOf(one, smoothing, banded).map((values) => atSteps(one.x, values)));
  const ends = recipe ? [recipe.low, recipe.high].map((values) => atSteps(recipe.x, values)) : [];
  return [steps, ...columns, ...ends];
}

/** Whether a metric says anything: false where all its values are one. */
export function varies(series) {
  const values = series.flatMap((one) => one.y).filter((value) => value !== null);
  return values.some((value) => value !== values[0]) || values.length === 1;
}

function axisLabel(tick, unit) {
  if (tick === null) return "";
  if (unit === "share") return `${num(100 * tick)}%`;
  return Math.abs(tick) >= 1e4 ? tick.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 3 })
    : num(tick, 3);
}

export class Chart {
  /** `series`: [{name, x, y, low, high, n, place}]; `options`: title, unit, meaning, events, smoothing, log, range, onZoom,
   * onStep, large, pinned, onPin, `axis` {name, toX, toStep}, `recipe` {name, seeds, x, low, high, apart}, a band. */
  constructor(series, options) {
    this.options = { axis: STEPS, ...options };
    this.format = options.unit === "share" ? percent : (value) => num(value) + (options.unit ? ` ${options.unit}` : "");
    this.value = el("output", { class: "reading" });
    this.plotBox = el("div", { class: "plot" });
    const meaning = el("p", { class: "faint meaning", hidden: true, text: options.meaning ?? "" });
    const help = el("button", { type: "button", class: "plain", "aria-expanded": "false", "aria-label": `what is ${options.title}?`,
      text: "?", on: { click: () => help.setAttribute("aria-expanded", String(!(meaning.hidden = !meaning.hidden))) } });
    const pin = el("button", { type: "button", class: "plain", "aria-pressed": String(Boolean(options.pinned)),
      "aria-label": `pin ${options.title}`, title: "pin", text: options.pinned ? "★" : "☆", on: { click: () => options.onPin?.() } });
    this.node = el("figure", { class: options.large ? "chart large" : "chart" },
      el("figcaption", {}, el("span", { class: "name", text: options.title }),
        this.value,
        options.meaning ? help : null, pin), meaning, this.recipeNote(), this.plotBox);
    this.series = series;
    this.plot = null;
    this.width = 0;
    this.observer = new ResizeObserver(([entry]) => this.resize(Math.floor(entry.contentRect.width)));
    this.observer.observe(this.plotBox);
    this.describe();
  }

  recipeNote() {
    const { recipe } = this.options;
    if (!recipe) return null;
    const text = `grey: ${num(recipe.seeds)} seeds of recipe ${recipe.name}`;
    return el("p", { class: "faint recipe", dir: "auto", text: recipe.apart ? `${text}; ${recipe.apart}` : text });
  }

  describe() {
    const { format } = this;
    const said = this.series.map((one) => {
      const known = one.y.filter((value) => value !== null);
      return known.length ? `${one.name}: ${format(known[0])} to ${format(known[known.length - 1])}, `
        + `lowest ${format(Math.min(...known))}, highest ${format(Math.max(...known))}` : `${one.name}: no values`;
    });
    this.plotBox.setAttribute("role", "img");
    this.plotBox.setAttribute("aria-label", `${this.options.title} by ${this.options.axis.name}. ${said.join(". ")}`);
    this.value.textContent = this.series.map((one) => {
      const known = one.y.filter((value) => value !== null);
      return known.length ? format(known[known.length - 1]) : "–";
    }).join(" · ");
  }

  resize(width) {
    if (width < 40 || width === this.width) return;
    this.width = width;
    if (this.plot) this.plot.setSize({ width, height: this.height });
    else this.draw();
  }

  get height() {
    return this.options.large ? LARGE : HEIGHT;
  }

  get banded() {
    return this.series.some((one) => one.low?.some((value) => value !== null));
  }

  get stride() {
    return 1 + (this.options.smoothing ? 1 : 0) + (this.banded ? 2 : 0);
  }

  get data() {
    return chartData(this.series, this.options.smoothing, this.banded, this.options.recipe);
  }

  draw() {
    this.plot?.destroy();
    if (!this.width) return;
    const { smoothing, log, range, onZoom, axis: across, unit, large, recipe } = this.options, { data, stride, banded } = this;
    const positive = log && data.slice(1).every((column) => column.every((value) => value === null || value > 0));
    const isShort = data[0].length < 40; // then each step is a point
    const lines = this.series.flatMap((one) => {
      const stroke = runColour(one.place);
      const whole = { stroke, width: 1.5, pointSize: isShort || one.x.length < 2 ? 5 : 0 };
      const edge = { stroke, width: 0 };
      const curves = smoothing ? [{ stroke, width: 1, alpha: 0.3, pointSize: isShort ? 3 : 0 }, { stroke, width: 2 }] : [whole];
      return banded ? [...curves, edge, edge] : curves;
    });
    const bands = banded ? this.series.map((one, place) => ({ high: (place + 1) * stride, low: (place + 1) * stride - 1,
      fill: `${runColour(one.place)}2e` })) : [];
    if (recipe) {
      lines.push({ width: 0 }, { width: 0 });
      bands.unshift({ high: data.length - 1, low: data.length - 2, fill: `${colour("--muted")}3d` });
    }
    this.plot = new LinePlot(this.plotBox, {
      width: this.width, height: this.height, data, lines, bands, log: positive,
      range: range?.map(across.toX) ?? null, share: across.name, label: large ? across.name : "",
      formatX: (tick) => this.axisX(tick), formatY: (tick) => axisLabel(tick, unit),
      muted: colour("--muted"), grid: colour("--line"), accent: colour("--accent"),
      onCursor: (place) => this.read(place),
      onSelect: ([low, high]) => onZoom?.([Math.floor(across.toStep(low)), Math.ceil(across.toStep(high))]),
      onClick: (place) => this.options.onStep?.(across.toStep(this.plot.data[0][place])),
      onDoubleClick: () => onZoom?.(null),
      onDraw: (plot) => this.drawEvents(plot),
    });
  }

  axisX(value) {
    const { name } = this.options.axis;
    if (name === "time") return duration(value);
    return name === "tokens" ? axisLabel(value) : Number.isInteger(value) ? num(value) : "";
  }

  read(place) {
    if (place === null) {
      this.describe();
      return;
    }
    const { stride, format, plot } = this, at = plot.data[0][place];
    this.value.textContent = `${this.options.axis.name} ${this.axisX(at) || num(at)}: ` + this.series.map((one, index) => {
      const value = format(plot.data[1 + stride * index][place]), own = one.x.indexOf(at);
      return own < 0 || !this.banded || one.low?.[own] === null ? value
        : `${value} (${format(one.low[own])} to ${format(one.high[own])}${one.n?.[own] ? `, ${num(one.n[own])} questions` : ""})`;
    }).join(" · ") + this.recipeReading(at);
  }

  recipeReading(at) {
    const { recipe } = this.options, place = recipe?.x.indexOf(at) ?? -1;
    return place < 0 ? "" : ` · recipe ${this.format(recipe.low[place])} to ${this.format(recipe.high[place])}`;
  }

  /** Marks on the time line: warnings, spikes, failures. */
  drawEvents(plot) {
    const { context, area } = plot;
    context.save();
    context.setLineDash([3, 3]);
    context.lineWidth = 1;
    for (const event of this.options.events ?? []) {
      const elsewhere = event.metrics && !event.metrics.includes(this.options.title);
      if (event.level === "evaluation" || elsewhere) continue;
      const left = plot.placeX(this.options.axis.toX(event.step));
      if (left < area.left || left > area.left + area.width) continue;
      context.strokeStyle = colour(event.level === "note" ? "--muted" : "--warn");
      context.beginPath();
      context.moveTo(left, area.top);
      context.lineTo(left, area.top + area.height);
      context.stroke();
    }
    context.restore();
  }

  update(series, options) {
    const before = this.options;
    this.series = series;
    this.options = { ...before, ...options };
    this.describe();
    const same = this.plot && before.smoothing === this.options.smoothing && before.log === this.options.log
      && String(before.range) === String(this.options.range) && before.axis.name === this.options.axis.name
      && this.plot.data.length - 1 === series.length * this.stride + (this.options.recipe ? 2 : 0) && !options?.redraw;
    if (same) this.plot.setData(this.data);
    else this.draw();
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}
