// Curves and the plot of scores against cost, drawn with uPlot from the data that page_data.py packed into the page.
"use strict";

const COLOURS = ["#2f86c9", "#d55e00", "#009e73", "#cc79a7", "#b87d00", "#56b4e9", "#8c6d31", "#7b61c4"];
const INK = "#747f8b", LINES = "#747f8b40"; // read on light, dark and printed ground

async function unpack(id) {
  const text = atob(document.getElementById(id).textContent), bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at); // four times as fast as Uint8Array.from
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return JSON.parse(await new Response(stream).text());
}

let unpacked; // what is shown on demand, unpacked when it is first asked for
const details = () => (unpacked ??= unpack("details"));

function element(tag, attributes = {}, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

function chooser(label, values, chosen) {
  const select = element("select", {}, ...values.map((value) => element("option", { value }, value)));
  select.addEventListener("change", () => chosen(select.value));
  return [element("label", {}, label + " ", select), select];
}

const short = (value) => (value == null ? "–" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));
const counted = (value) => Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);

// The point of a series that is nearest to the cursor: series have values at different x.
function nearest(u, series, index) {
  const values = u.data[series];
  for (let step = 0; step < values.length; step++)
    for (const at of [index - step, index + step]) if (values[at] != null) return at;
  return index;
}

// One plot that follows its place's width; arrow keys move the cursor, whose values stand in the legend.
function draw(place, data, series, axes, more = {}) {
  place.uplot?.destroy();
  place.replaceChildren();
  const axis = (label, values) => ({
    label, stroke: INK, grid: { stroke: LINES, width: 1 }, ticks: { stroke: LINES }, values: (u, all) => all.map((v) => (v == null ? "" : values(v))),
  });
  const width = () => Math.max(280, place.clientWidth);
  const u = new uPlot({
    width: width(), height: 300, scales: { x: { time: false, distr: more.log ? 3 : 1 } },
    axes: [axis(axes[0], counted), axis(axes[1], short)],
    series: [{ label: axes[0], value: (u, v) => (v == null ? "–" : counted(v)) }, ...series],
    cursor: { focus: { prox: more.closest ? -1 : 40 }, dataIdx: more.closest ?? nearest, points: { size: 7 } },
  }, data, place);
  place.uplot = u;
  place.tabIndex = 0;
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", `${axes[1]} over ${axes[0]}: ${series.map((s) => s.label).join(", ")}. Arrow keys move the cursor.`);
  place.onkeydown = (event) => {
    const step = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
    if (!step) return;
    const plot = u.over.getBoundingClientRect();
    u.setCursor({ left: Math.min(plot.width, Math.max(0, Math.max(u.cursor.left, 0) + step * plot.width)), top: plot.height / 2 });
    event.preventDefault();
  };
  new ResizeObserver(() => place.uplot === u && u.setSize({ width: width(), height: 300 })).observe(place);
  return u;
}

const COSTS = ["tokens", "exaFLOPs", "hours"]; // of the x axis of curves
const MEASURES = { loss: "loss (nats)", lr: "learning rate" };

// Curves of some runs: a line each, and their validations as points of the same colour.
function curves(place, runs, x, y) {
  const tables = [], series = [];
  const table = ({ curve }, columns) => {
    const xs = x === "exaFLOPs" ? columns.tokens.map((n) => n * curve.flops) : columns[x];
    const order = [...xs.keys()].sort((a, b) => xs[a] - xs[b]); // a resumed run repeats steps
    return [order.map((at) => xs[at]), order.map((at) => columns[y][at])];
  };
  runs.filter(({ curve }) => x !== "exaFLOPs" || curve.flops).forEach((run, index) => {
    const colour = COLOURS[index % COLOURS.length], value = (u, v) => short(v), { train, validation } = run.curve;
    if (train[y].length) {
      tables.push(table(run, train));
      series.push({ label: run.name, stroke: colour, width: 1.6, spanGaps: true, points: { show: train[y].length === 1 }, value });
    }
    if (y === "loss" && validation.loss.length) {
      tables.push(table(run, validation));
      series.push({ label: `${run.name}, validation`, stroke: colour, paths: () => null, points: { show: true, size: 6, width: 1.5 }, value });
    }
  });
  if (series.length) draw(place, uPlot.join(tables), series, [x, MEASURES[y]]);
  else place.replaceChildren(`No run here has ${y} over ${x} on record.`);
}

// Choosers of both axes above a plot; hands back what redraws it, for other runs when given.
function curvePanel(place, runs) {
  const plot = element("div", { class: "plot" }), redraw = (others) => curves(plot, (runs = others ?? runs), over.value, of.value);
  const [xLabel, over] = chooser("Over", COSTS, () => redraw()), [yLabel, of] = chooser("Curve", Object.keys(MEASURES), () => redraw());
  place.replaceChildren(element("div", { class: "controls" }, yLabel, xLabel), plot);
  redraw();
  return redraw;
}

async function drawCurves(root, facts) {
  for (const place of root.querySelectorAll(".curves[data-run]")) {
    const { curve } = (await details()).runs[place.dataset.run];
    const points = curve.train.loss.length + curve.validation.loss.length;
    if (points) curvePanel(place, [{ name: facts[place.dataset.run].name, curve }]);
  }
}

// Score against cost: a point for each run that has both; a click opens the run.
function costPanel(place, facts, open) {
  const suite = place.dataset.suite, plot = element("div", { class: "plot" }), divisions = ["closed", "open", "invalid", "unfinished"];
  const redraw = () => {
    const known = Object.entries(facts).filter(([, run]) => run.visible && run.cost[cost.value] > 0 && run.scores[suite] != null);
    known.sort(([, a], [, b]) => a.cost[cost.value] - b.cost[cost.value]);
    if (!known.length) return plot.replaceChildren(`No run here has a score and ${cost.value} on record.`);
    const shown = divisions.filter((name) => known.some(([, run]) => run.division === name));
    const data = [known.map(([, run]) => run.cost[cost.value]), ...shown.map((name) => known.map(([, run]) => (run.division === name ? run.scores[suite] : null)))];
    const series = shown.map((name) => ({
      label: name, stroke: COLOURS[divisions.indexOf(name)], paths: () => null, points: { show: true, size: 8, width: 2 },
      value: (u, v, at, index) => (index == null || v == null ? "–" : `${v.toFixed(1)} ${known[index][1].name}`),
    }));
    let at = 0; // the point closest to the cursor: many runs have the same budget
    const distance = (u, [, run]) => Math.hypot(u.valToPos(run.cost[cost.value], "x") - u.cursor.left, u.valToPos(run.scores[suite], "y") - u.cursor.top);
    const closest = (u, column) => {
      if (column === 0) at = known.reduce((best, run, index) => (distance(u, run) < distance(u, known[best]) ? index : best), 0);
      return u.data[column][at] == null ? null : at;
    };
    const spans = known.at(-1)[1].cost[cost.value] / known[0][1].cost[cost.value];
    const u = draw(plot, data, series, [cost.value, place.dataset.title], { log: spans > 20, closest });
    u.over.addEventListener("click", () => open(known[at][0]));
  };
  const [label, cost] = chooser("Cost", ["hours", "exaFLOPs", "tokens", "parameters"], redraw);
  place.replaceChildren(element("div", { class: "controls" }, label), plot);
  redraw();
  return redraw;
}
