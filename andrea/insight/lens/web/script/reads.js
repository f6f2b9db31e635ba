// Section 5: which head reads from which, as a graph and as a table.

const reads = facts.layouts.reads ? unpack("reads", facts.layouts.reads) : null; // the strongest first
const READ_KINDS = ["query", "key", "value"];
const SHOWN_READS = 6; // of each kind
const LEAST_READ = 0.02; // of what the reading head writes

function writeReads() {
  byId("reads").hidden = byId("reads-link").hidden = reads === null;
  if (reads === null) return;
  byId("only-head-label").textContent = `only head ${labelOf(state.head)}`;
  byId("only-head").checked = state.onlyHead;
  const shown = shownReads();
  byId("circuit").replaceChildren(...circuitInWords().flat(Infinity));
  drawGraph(shown);
  const rows = shown.map((read) =>
    newElement(
      "tr",
      { "data-read": `${labelOf(read.source)} ${labelOf(read.reader)} ${read.kind}` },
      cell(headButton(read.source)),
      cell(headButton(read.reader)),
      cell(span(read.kind, `its ${read.kind}`)),
      numberCell(formatPercent(read.effect)),
    ),
  );
  fillTable(byId("reads-table"), ["from", "to", "reads it in", "#changes"], rows);
}

function allReads() {
  return Array.from(reads.effects, (effect, n) => ({
    source: reads.sources[n],
    reader: reads.readers[n],
    kind: READ_KINDS[reads.kinds[n]],
    effect,
  }));
}

function shownReads() {
  const isOfHead = ({ source, reader }) => source === state.head || reader === state.head;
  const chosen = allReads().filter((read) => read.effect >= LEAST_READ && (!state.onlyHead || isOfHead(read)));
  const strongest = READ_KINDS.flatMap((kind) => chosen.filter((read) => read.kind === kind).slice(0, SHOWN_READS));
  return strongest.sort((one, other) => other.effect - one.effect);
}

function headButton(n) {
  const names = namesOf(n).map((name) => name.title);
  return [newButton(() => select({ head: n }), labelOf(n)), span("muted small", ` ${names.join(", ")}`)];
}

// A head's score for a pattern: on this prompt, or on the fixed text where it is higher.
function scoreOfHead(n, score) {
  return Math.max(facts.heads[n].prompt[score] ?? 0, facts.heads[n].probe[score] ?? 0);
}

// The induction circuit: the head with the highest induction score, and the head from which it reads most in its key.
function circuitInWords() {
  const threshold = (score) => facts.names.find((name) => name.score === score).threshold;
  const inducing = facts.heads.map((_, n) => n).filter((n) => scoreOfHead(n, "induction") >= threshold("induction"));
  if (!inducing.length) return ["No head attends by induction, neither on this prompt nor on the fixed texts."];
  const keys = allReads().filter(({ reader, kind, effect }) => kind === "key" && inducing.includes(reader) && effect >= LEAST_READ);
  const circuit = keys.find(({ source }) => scoreOfHead(source, "previous_token") >= threshold("previous_token"));
  if (!circuit) {
    const heads = inducing.flatMap((n) => [newButton(() => select({ head: n }), labelOf(n)), ` (${formatScore(scoreOfHead(n, "induction"), 2)}) `]);
    const none = "None of them reads from a previous-token head in its key.";
    const alone = " The convolution over keys can do the work of such a head: section 4 then shows pairs with parts of tokens before.";
    return ["Heads that attend by induction, with their scores: ", ...heads, none, facts.convolution ? alone : null].filter(isPresent);
  }
  const { source, reader, effect } = circuit;
  return [
    newElement("b", {}, "Induction circuit: "),
    "head ",
    headButton(source),
    " looks at the previous token and writes it down; head ",
    headButton(reader),
    ` reads that in its key, and so finds what followed an earlier copy. Without it, ${formatPercent(effect)} of what head ${labelOf(reader)} writes changes.`,
  ];
}

// -------------------------------------------------------------------------------------------------------- the graph

function newSvg(tag, attributes, ...children) {
  const element = document.createElementNS(byId("graph").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function drawGraph(shown) {
  const graph = byId("graph");
  const width = Math.min(680, graph.parentElement.clientWidth || 340);
  const [left, rowHeight] = [58, Math.max(44, Math.min(110, 380 / L))];
  const height = rowHeight * L;
  const place = (n) => ({
    x: left + ((n % H) + 0.5) * ((width - left) / H),
    y: height - (layerOf(n) + 0.5) * rowHeight, // the first layer is at the bottom
  });
  const arrows = shown.map((read) => newArrow(read, place(read.source), place(read.reader), rowHeight));
  const isInUse = new Set(shown.flatMap(({ source, reader }) => [source, reader]));
  const heads = facts.heads.map((_, n) => newHeadMark(n, place(n), isInUse.has(n), (width - left) / H));
  const layers = Array.from({ length: L }, (_, layer) =>
    newSvg("text", { x: 0, y: place(layer * H).y + 4, class: "layer-name" }, `layer ${layer}`),
  );
  graph.setAttribute("width", width);
  graph.setAttribute("height", height);
  graph.setAttribute("aria-label", `Graph of ${shown.length} arrows between heads; the table lists them.`);
  graph.replaceChildren(...layers, ...arrows, ...heads);
}

function newArrow({ source, reader, kind, effect }, from, to, rowHeight) {
  const bend = 0.55 * rowHeight;
  const aside = 5 * (READ_KINDS.indexOf(kind) - 1); // so that arrows of several kinds lie side by side
  const sway = aside + (from.x === to.x && from.y - to.y > rowHeight ? 26 : 0); // around the heads between them
  const [start, end] = [`${from.x + aside} ${from.y}`, `${to.x + aside} ${to.y}`];
  const path = `M${start} C${from.x + sway} ${from.y - bend} ${to.x + sway} ${to.y + bend} ${end}`;
  const title = newSvg("title", {}, `${labelOf(source)} → ${labelOf(reader)} in its ${kind}: ${formatPercent(effect)}`);
  return newSvg("path", { d: path, class: `arrow ${kind}`, "stroke-width": 1 + 6 * Math.min(1, effect) }, title);
}

function newHeadMark(n, { x, y }, isInUse, room) {
  const radius = Math.min(isInUse ? 15 : 11, 0.46 * room);
  const className = ["head-mark", isInUse && "in-use", n === state.head && "chosen", namesOf(n).length && "named"];
  const text = room < 20 ? "" : newSvg("text", { x, y: y + 3.5 }, n % H);
  const title = newSvg("title", {}, [`head ${labelOf(n)}`, ...namesOf(n).map((name) => name.title)].join(", "));
  const attributes = { class: className.filter(Boolean).join(" "), onclick: () => select({ head: n }) };
  return newSvg("g", attributes, newSvg("circle", { cx: x, cy: y, r: radius }), text, title);
}
