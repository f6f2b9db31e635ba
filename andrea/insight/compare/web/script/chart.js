// The chart: one curve for each run, and the tip with the figures of one evaluation.

const TITLES = {
  tokens: "tokens",
  flops: "training FLOPs",
  seconds: "seconds of training steps",
  bytes: "bytes of the weights",
  loss: "loss, nats per token",
  bpb: "validation, bits per byte",
};
const MARKER_CORNERS = {
  square: [[-1, -1], [1, -1], [1, 1], [-1, 1]],
  triangle: [[0, -1.2], [1.2, 1], [-1.2, 1]],
  diamond: [[0, -1.4], [1.4, 0], [0, 1.4], [-1.4, 0]],
};
const REACH_PIXELS = 60; // how far from the pointer an evaluation may be to be selected

const darkTheme = matchMedia("(prefers-color-scheme: dark)");
const hidden = new Set(); // indices of the runs that are not drawn
let selected = null; // {run, evaluation}: indices of the evaluation that the tip describes
let evaluations = []; // every drawn evaluation: {run, evaluation, x, y}, the last two in pixels

function chosen(name) {
  return document.querySelector(`input[name=${name}]:checked`).value;
}

function colourOf(run) {
  return darkTheme.matches ? run.dark : run.light;
}

function visibleRuns() {
  return data.runs.map((_, index) => index).filter((index) => !hidden.has(index));
}

// The points of a run's thick line: its evaluations in training, or what it was judged to be worth in so many bytes.
function pointsOf(run) {
  return chosen("axis") === "bytes" ? run.sizes : run.validation;
}

// A function from values between low and high to pixels between from and to.
function makeScale(low, high, from, to, isLog) {
  const transform = isLog ? Math.log : (value) => value;
  const factor = (to - from) / (transform(high) - transform(low));
  return (value) => from + (transform(value) - transform(low)) * factor;
}

// At most `most` values for grid lines between low and high.
function gridValues(low, high, isLog, most) {
  return (isLog && logGridValues(low, high, most)) || linearGridValues(low, high, most);
}

// Round multiples of powers of ten, from the densest pattern that fits; null where that leaves fewer than two.
function logGridValues(low, high, most) {
  let found = [];
  for (const multiples of [[1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      found.push(...multiples.map((multiple) => multiple * 10 ** power));
    }
    found = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
    if (found.length <= most) break;
  }
  const stride = Math.ceil(found.length / most);
  return found.length >= 2 ? found.filter((_, index) => index % stride === 0) : null;
}

// Multiples of 1, 2 or 5 times a power of ten.
function linearGridValues(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let index = Math.ceil(low / step); index * step <= high * 1.0001; index++) {
    found.push(+(index * step).toPrecision(12));
  }
  return found;
}

// The values as text, in as few digits as tell them apart, and at least three.
function labelsOf(values) {
  for (let digits = 3; ; digits++) {
    const texts = values.map((value) => String(+value.toPrecision(digits)));
    if (digits === 12 || new Set(texts).size === texts.length) return texts;
  }
}

function newMarker(marker, x, y, size, colour) {
  const common = { fill: colour, stroke: "var(--panel)", "stroke-width": 1 };
  if (marker === "circle") return newShape("circle", { cx: x, cy: y, r: size, ...common });
  const corners = MARKER_CORNERS[marker].map(([dx, dy]) => `${x + dx * size},${y + dy * size}`);
  return newShape("polygon", { points: corners.join(" "), ...common });
}

function drawChart() {
  const view = {
    metric: chosen("axis") === "bytes" ? "bpb" : chosen("metric"),
    axis: chosen("axis"),
    logX: byId("log-x").checked,
    logY: byId("log-y").checked,
    runs: visibleRuns(),
  };
  view.withTraining = view.metric === "loss" && byId("training").checked;
  byId("training").disabled = view.metric !== "loss";
  for (const metric of document.querySelectorAll("input[name=metric]")) metric.disabled = view.axis === "bytes";
  byId("chart").replaceChildren();
  evaluations = [];
  if (layOut(view)) {
    drawGrid(view);
    drawTitles(view);
    drawCurves(view);
  }
  if (selected && !evaluations.some(isSelected)) selected = null;
  drawTip();
}

// Adds the chart's edges and scales to the view; false where there is nothing to draw.
function layOut(view) {
  const chart = byId("chart");
  const width = byId("frame").clientWidth; // 0 while the page is not displayed
  const height = Math.max(300, Math.min(520, width * 0.55));
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.setAttribute("height", height);
  Object.assign(view, { width, height, left: 58, right: width - 14, top: 14, bottom: height - 46 });

  const runs = view.runs.map((index) => data.runs[index]);
  const points = runs.flatMap((run) => [...pointsOf(run), ...(view.withTraining ? run.training : [])]);
  const xs = points.map((point) => point[view.axis]).filter((value) => !view.logX || value > 0);
  // Training points hold the loss alone; they are drawn with it only.
  const withBand = points.filter((point) => view.metric === "bpb" && point.expected !== undefined);
  const edges = withBand.flatMap((point) => [point.expected - point.spread, point.expected + point.spread]);
  const ys = [...points.map((point) => point[view.metric]), ...edges];
  view.logY &&= ys.every((value) => value > 0); // the training loss of some objectives falls below 0
  if (!xs.length || !ys.length || !width) return false;
  let [lowX, highX] = [view.logX ? Math.min(...xs) : 0, Math.max(...xs)];
  if (lowX === highX) [lowX, highX] = [lowX / 2, highX * 2 || 1];
  let [lowY, highY] = [Math.min(...ys), Math.max(...ys)];
  const [margin, factor] = [Math.max((highY - lowY) * 0.08, highY * 0.01), Math.max((highY / lowY) ** 0.06, 1.01)];
  [lowY, highY] = view.logY ? [lowY / factor, highY * factor] : [lowY - margin, highY + margin];
  view.x = makeScale(lowX, highX, view.left + 8, view.right - 8, view.logX);
  view.y = makeScale(lowY, highY, view.bottom, view.top, view.logY);
  view.gridX = gridValues(lowX, highX, view.logX, Math.max(3, width / 110));
  view.gridY = gridValues(lowY, highY, view.logY, 8);
  return true;
}

function drawGrid({ axis, left, right, top, bottom, x, y, gridX, gridY }) {
  const chart = byId("chart");
  const labels = labelsOf(gridY);
  for (const [index, value] of gridY.entries()) {
    chart.append(newShape("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }));
    const place = { x: left - 7, y: y(value) + 4, "text-anchor": "end" };
    chart.append(newShape("text", place, labels[index]));
  }
  for (const value of gridX) {
    chart.append(newShape("line", { class: "grid", x1: x(value), x2: x(value), y1: top, y2: bottom }));
    const text = axis === "flops" && value >= 1e6 ? formatPower(value, 0) : formatNumber(value);
    chart.append(newShape("text", { x: x(value), y: bottom + 17, "text-anchor": "middle" }, text));
  }
  chart.append(newShape("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
}

function drawTitles({ axis, metric, height, left, right, top, bottom }) {
  const common = { class: "title", "text-anchor": "middle" };
  const middle = (top + bottom) / 2;
  const rotated = { ...common, x: 14, y: middle, transform: `rotate(-90 14 ${middle})` };
  byId("chart").append(
    newShape("text", { ...common, x: (left + right) / 2, y: height - 10 }, TITLES[axis]),
    newShape("text", rotated, TITLES[metric]),
  );
}

function drawCurves(view) {
  const chart = byId("chart");
  const { left, right, top, bottom } = view;
  const clip = newShape("clipPath", { id: "inside" });
  clip.append(newShape("rect", { x: left, y: top, width: right - left, height: bottom - top }));
  chart.append(clip);
  if (view.withTraining) {
    for (const index of view.runs) {
      const run = data.runs[index];
      const style = { stroke: colourOf(run), "stroke-width": 1, "stroke-dasharray": "", opacity: 0.45 };
      chart.append(newCurve(view, run.training, "loss", style));
    }
  }
  if (view.metric === "bpb") for (const index of view.runs) drawExpected(view, data.runs[index]);
  for (const index of view.runs) drawValidation(view, index);
}

function newCurve({ axis, logX, x, y }, points, metric, style) {
  const drawn = points.filter((point) => !logX || point[axis] > 0);
  const corners = drawn.map((point) => `${x(point[axis]).toFixed(1)} ${y(point[metric]).toFixed(1)}`);
  const shape = { fill: "none", "stroke-linejoin": "round", "clip-path": "url(#inside)" };
  return newShape("path", { ...shape, ...style, d: corners.length ? `M${corners.join("L")}` : "" });
}

// The expected curve of a run's recipe: its mean as a dotted line, its spread over seeds as a band.
function drawExpected(view, run) {
  const points = pointsOf(run).filter((point) => point.expected !== undefined && (!view.logX || point[view.axis] > 0));
  if (!points.length) return;
  const [colour, chart] = [colourOf(run), byId("chart")];
  const edge = (point, sign) =>
    `${view.x(point[view.axis]).toFixed(1)} ${view.y(point.expected + sign * point.spread).toFixed(1)}`;
  const corners = [...points.map((point) => edge(point, 1)), ...[...points].reverse().map((point) => edge(point, -1))];
  const band = { class: "expected", fill: colour, opacity: 0.15, "clip-path": "url(#inside)" };
  chart.append(newShape("path", { ...band, d: `M${corners.join("L")}Z` }));
  const line = { class: "expected", stroke: colour, "stroke-width": 1.4, "stroke-dasharray": "2 4" };
  chart.append(newCurve(view, points, "expected", line));
}

// A run's validation curve with a marker for each evaluation, a larger one for the last.
function drawValidation(view, index) {
  const chart = byId("chart");
  const run = data.runs[index];
  const style = { stroke: colourOf(run), "stroke-width": 2.2, "stroke-dasharray": run.dash };
  const points = pointsOf(run);
  chart.append(newCurve(view, points, view.metric, style));
  points.forEach((point, evaluation) => {
    if (view.logX && !(point[view.axis] > 0)) return;
    const [x, y] = [view.x(point[view.axis]), view.y(point[view.metric])];
    evaluations.push({ run: index, evaluation, x, y });
    chart.append(newMarker(run.marker, x, y, evaluation === points.length - 1 ? 5 : 3.2, colourOf(run)));
  });
}

// ------------------------------------------------------------------------------------------------------------ tip

function isSelected(at) {
  return at.run === selected.run && at.evaluation === selected.evaluation;
}

function drawTip() {
  const tip = byId("tip");
  byId("chart").querySelector(".ring")?.remove();
  tip.hidden = !selected;
  if (!selected) return;
  const at = evaluations.find(isSelected);
  tip.textContent = tipText(data.runs[at.run], pointsOf(data.runs[at.run])[at.evaluation]);
  const ring = { class: "ring", cx: at.x, cy: at.y, r: 9, fill: "none", stroke: "var(--ink)", "stroke-width": 2 };
  byId("chart").append(newShape("circle", ring));
  const frame = byId("frame");
  const fitsRight = frame.clientWidth - at.x - 16 > tip.offsetWidth;
  const lowest = frame.clientHeight - tip.offsetHeight - 4;
  tip.style.left = `${fitsRight ? at.x + 14 : Math.max(2, at.x - tip.offsetWidth - 14)}px`;
  tip.style.top = `${Math.max(4, Math.min(at.y - tip.offsetHeight / 2, lowest))}px`;
}

function tipText(run, point) {
  if (point.bytes !== undefined) {
    const figures = [`bits per byte    ${point.bpb.toFixed(4)}`, `weights          ${point.precision}, ${formatNumber(point.bytes)} bytes`];
    return [run.name, run.size, ...figures, ...point.text.split(": "), `step ${point.step.toLocaleString("en")}`].join("\n");
  }
  return [
    run.name,
    run.size,
    `validation loss  ${point.loss.toFixed(4)}`,
    `bits per byte    ${point.bpb.toFixed(4)}`,
    ...(point.expected === undefined ? [] : [`expected         ${point.expected.toFixed(4)} ± ${point.spread.toFixed(4)}`]),
    `step ${point.step.toLocaleString("en")} · ${formatNumber(point.tokens)} tokens`,
    `${formatPower(point.flops, 2)} FLOPs · ${formatNumber(point.seconds)} s`,
  ].join("\n");
}

// Selects the evaluation nearest to the pointer.
function selectNearest(event) {
  const box = byId("chart").getBoundingClientRect();
  const distance = (at) => Math.hypot(at.x - (event.clientX - box.left), at.y - (event.clientY - box.top));
  const nearest = evaluations.reduce((best, at) => (!best || distance(at) < distance(best) ? at : best), null);
  selected = nearest && distance(nearest) < REACH_PIXELS ? { run: nearest.run, evaluation: nearest.evaluation } : null;
  drawTip();
}

function unselect() {
  selected = null;
  drawTip();
}

// Arrow keys: left and right along a run, up and down between runs.
function moveSelection(event) {
  const runs = visibleRuns();
  if (event.key === "Escape") selected = null;
  else if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key) || !runs.length) return;
  else if (!selected) selected = { run: runs.at(-1), evaluation: pointsOf(data.runs[runs.at(-1)]).length - 1 };
  else {
    let { run, evaluation } = selected;
    evaluation += { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
    const turn = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (turn) run = runs[(runs.indexOf(run) + turn + runs.length) % runs.length];
    selected = { run, evaluation: Math.max(0, Math.min(evaluation, pointsOf(data.runs[run]).length - 1)) };
  }
  event.preventDefault();
  drawTip();
}
