// The birth of heads: loss, in-context score and the highest score of a head, one above the other on one axis.
// A single run shows every pattern of attention; several runs show the chosen one.

const PATTERN_DASHES = ["", "7 3", "2 3", "9 3 2 3", "5 2 1 2"];
const PATTERN_MARKERS = ["circle", "square", "triangle", "diamond", "circle"];
const STRIP_GAP = 26; // pixels, for the title of the strip below

let births = { curves: [], at: null }; // the drawn curves of scores; the measurement that the tip describes

function fillBirths() {
  const found = data.patterns.filter(({ score }) => data.runs.some((run) => run.births.patterns[score]));
  byId("births-section").hidden = !found.length;
  byId("births-choice").hidden = data.runs.length === 1;
  for (const { score, title } of found) {
    byId("births-pattern").append(newElement("option", { value: score }, title));
  }
  if (found.some(({ score }) => score === "induction")) byId("births-pattern").value = "induction";
  byId("births-pattern").addEventListener("change", drawBirths);
  byId("births").addEventListener("pointermove", showNearestMeasurement);
  byId("births").addEventListener("pointerdown", showNearestMeasurement);
  byId("births").addEventListener("keydown", moveMeasurement);
}

// One curve of scores for each pattern of a single run, or for each visible run.
function birthCurves() {
  if (data.runs.length === 1) {
    return data.patterns.flatMap((pattern, index) => {
      const found = data.runs[0].births.patterns[pattern.score];
      const style = { colour: `var(--pattern-${index})`, dash: PATTERN_DASHES[index], marker: PATTERN_MARKERS[index] };
      return found ? [{ ...found, ...style, name: pattern.title, meaning: pattern.meaning, threshold: pattern.threshold }] : [];
    });
  }
  const pattern = data.patterns.find(({ score }) => score === byId("births-pattern").value);
  return visibleRuns().flatMap((index) => {
    const run = data.runs[index];
    const found = run.births.patterns[pattern.score];
    const style = { colour: colourOf(run), dash: run.dash, marker: run.marker };
    return found ? [{ ...found, ...style, name: run.name, meaning: "", threshold: pattern.threshold }] : [];
  });
}

// The three strips: title, height in pixels, whether the scale is logarithmic, and the curves.
function birthStrips(curves) {
  const runs = visibleRuns().map((index) => data.runs[index]);
  const [training, validation, inContext] = [
    ["training", "loss", 1, 0.6],
    ["validation", "loss", 2.2, 1],
    ["in_context", "nats", 2.2, 1],
  ].map(([name, figure, width, opacity]) =>
    runs.map((run) => {
      const points = name === "in_context" ? run.births.in_context : run[name];
      const dash = name === "training" ? "" : run.dash;
      return { points, figure, style: { stroke: colourOf(run), "stroke-width": width, opacity, "stroke-dasharray": dash } };
    }),
  );
  const scores = curves.map(({ points, colour, dash }) => {
    return { points, figure: "score", style: { stroke: colour, "stroke-width": 2.2, "stroke-dasharray": dash } };
  });
  const isLog = byId("log-y").checked;
  return [
    { title: "loss, nats per token", height: 150, isLog, curves: [...training, ...validation] },
    { title: "in-context score, nats (below 0: context helps)", height: 110, atLeast: [0], curves: inContext },
    { title: "highest score of a head", height: 170, atLeast: [0, 1], curves: scores },
  ];
}

function drawBirths() {
  if (byId("births-section").hidden) return; // no run has measured it
  const [chart, width] = [byId("births"), byId("births-frame").clientWidth]; // 0 while the section is hidden
  const axis = chosen("axis") === "bytes" ? "tokens" : chosen("axis");
  const view = { axis, logX: byId("log-x").checked, left: 58, right: width - 14 };
  births = { curves: birthCurves(), at: null };
  births.measured = [...new Set(births.curves.flatMap(({ points }) => points.map((point) => point[view.axis])))];
  births.measured.sort((one, other) => one - other);
  const strips = birthStrips(births.curves);
  const xs = strips.flatMap(({ curves }) => curves.flatMap(({ points }) => points.map((point) => point[view.axis])));
  const drawn = xs.filter((value) => !view.logX || value > 0);
  chart.replaceChildren();
  byId("births-tip").textContent = "";
  byId("births-list").replaceChildren(...births.curves.map(birthItem));
  if (!width || !drawn.length) return;
  const [low, high] = [view.logX ? Math.min(...drawn) : 0, Math.max(...drawn)];
  view.x = makeScale(low, high > low ? high : 2 * low || 1, view.left + 8, view.right - 8, view.logX);
  view.gridX = gridValues(low, high, view.logX, Math.max(3, width / 110));
  let bottom = 0;
  for (const strip of strips) {
    strip.top = bottom + STRIP_GAP;
    strip.bottom = bottom = strip.top + strip.height;
    drawStrip({ ...view, ...strip });
  }
  for (const value of view.gridX) {
    const text = view.axis === "flops" && value >= 1e6 ? formatPower(value, 0) : formatNumber(value);
    chart.append(newShape("text", { x: view.x(value), y: bottom + 17, "text-anchor": "middle" }, text));
  }
  const middle = { class: "title", x: (view.left + view.right) / 2, y: bottom + 36, "text-anchor": "middle" };
  chart.append(newShape("text", middle, TITLES[view.axis]));
  for (const curve of births.curves) drawBirth(view, curve, strips);
  chart.setAttribute("viewBox", `0 0 ${width} ${bottom + 46}`);
  chart.setAttribute("height", bottom + 46);
  if (births.measured.length) Object.assign(births, { x: view.x, axis: view.axis, bottom });
}

function drawStrip({ title, curves, isLog, atLeast = [], ...view }) {
  const chart = byId("births");
  const ys = [...atLeast, ...curves.flatMap(({ points, figure }) => points.map((point) => point[figure]))];
  isLog &&= ys.every((value) => value > 0);
  chart.append(newShape("text", { class: "title", x: view.left, y: view.top - 8 }, title));
  if (!ys.length) return;
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  view.y = makeScale(low, high > low ? high : low + 1, view.bottom, view.top, isLog);
  for (const value of gridValues(low, high > low ? high : low + 1, isLog, 4)) {
    chart.append(newShape("line", { class: "grid", x1: view.left, x2: view.right, y1: view.y(value), y2: view.y(value) }));
    const place = { x: view.left - 7, y: view.y(value) + 4, "text-anchor": "end" };
    chart.append(newShape("text", place, String(+value.toPrecision(3)).replace("-", "−")));
  }
  chart.append(newShape("line", { class: "axis", x1: view.left, x2: view.right, y1: view.bottom, y2: view.bottom }));
  for (const { points, figure, style } of curves) {
    chart.append(newCurve(view, points, figure, { ...style, "clip-path": "none" }));
  }
}

// The threshold of a curve, and a line through all strips at the first measurement that reaches it.
function drawBirth({ axis, logX, x, left, right }, { points, born, colour, marker, threshold }, strips) {
  const [chart, { top, bottom }] = [byId("births"), strips.at(-1)];
  const y = makeScale(0, 1, bottom, top, false);
  const dotted = { stroke: "var(--soft)", "stroke-dasharray": "1 4" };
  chart.append(newShape("line", { ...dotted, x1: left, x2: right, y1: y(threshold), y2: y(threshold) }));
  if (born === null || (logX && !(points[born][axis] > 0))) return;
  const at = x(points[born][axis]);
  const line = { class: "birth", stroke: colour, "stroke-width": 1.4, "stroke-dasharray": "4 3", opacity: 0.8 };
  chart.append(newShape("line", { ...line, x1: at, x2: at, y1: strips[0].top, y2: bottom }));
  chart.append(newMarker(marker, at, y(points[born].score), 5, colour));
}

// A line of the list below the picture: the curve, its name, and when its first head was born.
function birthItem({ name, meaning, text, colour, dash, marker }) {
  const item = newElement("li");
  const sample = newShape("svg", { width: 34, height: 14, "aria-hidden": "true" });
  sample.append(newShape("line", { x1: 1, x2: 33, y1: 7, y2: 7, stroke: colour, "stroke-width": 2.2, "stroke-dasharray": dash }));
  sample.append(newMarker(marker, 17, 7, 4, colour));
  const words = newElement("span", {}, `${name}: ${text}`);
  if (meaning) words.append(newElement("span", { class: "soft" }, ` · a head that ${meaning}`));
  item.append(sample, words);
  return item;
}

// ------------------------------------------------------------------------------------------------------------ tip

function showNearestMeasurement(event) {
  if (!births.x) return;
  const pointer = event.clientX - byId("births").getBoundingClientRect().left;
  const distance = (value) => Math.abs(births.x(value) - pointer);
  showMeasurement(births.measured.reduce((best, value) => (distance(value) < distance(best) ? value : best)));
}

// Arrow keys: to the measurement before and after.
function moveMeasurement(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !births.x) return;
  const index = births.at === null ? births.measured.length - 1 : births.measured.indexOf(births.at) + step;
  showMeasurement(births.measured[Math.max(0, Math.min(index, births.measured.length - 1))]);
  event.preventDefault();
}

// Writes the scores of the measurement at this value of the axis, and marks it in the picture.
function showMeasurement(value) {
  births.at = value;
  const here = births.curves.flatMap(({ name, points }) => {
    const point = points.find((each) => each[births.axis] === value);
    return point ? [{ point, text: `${name} ${point.score} (head ${point.head})` }] : [];
  });
  const { step, tokens } = here[0].point;
  const texts = here.map(({ text }) => text).join(" · ");
  byId("births-tip").textContent = `step ${step}, ${formatNumber(tokens)} tokens: ${texts}`;
  byId("births").querySelector(".at")?.remove();
  const line = { class: "axis at", x1: births.x(value), x2: births.x(value), y1: STRIP_GAP, y2: births.bottom };
  byId("births").append(newShape("line", line));
}
