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
const OTHER_PIXELS = 260; // most of a map

function writeOther() {
  byId("other-box").hidden = !otherMaps;
  if (!otherMaps) return;
  const other = facts.other.heads[state.head];
  byId("other-lead").textContent = `${(100 * other.distance).toFixed(1)} % of this head's weight stands on other keys there: the mean over the queries of this prompt.`;
  byId("other-this-title").textContent = `this: ${facts.title}`;
  byId("other-that-title").textContent = `other: ${facts.other.title}`;
  drawBeside("other-this", thisMap());
  drawBeside("other-that", otherMaps.subarray(state.head * OTHER_SIDE ** 2, (state.head + 1) * OTHER_SIDE ** 2));
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

// A map as a square, with a frame around the selected cell where it has one.
function drawBeside(id, map) {
  const side = Math.sqrt(map.length);
  const width = Math.min(OTHER_PIXELS, 0.5 * byId("other-maps").clientWidth - 8);
  const context = sizedContext(byId(id), width, width);
  const small = document.createElement("canvas");
  small.width = small.height = side;
  const image = small.getContext("2d").createImageData(side, side);
  map.forEach((shade, at) => image.data.set([...shades[shade], 255], 4 * at));
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, width, width);
  if (side !== T) return;
  context.strokeStyle = themeColour("--query");
  context.lineWidth = 2;
  context.strokeRect((state.j * width) / T, (state.i * width) / T, width / T, width / T);
}
