// Section 2: one head, as shaded text and as a map.

const TOP_KEYS = 8; // keys listed for a query
const WHOLE_MAP_PIXELS = 300;
const LARGEST_GATE = 2; // 2·sigmoid

const options = facts.tokens.map((_, i) => newOption(i));

// The tokens of the text are the options of a list box.
function newOption(i) {
  const text = tokenText(i);
  const isMark = (piece) => /^[␣↵→]/.test(piece);
  const pieces = text.split(/([␣↵→]+)/).map((piece) => (isMark(piece) ? span("hidden-sign", piece) : piece));
  const attributes = { role: "option", id: `token-${i}`, "aria-label": `token ${i}: ${text}`, "data-i": i };
  return newElement("span", attributes, pieces);
}

function writeTokens() {
  const endsLine = (i) => tokenText(i).includes("↵") && i < T - 1;
  byId("tokens").replaceChildren(
    ...options.flatMap((option, i) => (endsLine(i) ? [option, newElement("br")] : [option])),
  );
}

// The query and key under the pointer, else the selected ones.
function shownQuery() {
  return state.hovered?.i ?? state.i;
}

function shownKey() {
  return state.hovered?.j ?? state.j;
}

function shadeTokens() {
  const shaded = shading(openHead(state.head));
  const i = shownQuery();
  options.forEach((option, j) => {
    const byWeight = () => (shaded.cells && isVisible(state.head, i, j) ? shadeAt(strength(shaded, i, j)) : null);
    const colour = state.gate ? shadeAt(gateOf(state.head, j) / LARGEST_GATE) : byWeight();
    option.style.background = colour ? cssColour(colour) : "";
    option.style.color = colour ? (isDark(colour) ? "#fff" : "#16181a") : "";
    option.classList.toggle("is-query", j === i);
    option.classList.toggle("is-key", j === shownKey());
    option.classList.toggle("is-masked", !state.gate && !isVisible(state.head, i, j));
    option.setAttribute("aria-selected", j === state.i);
  });
  byId("tokens").setAttribute("aria-activedescendant", `token-${state.i}`);
}

function keepTokenInView() {
  const box = byId("tokens");
  const option = options[state.i];
  const top = option.offsetTop - box.clientTop;
  const bottom = top + option.offsetHeight;
  if (top < box.scrollTop) box.scrollTop = top - 8;
  else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight + 8;
}

// ------------------------------------------------------------------------------------------------------- the map

// The part of the map that is drawn: `count` rows from `row` on, `count` columns from `column` on; the rest in pixels.
const view = { row: 0, column: 0, count: T, cell: 16, left: 90, top: 90 };

function layOutMap() {
  const width = byId("map").parentElement.clientWidth || 340;
  const longest = Math.min(13, Math.max(...facts.tokens.map((_, i) => [...tokenText(i)].length)));
  view.left = view.top = Math.min(0.3 * width, 14 + 7 * longest);
  const available = width - view.left - 2;
  const smallestCell = 12;
  view.count = Math.min(T, Math.max(4, Math.floor(available / smallestCell)));
  view.cell = Math.min(30, available / view.count);
  view.row = firstInView(view.row, state.i);
  view.column = firstInView(view.column, state.j);
}

// `start` where position `at` is then in view, else the start that puts it in the middle.
function firstInView(start, at) {
  const isInView = at >= start && at < start + view.count;
  return Math.min(Math.max(0, T - view.count), isInView ? start : Math.max(0, Math.round(at - view.count / 2)));
}

// A canvas of that many CSS pixels, sharp on screens with a finer grid.
function sizedContext(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

function drawMap() {
  const { weights } = openHead(state.head);
  if (!weights) return drawEnlargedSmallMap();
  const context = sizedContext(
    byId("map"),
    view.left + view.count * view.cell + 2,
    view.top + view.count * view.cell + 2,
  );
  drawCells(context, shading(openHead(state.head)));
  drawLabels(context);
  drawFrames(context);
}

function drawCells(context, shaded) {
  const { row, column, count, cell, left, top } = view;
  const gap = cell > 9 ? 1 : 0;
  for (let y = 0; y < count; y++) {
    for (let x = 0; x < count; x++) {
      if (!isVisible(state.head, row + y, column + x)) continue;
      context.fillStyle = cssColour(shadeAt(strength(shaded, row + y, column + x)));
      context.fillRect(left + x * cell, top + y * cell, cell - gap, cell - gap);
    }
  }
}

function drawLabels(context) {
  const { row, column, count, cell, left, top } = view;
  const fontPixels = Math.min(12, cell - 1);
  const most = Math.floor((left - 8) / (fontPixels * 0.61)); // characters
  const fitting = (text) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);
  context.font = `${fontPixels}px ui-monospace, Menlo, "DejaVu Sans Mono", monospace`;
  context.textBaseline = "middle";
  for (let n = 0; n < count; n++) {
    context.fillStyle = themeColour(row + n === shownQuery() ? "--query" : "--muted");
    context.textAlign = "right";
    context.fillText(fitting(tokenText(row + n)), left - 6, top + (n + 0.5) * cell);
    context.save();
    context.translate(left + (n + 0.5) * cell, top - 6);
    context.rotate(-Math.PI / 2);
    context.fillStyle = themeColour(column + n === mapKey() ? "--key" : "--muted");
    context.textAlign = "left";
    context.fillText(fitting(tokenText(column + n)), 0, 0);
    context.restore();
  }
}

// The key marked on the map: none while the pointer is over the text.
function mapKey() {
  return state.hovered ? state.hovered.j : state.j;
}

// Frames around the query's row, the key's column, and the cell where they cross.
function drawFrames(context) {
  const { row, column, count, cell, left, top } = view;
  const x = left + (mapKey() - column) * cell - 0.5;
  const y = top + (shownQuery() - row) * cell - 0.5;
  const hasRow = shownQuery() >= row && shownQuery() < row + count;
  const hasColumn = mapKey() !== null && mapKey() >= column && mapKey() < column + count;
  const frame = (frameX, frameY, width, height, colour, thickness) => {
    context.strokeStyle = themeColour(colour);
    context.lineWidth = thickness;
    context.strokeRect(frameX, frameY, width, height);
  };
  if (hasRow) frame(left - 0.5, y, count * cell, cell, "--query", 1);
  if (hasColumn) frame(x, top - 0.5, cell, count * cell, "--key", 1);
  if (hasRow && hasColumn) frame(x, y, cell, cell, "--query", 2.5);
}

function drawEnlargedSmallMap() {
  const width = Math.min(480, byId("map").parentElement.clientWidth || 340);
  const context = sizedContext(byId("map"), width, width);
  const small = document.createElement("canvas");
  drawSmallMap(small, state.head);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, width, width);
}

// The whole map of a long prompt, drawn once for each head and kind of shade.
const wholeMap = { drawn: "", canvas: document.createElement("canvas") };

function drawWholeMap() {
  const { weights } = openHead(state.head);
  byId("whole-box").hidden = !weights || view.count === T;
  if (byId("whole-box").hidden) return;
  const drawn = [state.head, state.log, state.hide, state.written, theme()].join();
  if (wholeMap.drawn !== drawn) drawReducedMap(wholeMap.canvas, shading(openHead(state.head)));
  wholeMap.drawn = drawn;
  const context = sizedContext(byId("whole"), WHOLE_MAP_PIXELS, WHOLE_MAP_PIXELS);
  const pixels = (position) => (position / T) * WHOLE_MAP_PIXELS;
  context.imageSmoothingEnabled = false;
  context.drawImage(wholeMap.canvas, 0, 0, WHOLE_MAP_PIXELS, WHOLE_MAP_PIXELS);
  context.strokeStyle = themeColour("--query");
  context.lineWidth = 1.5;
  context.strokeRect(pixels(view.column), pixels(view.row), pixels(view.count), pixels(view.count));
}

// Each pixel shows the strongest of its cells.
function drawReducedMap(canvas, shaded) {
  const side = Math.min(WHOLE_MAP_PIXELS, T);
  const strongest = new Float32Array(side * side).fill(-1); // -1 where nothing is visible
  for (let i = 0; i < T; i++) {
    const y = Math.floor((i * side) / T) * side;
    for (const j of visibleKeys(state.head, i)) {
      const at = y + Math.floor((j * side) / T);
      strongest[at] = Math.max(strongest[at], 0, strength(shaded, i, j));
    }
  }
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  strongest.forEach((value, at) => {
    if (value >= 0) image.data.set([...shadeAt(state.log ? value : Math.sqrt(value)), 255], 4 * at);
  });
  context.putImageData(image, 0, 0);
}

function drawLegend() {
  const strip = newElement("canvas", { "aria-hidden": "true" });
  const context = sizedContext(strip, 110, 11);
  for (let x = 0; x < 110; x++) {
    context.fillStyle = cssColour(shadeAt(x / 109));
    context.fillRect(x, 0, 1, 11);
  }
  const end = state.gate ? ` (of the text: gate ${LARGEST_GATE})` : "";
  const { full, isWritten } = shading(openHead(state.head));
  const most = isWritten ? [`${formatNumber(full, 3)} (norm of weight · W`, sub("O"), " v)"] : ["1"];
  const low = state.log ? (isWritten ? formatNumber(full / 10 ** LOG_DECADES, 2) : "10⁻⁵") : "0";
  byId("legend").replaceChildren(low, strip, newElement("span", {}, most), end);
}

// ------------------------------------------------------------------------------------------------------- in words

function queryAndKey(i, j, queryWord, keyWord) {
  const query = [span("query", `${queryWord}${i} `), tokenLabel(tokenText(i))];
  return [...query, " → ", span("key", `${keyWord}${j} `), tokenLabel(tokenText(j))];
}

function writeReadout() {
  const { weights, isApproximate, written } = openHead(state.head);
  const [i, j] = [shownQuery(), shownKey()];
  const gate = gates
    ? [line("gate ", newElement("b", { class: "num", id: "gate-shown" }, formatNumber(gateOf(state.head, i), 4)), ` of query ${i}`)]
    : [];
  if (!weights || j === null) return byId("readout").replaceChildren(...gate);
  const number = formatNumber(weights[i * T + j], isApproximate ? 2 : 5);
  const weight = isVisible(state.head, i, j)
    ? [isApproximate ? "about " : "", newElement("b", { class: "num", id: "weight-shown" }, number)]
    : ["masked: ", newElement("b", {}, "0")];
  const writes = written && isVisible(state.head, i, j) ? [", writes a vector of norm ", newElement("b", { class: "num" }, formatNumber(written[i * T + j], 4))] : [];
  byId("readout").replaceChildren(...queryAndKey(i, j, "query ", "key "), newElement("br"), "weight ", ...weight, ...writes, ...gate);
}

function writeTopKeys() {
  const { weights, isApproximate } = openHead(state.head);
  const i = shownQuery();
  byId("top-keys-title").replaceChildren("Largest weights of query ", tokenLabel(tokenText(i)), ` (${i})`);
  if (!weights) return byId("top-keys").replaceChildren();
  const weightOf = (j) => weights[i * T + j];
  const sum = (keys) => keys.reduce((total, j) => total + weightOf(j), 0);
  const inOrder = visibleKeys(state.head, i);
  const keys = [...inOrder].sort((one, other) => weightOf(other) - weightOf(one) || one - other);
  const rows = keys.slice(0, TOP_KEYS).map((j) => topKeyRow(i, j, weightOf(j), isApproximate ? 2 : 5));
  const totalRow = (title, number) =>
    newElement("tr", { class: "total" }, cell(), newElement("td", { colspan: 2 }, title), number);
  if (keys.length > TOP_KEYS) {
    const rest = keys.slice(TOP_KEYS);
    rows.push(totalRow(`the other ${rest.length} visible keys`, numberCell(formatNumber(sum(rest)))));
  }
  const total = newElement("td", { class: "n", id: "row-sum" }, sum(inOrder).toFixed(6));
  rows.push(totalRow(isApproximate ? "sum (weights rounded to 8 bits)" : "sum over all visible keys", total));
  if (hasSink()) {
    const share = formatNumber(1 - sum(inOrder), isApproximate ? 2 : 5);
    const number = newElement("td", { class: "n", id: "sink-share" }, share);
    rows.push(totalRow("the head's sink, which has no value: the rest", number));
  }
  byId("top-keys").replaceChildren(newElement("tbody", {}, rows));
}

function topKeyRow(i, j, weight, digits) {
  const fill = span("fill");
  fill.style.width = `${100 * weight}%`;
  const onclick = () => select({ i, j });
  const label = `key ${j}: ${tokenText(j)}`;
  const button = newElement(
    "button",
    { type: "button", class: "tok-button", "aria-label": label, onclick },
    tokenLabel(tokenText(j)),
  );
  const track = newElement("td", { class: "track" }, fill);
  const attributes = { class: j === state.j ? "is-key" : null, "data-key": j };
  const number = newElement("td", { class: "n muted" }, j);
  return newElement("tr", attributes, number, cell(button), track, numberCell(formatNumber(weight, digits)));
}

function writeScores() {
  const head = facts.heads[state.head];
  const rows = facts.names.map((name) =>
    row(
      cell(`mean weight, ${name.title}`),
      numberCell(formatScore(head.prompt[name.score])),
      numberCell(formatScore(head.probe[name.score])),
      numberCell(`≥ ${name.threshold.toFixed(2)}`),
    ),
  );
  const entropy = formatScore(head.prompt.entropy_share);
  rows.push(row(cell("entropy / ln(visible keys)"), numberCell(entropy), numberCell(), numberCell()));
  if (gates) {
    const range = "closed: 0, at the start: 1, open: 2";
    rows.push(row(cell("mean gate"), numberCell(formatScore(meanGate(state.head))), numberCell(), cell(range)));
  }
  if (facts.own_shares) rows.push(row(cell("share of the own value removed"), numberCell(shareOf(state.head)), cell(), cell()));
  if (hasSink()) {
    const mass = numberCell(formatScore(head.prompt.sink_mass));
    rows.push(row(cell("mean weight on the sink"), mass, cell(), cell()));
  }
  if (head.loss_change !== null) {
    const change = `${head.loss_change < 0 ? "" : "+"}${formatNumber(head.loss_change, 3)}`;
    rows.push(row(cell("loss change when ablated, nats per token"), numberCell(change), cell(), cell()));
  }
  fillTable(byId("scores"), ["score", "#this prompt", "#fixed text", "#threshold"], rows);
}

function writeHeadNote() {
  const notes = [];
  if (!facts.heads[state.head].full) {
    const command = `python -m andrea lens heads=${labelOf(state.head)} …`;
    notes.push(
      openHead(state.head).weights
        ? "This file holds only the small map of this head: its weights are approximate, and section 3 cannot be shown."
        : `This file holds only the small map of this head. This command writes a file with its weights: ${command}`,
    );
  }
  if (state.hide) {
    notes.push("The first token is hidden. Shades show how the rest of the weight is shared by the other keys.");
    notes.push("Numbers are unchanged.");
  }
  if (state.written && openHead(state.head).written) {
    notes.push("Shades show the length of the vector that each weight writes: weight × norm of W_O v.");
    notes.push("A weight on a key with next to nothing to say looks empty.");
  }
  byId("head-note").textContent = notes.join(" ");
  byId("head-note").hidden = !notes.length;
}
