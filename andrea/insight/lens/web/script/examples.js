// In section 2: where the head writes most in held-out text, and the same head in a second checkpoint.

const examples = facts.layouts.examples ? unpack("examples", facts.layouts.examples) : null;
const EXAMPLE_MARGIN = 8; // tokens shown on each side of the key and of the query

function writeExamples() {
  byId("examples-box").hidden = !facts.examples_note;
  byId("examples-note").textContent = facts.examples_note ?? "";
  if (!examples) return byId("examples").replaceChildren();
  const count = examples.example_cells.length / (3 * L * H);
  const lines = Array.from({ length: count }, (_, index) => exampleLine(state.head * count + index));
  byId("examples").replaceChildren(...lines);
}

function exampleLine(at) {
  const [window, query, key] = examples.example_cells.subarray(3 * at, 3 * at + 3);
  const [weight, written] = examples.example_sizes.subarray(2 * at, 2 * at + 2);
  const width = facts.layouts.examples.find(([name]) => name === "example_ids")[2][1];
  const isNear = (place, other) => Math.abs(place - other) <= EXAMPLE_MARGIN;
  const shown = [];
  for (let place = 0; place < width; place++) {
    if (!isNear(place, key) && !isNear(place, query)) {
      if (shown.length && shown.at(-1) !== " … ") shown.push(" … ");
      continue;
    }
    const role = { [key]: "key", [query]: "query" }[place];
    const text = textOf(examples.example_ids[window * width + place]);
    shown.push(role ? newElement("mark", { class: place === query && query === key ? "query" : role, title: role }, text) : text);
  }
  const numbers = span("muted small", ` weight ${formatNumber(weight, 3)}, writes ${formatNumber(written, 3)}`);
  return newElement("li", {}, span("example", shown), numbers);
}

// ------------------------------------------------------------------------------------------------ a second checkpoint

const otherMaps = facts.layouts.other ? unpack("other", facts.layouts.other).maps : null; // as `maps`, with more cells
const OTHER_SIDE = otherMaps ? facts.layouts.other[0][2][2] : 0;
const OTHER_PIXELS = 300;

function writeOther() {
  byId("other-box").hidden = !otherMaps;
  if (!otherMaps) return;
  const other = facts.other.heads[state.head];
  const share = 100 * other.distance;
  byId("other-lead").textContent = `Left: this checkpoint (${facts.title}). Right: ${facts.other.title}. ${share.toFixed(1)} % of the head's weight stands on other keys there, on average over the queries of this prompt.`;
  drawMapBeside("other-this", (context) => drawSquare(context, thisMap()));
  drawMapBeside("other-that", (context) => drawSquare(context, otherMaps.subarray(state.head * OTHER_SIDE ** 2, (state.head + 1) * OTHER_SIDE ** 2)));
  byId("other-cell").replaceChildren(...otherCell());
  const rows = facts.names.map((name) =>
    row(cell(name.title), numberCell(formatScore(facts.heads[state.head].probe[name.score])), numberCell(formatScore(other.probe[name.score]))),
  );
  fillTable(byId("other-scores"), ["score on the fixed text", "#this", "#other"], rows);
}

// The weight of the selected cell in both, where the second map has a cell for each weight.
function otherCell() {
  if (OTHER_SIDE !== T) return [];
  const { weights } = openHead(state.head);
  const there = (otherMaps[(state.head * T + state.i) * T + state.j] / 255) ** 2;
  const here = weights ? `weight ${formatNumber(weights[state.i * T + state.j], 3)} here, ` : "weight ";
  return [...queryAndKey(state.i, state.j, "query ", "key "), newElement("br"), `${here}about ${formatNumber(there, 2)} there`];
}

// The map of the selected head with as many cells as the other's, 255 times the square root of a weight.
function thisMap() {
  const { weights } = openHead(state.head);
  if (OTHER_SIDE === T && weights) return Uint8Array.from(weights, (weight) => Math.round(255 * Math.sqrt(weight)));
  return maps.subarray(state.head * SIDE * SIDE, (state.head + 1) * SIDE * SIDE);
}

function drawMapBeside(id, draw) {
  const width = Math.min(OTHER_PIXELS, byId(id).parentElement.clientWidth || OTHER_PIXELS);
  draw(sizedContext(byId(id), width, width), width);
}

function drawSquare(context, map) {
  const side = Math.sqrt(map.length);
  const small = document.createElement("canvas");
  small.width = small.height = side;
  const image = small.getContext("2d").createImageData(side, side);
  map.forEach((shade, at) => image.data.set([...shades[shade], 255], 4 * at));
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  const width = parseFloat(context.canvas.style.width);
  context.drawImage(small, 0, 0, width, width);
}
