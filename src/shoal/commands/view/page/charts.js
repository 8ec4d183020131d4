// Curves: one chart a metric, all of a page with one range of steps. Dragging zooms, a double click shows all.

import uPlot from "./uPlot.js";
import { el, num } from "./dom.js";

const HEIGHT = 150;

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function runColour(place) {
  return colour(`--s${(place % 6) + 1}`);
}

/** Exponential smoothing that does not lag at the beginning; gaps stay gaps. */
export function smoothed(values, amount) {
  if (!amount) return values;
  let held = 0, weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    held = amount * held + (1 - amount) * value;
    weight = amount * weight + (1 - amount);
    return held / weight;
  });
}

/** A metric of one or several runs as data of uPlot: steps, then for each run the values, and the smoothed ones. */
function chartData(series, smoothing) {
  const steps = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = series.flatMap((one) => {
    const column = new Array(steps.length).fill(null);
    one.x.forEach((step, index) => { column[place.get(step)] = one.y[index]; });
    return smoothing ? [column, smoothed(column, smoothing)] : [column];
  });
  return [steps, ...columns];
}

/** Whether a metric says anything: false where all its values are one. */
export function varies(series) {
  const values = series.flatMap((one) => one.y).filter((value) => value !== null);
  return values.some((value) => value !== values[0]) || (values.length > 0 && values.length < 3);
}

function axisLabel(tick) {
  if (tick === null) return "";
  return Math.abs(tick) >= 1e4 ? tick.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 3 })
    : num(tick, 3);
}

export class Chart {
  /** `series`: [{name, x, y, place}]; `options`: title, unit, meaning, events, smoothing, log, range, onZoom, onStep. */
  constructor(series, options) {
    this.options = options;
    this.value = el("output", { class: "reading" });
    this.plotBox = el("div", { class: "plot" });
    this.node = el("figure", { class: "chart" },
      el("figcaption", { title: options.meaning ?? "" }, el("span", { class: "name", text: options.title }),
        options.unit ? el("span", { class: "faint", text: ` ${options.unit}` }) : null, this.value), this.plotBox);
    this.series = series;
    this.plot = null;
    this.width = 0;
    this.observer = new ResizeObserver(([entry]) => this.resize(Math.floor(entry.contentRect.width)));
    this.observer.observe(this.plotBox);
    this.describe();
  }

  describe() {
    const said = this.series.map((one) => {
      const known = one.y.filter((value) => value !== null);
      return known.length ? `${one.name}: ${num(known[0])} to ${num(known[known.length - 1])}, `
        + `lowest ${num(Math.min(...known))}, highest ${num(Math.max(...known))}` : `${one.name}: no values`;
    });
    this.plotBox.setAttribute("role", "img");
    this.plotBox.setAttribute("aria-label", `${this.options.title} by step. ${said.join(". ")}`);
    this.value.textContent = this.series.map((one) => {
      const known = one.y.filter((value) => value !== null);
      return known.length ? num(known[known.length - 1]) : "–";
    }).join(" · ");
  }

  resize(width) {
    if (width < 40 || width === this.width) return;
    this.width = width;
    if (this.plot) this.plot.setSize({ width, height: HEIGHT });
    else this.draw();
  }

  draw() {
    this.plot?.destroy();
    if (!this.width) return;
    const { smoothing, log, range, onZoom } = this.options;
    const data = chartData(this.series, smoothing);
    const positive = log && data.slice(1).every((column) => column.every((value) => value === null || value > 0));
    const few = data[0].length < 40;
    const lines = this.series.flatMap((one) => {
      const stroke = runColour(one.place);
      const whole = { label: one.name, stroke, width: 1.5, spanGaps: true, points: { show: few, size: 4 } };
      return smoothing ? [{ ...whole, width: 1, alpha: 0.28, points: { show: false } }, { ...whole, width: 2 }] : [whole];
    });
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 },
      ticks: { stroke: colour("--line"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot({
      width: this.width, height: HEIGHT, legend: { show: false }, padding: [6, 8, 0, 0],
      scales: { x: { time: false, range: range ?? undefined }, y: { distr: positive ? 3 : 1 } },
      axes: [{ ...axis, size: 24, space: 50,
        values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? num(tick) : "")) }, { ...axis, size: 52, space: 28,
        values: (_, ticks) => ticks.map(axisLabel) }],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 6 },
        sync: { key: "steps", setSeries: false } },
      series: [{ label: "step" }, ...lines],
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 8) return;
          const low = plot.posToVal(plot.select.left, "x");
          const high = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          onZoom?.([Math.floor(low), Math.ceil(high)]);
        }],
        setCursor: [(plot) => this.read(plot)],
        draw: [(plot) => this.drawEvents(plot)],
      },
    }, data, this.plotBox);
    this.plot.over.addEventListener("dblclick", () => onZoom?.(null));
    this.plot.over.addEventListener("click", () => {
      const place = this.plot?.cursor.idx;
      if (place !== null && place !== undefined) this.options.onStep?.(this.plot.data[0][place]);
    });
  }

  read(plot) {
    const place = plot.cursor.idx;
    if (place === null || place === undefined) {
      this.describe();
      return;
    }
    const stride = this.options.smoothing ? 2 : 1;
    this.value.textContent = `step ${num(plot.data[0][place])}: ` + this.series
      .map((_, index) => num(plot.data[1 + stride * index][place])).join(" · ");
  }

  /** Marks on the time line: warnings, spikes, failures. */
  drawEvents(plot) {
    const context = plot.ctx;
    context.save();
    for (const event of this.options.events ?? []) {
      const elsewhere = event.metrics && !event.metrics.includes(this.options.title);
      if (event.level === "evaluation" || elsewhere) continue;
      const left = plot.valToPos(event.step, "x", true);
      if (left < plot.bbox.left || left > plot.bbox.left + plot.bbox.width) continue;
      context.strokeStyle = colour(event.level === "note" ? "--muted" : "--warn");
      context.setLineDash([3, 3]);
      context.lineWidth = devicePixelRatio;
      context.beginPath();
      context.moveTo(left, plot.bbox.top);
      context.lineTo(left, plot.bbox.top + plot.bbox.height);
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
      && String(before.range) === String(this.options.range) && this.plot.series.length - 1
      === series.length * (this.options.smoothing ? 2 : 1) && !options?.redraw;
    if (same) this.plot.setData(chartData(series, this.options.smoothing));
    else this.draw();
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}
