// Plots with uPlot: curves of runs, and scores against what they cost.
"use strict";

const COLOURS = ["#2f86c9", "#d55e00", "#009e73", "#cc79a7", "#b87d00", "#56b4e9", "#8c6d31", "#7b61c4"];
const INK = "#747f8b", LINES = "#747f8b40"; // read on light, dark and printed ground

const short = (value) => (value == null ? "–" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 }));
const compactNumber = (value) => (Math.abs(value) < 1e-3 && value ? value.toExponential(1) : Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value));

// The point of a series that is nearest to the cursor: series have values at different x.
function nearest(u, series, index) {
  const values = u.data[series];
  for (let step = 0; step < values.length; step++)
    for (const at of [index - step, index + step]) if (values[at] != null) return at;
  return index;
}

// One plot that follows the width of its place; arrow keys move the cursor, whose values stand in the legend.
function draw(place, data, series, axes, more = {}) {
  place.uplot?.destroy();
  place.replaceChildren();
  const axis = (label, values) => ({
    label, stroke: INK, grid: { stroke: LINES, width: 1 }, ticks: { stroke: LINES }, values: (u, all) => all.map((v) => (v == null ? "" : values(v))),
  });
  const width = () => Math.max(280, place.clientWidth);
  const u = new uPlot({
    width: width(), height: 320, scales: { x: { time: false, distr: more.log ? 3 : 1 } },
    axes: [axis(axes[0], compactNumber), axis(axes[1], short)],
    series: [{ label: axes[0], value: (u, v) => (v == null ? "–" : compactNumber(v)) }, ...series],
    cursor: { focus: { prox: more.closest ? -1 : 40 }, dataIdx: more.closest ?? nearest, points: { size: 7 } },
    hooks: { draw: more.drawn ? [more.drawn] : [] },
  }, data, place);
  place.uplot = u;
  place.tabIndex = 0;
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", `${axes[1]} over ${axes[0]}. Arrow keys move the cursor.`);
  place.onkeydown = (event) => {
    const step = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
    if (!step) return;
    const plot = u.over.getBoundingClientRect();
    u.setCursor({ left: Math.min(plot.width, Math.max(0, Math.max(u.cursor.left, 0) + step * plot.width)), top: plot.height / 2 });
    event.preventDefault();
  };
  new ResizeObserver(() => place.uplot === u && u.setSize({ width: width(), height: 320 })).observe(place);
  return u;
}

const AXES = { step: "steps", tokens: "tokens", hours: "hours", exaflops: "exaFLOPs" };
const MEASURES = { loss: "loss (nats)", lr: "learning rate", grad_norm: "gradient norm" };

// Values of an x axis for the points of one column group of a curve.
function xValues(columns, axis, flops) {
  if (axis === "hours") return columns.seconds.map((seconds) => seconds / 3600);
  if (axis === "exaflops") return columns.tokens.map((tokens) => tokens * flops);
  return columns[axis];
}

// Exponential moving average without its bias at the start; a gap stays a gap.
function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

// Curves of some runs: a line each, and their validations as points of the same colour.
function drawCurves(place, runs, { axis, measure, smooth }) {
  const tables = [], series = [], value = (u, v) => short(v);
  const table = (columns, flops, values) => {
    const xs = xValues(columns, axis, flops), order = [...xs.keys()].sort((a, b) => xs[a] - xs[b]); // a resumed run repeats steps
    return [order.map((at) => xs[at]), order.map((at) => values[at])];
  };
  runs.forEach(({ name, curve: { train, validation, flops } }, index) => {
    if (axis === "exaflops" && !flops) return;
    const stroke = COLOURS[index % COLOURS.length];
    if (train[measure].some((v) => v != null)) {
      if (smooth > 0) {
        tables.push(table(train, flops, train[measure]));
        series.push({ label: `${name}, as logged`, stroke: stroke + "50", width: 1, spanGaps: true, points: { show: false }, value });
      }
      tables.push(table(train, flops, smoothed(train[measure], smooth)));
      series.push({ label: name, stroke, width: 1.8, spanGaps: true, points: { show: train[measure].length === 1 }, value });
    }
    if (measure === "loss" && validation.step.length) {
      tables.push(table(validation, flops, validation.validation_loss));
      series.push({ label: `${name}, validation`, stroke, paths: () => null, points: { show: true, size: 6, fill: stroke }, value });
    }
  });
  if (series.length) draw(place, uPlot.join(tables), series, [AXES[axis], MEASURES[measure]]);
  else place.replaceChildren(`No run here has ${MEASURES[measure]} over ${AXES[axis]}.`);
}

// Choosers above a plot of curves; returns what draws it for some runs. `state` keeps what was chosen.
function curvePanel(place, state, changed = () => {}) {
  const plot = element("div", { class: "plot" }), known = { runs: [] };
  const redraw = () => drawCurves(plot, known.runs, state);
  const set = (name) => (value) => { state[name] = name === "smooth" ? Number(value) : value; redraw(); changed(); };
  const slider = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth });
  slider.addEventListener("input", () => set("smooth")(slider.value));
  place.replaceChildren(element("div", { class: "controls" }, chooser("Curve", Object.entries(MEASURES), state.measure, set("measure")),
    chooser("Over", Object.entries(AXES), state.axis, set("axis")), element("label", {}, "Smoothing ", slider)), plot);
  return (runs) => { known.runs = runs; redraw(); };
}

const COSTS = {
  hours: ["hours", (facts) => facts.spent_seconds / 3600],
  tokens: ["tokens", (facts) => facts.tokens],
  energy: ["energy (kWh)", (facts) => facts.energy_kwh],
  money: ["money (hours × devices × price)", (facts, price) => (facts.spent_seconds / 3600) * (facts.devices ?? 1) * price],
  exaflops: ["exaFLOPs", (facts) => facts.exaflops],
  parameters: ["parameters", (facts) => facts.parameters],
};
const DIVISIONS = ["closed", "open", "invalid", "unfinished"];

// Scores against cost: a point for each row of the table that has both, a line along the checkpoints of each run that
// were scored, and a dashed line for each baseline.
function costPanel(place, board, overview, state, { visible, open, changed }) {
  const plot = element("div", { class: "plot" }), measures = board.columns.filter(([name]) => !["place", "model", "division"].includes(name));
  const trained = board.rows.filter((row) => row.runs.length);
  const scored = ([name]) => trained.some((row) => row[name]?.[0] != null);
  const first = measures.find(scored);
  if (!first) return () => {};
  if (!measures.some(([name]) => name === state.score)) state.score = first[0];
  const cost = (row, name) => COSTS[name][1](overview.runs[row.runs[0]].facts, state.price);
  const costs = Object.keys(COSTS).filter((name) => trained.some((row) => cost(row, name) > 0));
  if (!costs.length) return () => {};
  if (!costs.includes(state.cost)) state.cost = costs[0];
  const redraw = () => {
    const { score } = state, title = measures.find(([name]) => name === score)[1];
    price.parentElement.hidden = state.cost !== "money";
    const dots = trained.filter(visible).map((row) => (
      { x: cost(row, state.cost), y: row[score]?.[0], name: row.model, run: row.runs[0], of: overview.runs[row.runs[0]].division, named: true }));
    const along = board.lines.filter(({ run, name }) => visible({ runs: [run], model: name })).flatMap(({ run, name, points }) => points.map(
      ({ at, spent, scores }) => ({ x: COSTS[state.cost][1](spent, state.price), y: scores[score], name: `${name}, ${at} of the budget`, run, of: `${name}, along the way` })));
    const points = [...dots, ...along].filter(({ x, y }) => x > 0 && y != null).sort((a, b) => a.x - b.x);
    if (!points.length) return plot.replaceChildren("No run here has both.");
    const xs = points.map(({ x }) => x), of = (name) => points.map((point) => (point.of === name ? point.y : null));
    const value = (u, v, at, index) => (index == null || v == null ? "–" : `${v.toFixed(1)} ${points[index].name}`);
    const ways = new Set(points.filter(({ named }) => !named).map((point) => point.of)), shown = DIVISIONS.filter((name) => points.some((point) => point.of === name));
    const series = shown.map((label) => {
      const stroke = COLOURS[DIVISIONS.indexOf(label)];
      return { label, stroke, paths: () => null, points: { show: true, size: 9, fill: stroke }, value };
    });
    [...ways].forEach((label, index) => {
      const stroke = COLOURS[(DIVISIONS.length + index) % COLOURS.length];
      series.push({ label, stroke, width: 1.8, spanGaps: true, points: { show: true, size: 5, fill: stroke }, value });
    });
    const data = [xs, ...[...shown, ...ways].map(of)];
    const baselines = new Map(board.rows.filter((row) => row.division === "baseline" && row[score]?.[0] != null).map((row) => [row.model, row]));
    for (const row of baselines.values()) {
      series.push({ label: row.model, stroke: INK, paths: () => null, points: { show: false }, value: (u, v) => (v == null ? "–" : v.toFixed(1)) });
      data.push(points.map(() => row[score][0]));
    }
    let at = 0; // the point that is closest to the cursor: many runs have the same budget
    const distance = (u, index) => Math.hypot(u.valToPos(xs[index], "x") - u.cursor.left, u.valToPos(points[index].y, "y") - u.cursor.top);
    const closest = (u, column) => {
      if (column === 0) at = xs.reduce((best, _, index) => (distance(u, index) < distance(u, best) ? index : best), 0);
      return u.data[column][at] == null ? null : at;
    };
    const annotate = (u) => { // a dashed line for each baseline, and the names of points where there is room
      u.ctx.save();
      Object.assign(u.ctx, { fillStyle: INK, strokeStyle: INK, font: `${12 * devicePixelRatio}px system-ui`, textBaseline: "middle" });
      u.ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      for (const row of baselines.values()) {
        const y = u.valToPos(row[score][0], "y", true);
        u.ctx.beginPath();
        u.ctx.moveTo(u.bbox.left, y);
        u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
        u.ctx.stroke();
        u.ctx.textAlign = "right";
        u.ctx.fillText(row.model, u.bbox.left + u.bbox.width, y - 8 * devicePixelRatio);
      }
      if (dots.length <= 16) points.filter(({ named }) => named).forEach((point) => {
        const x = u.valToPos(point.x, "x", true), y = u.valToPos(point.y, "y", true), right = x > u.bbox.left + 0.7 * u.bbox.width;
        u.ctx.textAlign = right ? "right" : "left";
        u.ctx.fillText(point.name.slice(0, 24), x + (right ? -9 : 9) * devicePixelRatio, y);
      });
      u.ctx.restore();
    };
    const u = draw(plot, data, series, [COSTS[state.cost][0], title], { log: xs.at(-1) / xs[0] > 20, closest, drawn: annotate });
    u.over.addEventListener("click", () => open(points[at].run));
  };
  const set = (name) => (value) => { state[name] = value; redraw(); changed(); };
  const price = element("input", { type: "number", min: 0, step: 0.1, value: state.price });
  price.addEventListener("input", () => set("price")(Number(price.value)));
  place.replaceChildren(element("h3", {}, "Score against cost"), element("div", { class: "controls" },
    chooser("Score", measures.filter(scored), state.score, set("score")), chooser("Cost", costs.map((name) => [name, COSTS[name][0]]), state.cost, set("cost")),
    element("label", {}, "Price of a device hour ", price)), plot);
  redraw();
  return redraw;
}
