"use strict";
// The lens. T tokens, N width of a query or key as it is scored, D width of a value. Weights are computed here, in double
// precision, from queries and keys given in single precision; opened heads are kept, so that a hover looks up only.
(() => {
const facts = JSON.parse(document.getElementById("facts").textContent);
const T = facts.tokens.length, H = facts.heads_per_layer, L = facts.layers, D = facts.d_head;
const byId = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------------------------------------- data

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
  return bytes;
}

const KINDS = { f4: Float32Array, u2: Uint16Array, u1: Uint8Array };

function unpack(name, layout) {
  const bytes = bytesOf(byId(`data-${name}`).textContent), arrays = {};
  let offset = 0;
  for (const [field, kind, shape] of layout) {
    const count = shape.reduce((product, side) => product * side, 1);
    arrays[field] = new KINDS[kind](bytes.buffer, bytes.byteOffset + offset, count);
    offset += arrays[field].byteLength;
  }
  return arrays;
}

const maps = unpack("maps", facts.layouts.maps).maps;
const SIDE = facts.layouts.maps[0][2][2];
const next = unpack("next", facts.layouts.next), KNOWN = facts.layouts.next[0][2][1];
const fullHeads = facts.heads.flatMap((head, n) => (head.full ? [n] : []));
const effects = facts.layouts.effects ? unpack("effects", facts.layouts.effects).off : null; // (full heads, T)

const opened = new Map(); // head number -> what `open` returns, the latest last
const KEPT_HEADS = T > 256 ? 4 : 64;

function open(n) {
  let head = opened.get(n);
  if (head) opened.delete(n);
  else if (facts.heads[n].full) head = computed(unpack(labelOf(n), facts.layouts.head), n);
  else if (SIDE === T) head = { weights: fromMap(n), approximate: true };
  else head = { weights: null };
  opened.set(n, head);
  if (opened.size > KEPT_HEADS) opened.delete(opened.keys().next().value);
  return head;
}

function fromMap(n) {
  const weights = new Float64Array(T * T);
  for (let c = 0; c < T * T; c++) weights[c] = (maps[n * T * T + c] / 255) ** 2;
  return weights;
}

function computed(head, n) {
  head.width = head.query.length / T;
  head.weights = new Float64Array(T * T);
  for (let i = 0; i < T; i++) {
    const row = rowOf(head, n, i);
    for (let j = row.first; j < row.stop; j++) head.weights[i * T + j] = row.exponentials[j] / row.sum;
  }
  return head;
}

// The row of query i: scores and e^(score - largest) of the keys first .. stop - 1, and their sum.
function rowOf(head, n, i) {
  const first = facts.visible_first[i], stop = facts.visible_stop[i];
  const scores = new Float64Array(T).fill(-Infinity), exponentials = new Float64Array(T);
  let largest = -Infinity, at = first, sum = 0;
  for (let j = Math.max(0, first); j < stop; j++) {
    scores[j] = score(head, n, i, j);
    if (scores[j] > largest) { largest = scores[j]; at = j; }
  }
  for (let j = Math.max(0, first); j < stop; j++) sum += exponentials[j] = Math.exp(scores[j] - largest);
  return { first: Math.max(0, first), stop, scores, exponentials, largest, at, sum };
}

function score(head, n, i, j) {
  const N = head.width, mixing = facts.mixing && facts.mixing[layerOf(n)][n % H];
  let sum = 0;
  if (mixing) for (let c = 0; c < N; c++) sum += mixing[c] * Math.tanh(head.query[i * N + c] + head.key[j * N + c]);
  else for (let c = 0; c < N; c++) sum += head.query[i * N + c] * head.key[j * N + c];
  return sum;
}

const layerOf = (n) => Math.floor(n / H);
const labelOf = (n) => `${layerOf(n)}.${n % H}`;
const textOf = (id) => facts.texts[id];
const tokenText = (i) => textOf(facts.tokens[i]);
const isVisible = (i, j) => facts.visible_first[i] <= j && j < facts.visible_stop[i];

// --------------------------------------------------------------------------------------------------------- state

function mostInteresting() {
  const interest = (n) => Math.max(...facts.names.map((name) => (facts.heads[n].probe[name.score] ?? 0) / name.threshold));
  const among = fullHeads.length ? fullHeads : facts.heads.map((_, n) => n);
  return among.reduce((best, n) => (interest(n) > interest(best) ? n : best), among[0]);
}

const state = { head: mostInteresting(), i: T - 1, j: null, log: false, hide: false, sort: "layer", filter: "", hover: null };

function readHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (name, below) => (/^\d+$/.test(given.get(name) ?? "") && +given.get(name) < below ? +given.get(name) : null);
  const [layer, head] = (given.get("h") ?? "").split(".").map(Number);
  if (layer >= 0 && layer < L && head >= 0 && head < H) state.head = layer * H + head;
  state.i = whole("q", T) ?? state.i;
  state.j = whole("k", T) ?? state.j;
  state.log = given.get("log") === "1";
  state.hide = given.get("hide") === "1";
  if (given.get("sort") && SORTS.some(([key]) => key === given.get("sort"))) state.sort = given.get("sort");
}

function writeHash() {
  const parts = [`h=${labelOf(state.head)}`, `q=${state.i}`, `k=${state.j}`];
  if (state.log) parts.push("log=1");
  if (state.hide) parts.push("hide=1");
  if (state.sort !== "layer") parts.push(`sort=${state.sort}`);
  try { history.replaceState(null, "", `#${parts.join("&")}`); } catch { /* a frame without an address of its own */ }
}

function strongestKey(i) {
  const { weights } = open(state.head);
  if (!weights) return Math.max(0, i - 1);
  let best = Math.max(0, facts.visible_first[i]);
  for (let j = best; j < facts.visible_stop[i]; j++) {
    if (weights[i * T + j] > weights[i * T + best] && !(state.hide && j === 0)) best = j;
  }
  return best;
}

// -------------------------------------------------------------------------------------------------------- writing

function make(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined));
  return element;
}

const tok = (text, given = {}) => make("span", { class: "tok", ...given }, text);
const minus = (text) => text.replace(/-/g, "−");

// Five significant digits unless said otherwise; the page's one way to write a number.
function digits(x, count = 5) {
  if (x === 0) return "0";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  return minus(Math.abs(x) < 1e-4 || Math.abs(x) >= 1e6 ? x.toExponential(count - 1) : x.toPrecision(count));
}
const share = (x) => (x === null || x === undefined ? "–" : x.toFixed(3));
const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(1)} %` : p >= 1e-4 ? `${(100 * p).toFixed(2)} %` : `${minus((100 * p).toExponential(1))} %`);
const vector = (numbers, more) => make("span", { class: "vector" }, `[${numbers.map((x) => digits(x, 4)).join(", ")}${more ? ", …" : ""}]`);

// --------------------------------------------------------------------------------------------------------- colour

const STOPS = {
  light: [[240, 243, 246], [201, 220, 236], [134, 180, 216], [62, 128, 184], [16, 74, 133], [5, 38, 77]],
  dark: [[30, 34, 38], [29, 60, 90], [38, 98, 148], [74, 147, 205], [148, 200, 239], [236, 246, 255]],
};
let shades = null; // 256 x [r, g, b] of the theme

function theme() { return document.documentElement.dataset.theme; }

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "light" : "dark";
  byId("theme").setAttribute("aria-label", `switch to ${byId("theme").textContent} colours`);
  shades = Array.from({ length: 256 }, (_, n) => {
    const place = (n / 255) * 5, low = Math.min(4, Math.floor(place));
    return [0, 1, 2].map((c) => Math.round(STOPS[name][low][c] + (place - low) * (STOPS[name][low + 1][c] - STOPS[name][low][c])));
  });
}

const shadeAt = (t) => shades[Math.round(255 * Math.min(1, Math.max(0, t)))];
const css = (colour) => `rgb(${colour.join(",")})`;
const isDeep = (colour) => 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 140;
const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const LOG_DECADES = 5;
function strength(weights, i, j) { // 0 .. 1: how strongly a cell is shaded
  let weight = weights[i * T + j];
  if (state.hide) {
    if (j === 0) return 0;
    const rest = 1 - weights[i * T];
    weight = rest > 1e-9 ? weight / rest : 0;
  }
  return state.log ? 1 + Math.log10(Math.max(weight, 1e-30)) / LOG_DECADES : weight;
}

// ------------------------------------------------------------------------------------------------------- overview

const SORTS = [
  ["layer", "layer and head"],
  ["entropy_share", "entropy (lowest first)"],
  ...facts.names.map((name) => [name.score, name.title]),
  ...(facts.detail ? [["loss_change", "loss when switched off"]] : []),
];

function sortValue(n) {
  const head = facts.heads[n];
  if (state.sort === "loss_change") return head.loss_change;
  return state.sort === "layer" || state.sort === "entropy_share" ? head.prompt.entropy_share : head.probe[state.sort];
}

function titlesOf(n) {
  return facts.names.filter((name) => facts.heads[n].names.includes(name.score));
}

function drawMap(canvas, n) {
  canvas.width = canvas.height = SIDE;
  const context = canvas.getContext("2d"), image = context.createImageData(SIDE, SIDE);
  for (let c = 0; c < SIDE * SIDE; c++) {
    const [r, g, b] = shades[maps[n * SIDE * SIDE + c]];
    image.data.set([r, g, b, 255], 4 * c);
  }
  context.putImageData(image, 0, 0);
}

const cards = facts.heads.map((head, n) => {
  const label = labelOf(n);
  const value = make("span");
  const badges = titlesOf(n).map((name) => make("span", { class: "badge" }, `${name.title.replace("/", "/\u200b")} `, make("i", {}, head.probe[name.score].toFixed(2))));
  const spoken = titlesOf(n).map((name) => `${name.title}, score ${head.probe[name.score].toFixed(2)}, threshold ${name.threshold}`);
  const canvas = make("canvas", { "aria-hidden": "true" });
  const button = make("button", { type: "button", class: "card", "data-head": label, title: spoken.join("; ") || null,
    "aria-label": [`head ${label}`, ...spoken].join(", "), onclick: () => { choose({ head: n }); byId("head").scrollIntoView(); } },
    canvas, make("span", { class: "id" }, make("b", {}, label), value), badges);
  return { n, button, canvas, value };
});

function drawOverview() {
  const wanted = state.filter.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const isShown = ({ n }) => !wanted.length || wanted.some((word) =>
    /^[\d.]+$/.test(word) ? labelOf(n).startsWith(word) : (word === "named" && facts.heads[n].names.length) || titlesOf(n).some((name) => name.title.includes(word)));
  const shown = cards.filter(isShown);
  const number = (value) => (value === null || value === undefined ? -Infinity : value);
  if (state.sort !== "layer") {
    const sign = state.sort === "entropy_share" ? -1 : 1;
    shown.sort((one, other) => number(sortValue(other.n)) * sign - number(sortValue(one.n)) * sign || one.n - other.n);
  }
  for (const { n, value } of cards) {
    const measured = sortValue(n);
    value.textContent = state.sort === "layer" ? "" : measured === null || measured === undefined ? "–" : minus(measured.toFixed(2));
  }
  const groups = state.sort === "layer"
    ? Array.from({ length: L }, (_, layer) => [`layer ${layer}`, shown.filter(({ n }) => layerOf(n) === layer)])
    : [["", shown]];
  byId("maps").replaceChildren(...groups.filter(([, members]) => members.length).map(([title, members]) =>
    make("div", { class: "layer" }, title ? make("p", {}, title) : null, make("div", { class: "cards" }, members.map(({ button }) => button)))));
  byId("count").textContent = shown.length === cards.length ? `${cards.length} heads` : `${shown.length} of ${cards.length} heads`;
}

function drawThumbnails() {
  for (const { n, canvas } of cards) drawMap(canvas, n);
}

function moveInOverview(event) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: "down", ArrowUp: "up" };
  const step = steps[event.key], all = [...byId("maps").querySelectorAll(".card")], at = all.indexOf(document.activeElement);
  if (step === undefined || at < 0) return;
  event.preventDefault();
  let to = all[at + step];
  if (typeof step === "string") {
    const here = all[at].getBoundingClientRect();
    const sign = step === "down" ? 1 : -1;
    const beyond = all.filter((card) => sign * (card.getBoundingClientRect().top - here.top) > 4);
    const distance = (card) => { const box = card.getBoundingClientRect(); return 1000 * Math.abs(box.top - here.top) + Math.abs(box.left - here.left); };
    to = beyond.sort((one, other) => distance(one) - distance(other))[0];
  }
  to?.focus();
}

function writeNames() {
  const rows = facts.names.map((name) => {
    const bearers = facts.heads.flatMap((head, n) => (head.names.includes(name.score) ? [n] : [])).sort((a, b) => facts.heads[b].probe[name.score] - facts.heads[a].probe[name.score]);
    const best = facts.heads.reduce((top, head, n) => ((head.probe[name.score] ?? -1) > (facts.heads[top].probe[name.score] ?? -1) ? n : top), 0);
    const score = (n) => facts.heads[n].probe[name.score];
    const chips = bearers.map((n) => make("button", { type: "button", onclick: () => { choose({ head: n }); byId("head").scrollIntoView(); } }, `${labelOf(n)} `, make("span", { class: "muted num" }, share(score(n)))));
    const none = make("span", { class: "muted" }, score(best) === null || score(best) === undefined ? "not measurable with this sequence length" : `none; nearest is ${labelOf(best)} at ${share(score(best))}`);
    return make("tr", {}, make("td", {}, make("b", {}, name.title)), make("td", {}, name.meaning),
      make("td", {}, name.probe === "repeat" ? "shuffled tokens, twice" : "passage"), make("td", { class: "n" }, `≥ ${name.threshold.toFixed(2)}`), make("td", {}, chips.length ? chips : none));
  });
  const titles = ["name", "the head", "measured on", "threshold", "heads, with their score"].map((title) => make("th", { scope: "col", class: title === "threshold" ? "n" : null }, title));
  byId("names").replaceChildren(make("thead", {}, make("tr", {}, titles)), make("tbody", {}, rows));
}

// -------------------------------------------------------------------------------------------------------- one head

const query = () => state.hover?.i ?? state.i;

const options = facts.tokens.map((_, i) => {
  const text = tokenText(i);
  const parts = text.split(/([␣↵→]+)/).map((part) => (/^[␣↵→]/.test(part) ? make("span", { class: "hidden-sign" }, part) : part));
  return make("span", { role: "option", id: `token-${i}`, "aria-label": `token ${i}: ${text}`, "data-i": i }, parts);
});

function writeTokens() {
  const children = [];
  options.forEach((option, i) => {
    children.push(option);
    if (tokenText(i).includes("↵") && i < T - 1) children.push(make("br"));
  });
  byId("tokens").replaceChildren(...children);
}

function shadeTokens() {
  const { weights } = open(state.head), i = query();
  options.forEach((option, j) => {
    const seen = isVisible(i, j);
    const colour = weights && seen ? shadeAt(strength(weights, i, j)) : null;
    option.style.background = colour ? css(colour) : "";
    option.style.color = colour ? (isDeep(colour) ? "#fff" : "#16181a") : "";
    option.classList.toggle("is-query", j === i);
    option.classList.toggle("is-key", j === (state.hover?.j ?? state.j));
    option.classList.toggle("is-masked", !seen);
    option.setAttribute("aria-selected", j === state.i);
  });
  byId("tokens").setAttribute("aria-activedescendant", `token-${state.i}`);
}

function keepTokenInView() {
  const box = byId("tokens"), option = options[state.i];
  const top = option.offsetTop - box.clientTop, bottom = top + option.offsetHeight;
  if (top < box.scrollTop) box.scrollTop = top - 8;
  else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight + 8;
}

// The part of the map that is drawn with labels: rows row .. row + count - 1, columns column .. column + count - 1.
const part = { row: 0, column: 0, count: T, cell: 16, left: 90, top: 90 };

function layOutMap() {
  const width = byId("map").parentElement.clientWidth || 340;
  const longest = Math.min(13, Math.max(...facts.tokens.map((_, i) => [...tokenText(i)].length)));
  part.left = part.top = Math.min(0.3 * width, 14 + 7 * longest);
  const room = width - part.left - 2, smallest = 12;
  part.count = Math.min(T, Math.max(4, Math.floor(room / smallest)));
  part.cell = Math.min(30, room / part.count);
  const follow = (start, at) => Math.min(Math.max(0, T - part.count), at < start || at >= start + part.count ? Math.max(0, Math.round(at - part.count / 2)) : start);
  part.row = follow(part.row, state.i);
  part.column = follow(part.column, state.j);
}

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

function drawHeadMap() {
  const { weights } = open(state.head);
  if (!weights) return drawReducedMap();
  const { row, column, count, cell, left, top } = part;
  const context = sized(byId("map"), left + count * cell + 2, top + count * cell + 2);
  const shown = state.hover ? { i: state.hover.i, j: state.hover.j } : { i: state.i, j: state.j };
  const gap = cell > 9 ? 1 : 0;
  for (let y = 0; y < count; y++) {
    for (let x = 0; x < count; x++) {
      const i = row + y, j = column + x;
      context.fillStyle = isVisible(i, j) ? css(shadeAt(strength(weights, i, j))) : styleOf("--paper");
      if (isVisible(i, j)) context.fillRect(left + x * cell, top + y * cell, cell - gap, cell - gap);
    }
  }
  context.font = `${Math.min(12, cell - 1)}px ui-monospace, Menlo, "DejaVu Sans Mono", monospace`;
  context.textBaseline = "middle";
  const fitting = (text) => { const letters = [...text]; const most = Math.floor((left - 8) / (Math.min(12, cell - 1) * 0.61)); return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text; };
  for (let n = 0; n < count; n++) {
    context.fillStyle = styleOf(row + n === shown.i ? "--query" : "--muted");
    context.textAlign = "right";
    context.fillText(fitting(tokenText(row + n)), left - 6, top + (n + 0.5) * cell);
    context.save();
    context.translate(left + (n + 0.5) * cell, top - 6);
    context.rotate(-Math.PI / 2);
    context.fillStyle = styleOf(column + n === shown.j ? "--key" : "--muted");
    context.textAlign = "left";
    context.fillText(fitting(tokenText(column + n)), 0, 0);
    context.restore();
  }
  const frame = (x, y, width, height, colour, thick) => { context.strokeStyle = styleOf(colour); context.lineWidth = thick; context.strokeRect(x, y, width, height); };
  if (shown.i >= row && shown.i < row + count) frame(left - 0.5, top + (shown.i - row) * cell - 0.5, count * cell, cell, "--query", 1);
  if (shown.j !== null && shown.j >= column && shown.j < column + count) {
    frame(left + (shown.j - column) * cell - 0.5, top - 0.5, cell, count * cell, "--key", 1);
    if (shown.i >= row && shown.i < row + count) frame(left + (shown.j - column) * cell - 0.5, top + (shown.i - row) * cell - 0.5, cell, cell, "--query", 2.5);
  }
}

function drawReducedMap() {
  const width = Math.min(480, byId("map").parentElement.clientWidth || 340), context = sized(byId("map"), width, width);
  const small = document.createElement("canvas");
  drawMap(small, state.head);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, width, width);
}

// For long prompts: the whole map in one small picture, each dot the strongest of its cells, and where the part above lies.
const whole = { key: "", canvas: document.createElement("canvas"), side: 0 };

function drawWhole() {
  const { weights } = open(state.head);
  byId("whole-box").hidden = !weights || part.count === T;
  if (byId("whole-box").hidden) return;
  const side = Math.min(300, T), key = [state.head, state.log, state.hide, theme()].join();
  if (whole.key !== key) {
    whole.key = key;
    whole.side = whole.canvas.width = whole.canvas.height = side;
    const strongest = new Float32Array(side * side).fill(-1); // -1: nothing visible there
    for (let i = 0; i < T; i++) {
      const y = Math.floor((i * side) / T) * side;
      for (let j = Math.max(0, facts.visible_first[i]); j < facts.visible_stop[i]; j++) {
        const at = y + Math.floor((j * side) / T);
        strongest[at] = Math.max(strongest[at], 0, strength(weights, i, j));
      }
    }
    const context = whole.canvas.getContext("2d"), image = context.createImageData(side, side);
    for (let c = 0; c < side * side; c++) {
      if (strongest[c] >= 0) image.data.set([...shadeAt(state.log ? strongest[c] : Math.sqrt(strongest[c])), 255], 4 * c);
    }
    context.putImageData(image, 0, 0);
  }
  const context = sized(byId("whole"), 300, 300);
  context.imageSmoothingEnabled = false;
  context.drawImage(whole.canvas, 0, 0, 300, 300);
  context.strokeStyle = styleOf("--query");
  context.lineWidth = 1.5;
  context.strokeRect((part.column / T) * 300, (part.row / T) * 300, (part.count / T) * 300, (part.count / T) * 300);
}

function drawLegend() {
  const strip = make("canvas", { "aria-hidden": "true" }), context = sized(strip, 110, 11);
  for (let x = 0; x < 110; x++) {
    context.fillStyle = css(shadeAt(x / 109));
    context.fillRect(x, 0, 1, 11);
  }
  byId("legend").replaceChildren(state.log ? "10⁻⁵" : "0", strip, "1");
}

function writeReadout() {
  const { weights, approximate } = open(state.head), i = query(), j = state.hover?.j ?? state.j;
  if (!weights || j === null) return byId("readout").replaceChildren();
  const weight = isVisible(i, j) ? [approximate ? "about " : "", make("b", { class: "num", id: "weight-shown" }, digits(weights[i * T + j], approximate ? 2 : 5))] : ["masked: ", make("b", {}, "0")];
  byId("readout").replaceChildren(make("span", { class: "query" }, `query ${i} `), tok(tokenText(i)), " → ", make("span", { class: "key" }, `key ${j} `), tok(tokenText(j)), make("br"), "weight ", ...weight);
}

const LOOKS = 8;
function writeLooks() {
  const { weights, approximate } = open(state.head), i = query();
  byId("looks-title").replaceChildren("Where ", tok(tokenText(i)), ` (${i}) looks`);
  if (!weights) return byId("looks").replaceChildren();
  const keys = [];
  for (let j = Math.max(0, facts.visible_first[i]); j < facts.visible_stop[i]; j++) keys.push(j);
  const sum = keys.reduce((total, j) => total + weights[i * T + j], 0);
  keys.sort((one, other) => weights[i * T + other] - weights[i * T + one] || one - other);
  const rows = keys.slice(0, LOOKS).map((j) => {
    const fill = make("span", { class: "fill" });
    fill.style.width = `${100 * weights[i * T + j]}%`;
    return make("tr", { class: j === state.j ? "is-key" : null, "data-key": j }, make("td", { class: "n muted" }, j),
      make("td", {}, make("button", { type: "button", class: "tok-button", "aria-label": `key ${j}: ${tokenText(j)}`, onclick: () => choose({ i, j }) }, tok(tokenText(j)))),
      make("td", { class: "track" }, fill), make("td", { class: "n" }, digits(weights[i * T + j], approximate ? 2 : 5)));
  });
  const rest = keys.slice(LOOKS).reduce((total, j) => total + weights[i * T + j], 0);
  if (keys.length > LOOKS) rows.push(make("tr", { class: "total" }, make("td"), make("td", { colspan: 2 }, `the other ${keys.length - LOOKS} visible keys`), make("td", { class: "n" }, digits(rest))));
  rows.push(make("tr", { class: "total" }, make("td"), make("td", { colspan: 2 }, approximate ? "sum, from 8-bit shades" : "sum over all visible keys"), make("td", { class: "n", id: "row-sum" }, sum.toFixed(6))));
  byId("looks").replaceChildren(make("tbody", {}, rows));
}

function writeScores() {
  const head = facts.heads[state.head];
  const row = (title, prompt, probe, threshold) => make("tr", {}, make("td", {}, title), make("td", { class: "n" }, share(prompt)), make("td", { class: "n" }, probe === null ? "" : share(probe)), make("td", { class: "n" }, threshold));
  const rows = facts.names.map((name) => row(name.title, head.prompt[name.score], head.probe[name.score], `≥ ${name.threshold.toFixed(2)}`));
  rows.push(row("entropy, share of ln(visible keys)", head.prompt.entropy_share, null, ""));
  if (head.loss_change !== null) rows.push(make("tr", {}, make("td", {}, "loss when switched off, nats per token"), make("td", { class: "n" }, `${head.loss_change < 0 ? "" : "+"}${digits(head.loss_change, 3)}`), make("td"), make("td")));
  const titles = ["mean weight on", "this prompt", "fixed probe", "name from"].map((title, n) => make("th", { scope: "col", class: n ? "n" : null }, title));
  byId("scores").replaceChildren(make("thead", {}, make("tr", {}, titles)), make("tbody", {}, rows));
}

function writeHeadNote() {
  const head = open(state.head), notes = [];
  if (!facts.heads[state.head].full) {
    notes.push(head.weights ? "Only this head's small map is in the file: its weights are approximate and its arithmetic is left out." : `Only this head's small map is in the file. To open it: python -m andrea lens heads=${labelOf(state.head)} …`);
  }
  if (state.hide) notes.push("First token hidden: the shades show the other keys' weights as shares of what the first token leaves. Numbers are unchanged.");
  byId("head-note").textContent = notes.join(" ");
  byId("head-note").hidden = !notes.length;
}

// -------------------------------------------------------------------------------------------------------- one cell

function products(numbers, total) {
  const shown = numbers.slice(0, 4);
  const rest = total - shown.reduce((sum, [a, b]) => sum + a * b, 0);
  const terms = shown.map(([a, b], n) => `${n ? " + " : ""}${digits(a, 4)} × ${digits(b, 4)}`.replace(/\+ −/g, "− "));
  return [terms.join("").replace(/× −([\d.]+)/g, "× (−$1)"), numbers.length > 4 ? ` + (${numbers.length - 4} more terms: ${digits(rest)})` : ""].join("");
}

function scoreSteps(head, i, j, s) {
  const N = head.width, n = state.head, slice = (array, at) => Array.from(array.subarray(at * N, (at + 1) * N));
  const stored = slice(head.query, i), k = slice(head.key, j);
  const shownVectors = (q, names) => [make("div", {}, `${names[0]} = `, vector(q.slice(0, 6), N > 6)), make("div", {}, `${names[1]} = `, vector(k.slice(0, 6), N > 6))];
  const step = (what, small, formula, result) => ({ what, small, formula, result });
  switch (facts.compatibility) {
    case "ScaledDotProduct": {
      const root = Math.sqrt(D), q = stored.map((x) => x * root);
      return [
        step("query · key", "how well the key answers the query", [...shownVectors(q, ["q", "k"]), make("div", {}, `q·k = ${products(q.map((x, c) => [x, k[c]]), s * root)}`)], s * root),
        step(["÷ √d", make("sub", {}, "k")], "so that wide heads don't saturate", [`q·k / √${D} = ${digits(s * root)} / ${digits(root)}`], s),
      ];
    }
    case "DotProduct":
      return [step("query · key", "the plain dot product: nothing is scaled", [...shownVectors(stored, ["q", "k"]), make("div", {}, `q·k = ${products(stored.map((x, c) => [x, k[c]]), s)}`)], s)];
    case "Bilinear":
      return [step("qᵀ M k", "a learned matrix M stands between query and key; it holds the scale too", [...shownVectors(stored, ["Mᵀq", "k"]), make("div", {}, `(Mᵀq)·k = ${products(stored.map((x, c) => [x, k[c]]), s)}`)], s)];
    case "Cosine": {
      const sharpness = facts.sharpness[layerOf(n)][n % H], q = stored.map((x) => x / sharpness);
      return [
        step("cos(query, key)", "both at length one: only their directions count", [...shownVectors(q, ["q/|q|", "k/|k|"]), make("div", {}, `cos = ${products(q.map((x, c) => [x, k[c]]), s / sharpness)}`)], s / sharpness),
        step("× sharpness", "learned for this head", [`s · cos = ${digits(sharpness)} × ${digits(s / sharpness)}`], s),
      ];
    }
    default: {
      const w = facts.mixing[layerOf(n)][n % H], hidden = stored.map((x, c) => [w[c], Math.tanh(x + k[c])]);
      return [step("w · tanh(A q + B k)", "a small network judges the pair", [...shownVectors(stored, ["A q", "B k"]), make("div", {}, `score = ${products(hidden, s)}`)], s)];
    }
  }
}

function pushLine(ids, changes, at, factor) {
  const half = ids.length / T / 2;
  const list = (from) => Array.from({ length: half }, (_, n) => [n ? " " : "", tok(textOf(ids[at * 2 * half + from + n])), ` ${factor * changes[at * 2 * half + from + n] >= 0 ? "+" : ""}${digits(factor * changes[at * 2 * half + from + n], 3)}`]);
  return make("div", { class: "push" }, make("b", {}, "up "), list(0), " · ", make("b", {}, "down "), list(half));
}

function writeCell() {
  const head = open(state.head), { i, j } = state, n = state.head;
  byId("query-choice").value = i;
  byId("key-choice").value = j;
  if (!head.query) {
    byId("cell-note").textContent = `Head ${labelOf(n)} is not in this file in full, so there is no arithmetic to show. To have it: python -m andrea lens heads=${labelOf(n)} …`;
    return byId("steps").replaceChildren();
  }
  const made = [];
  if (facts.qk_norm) made.push("QK-norm (each made root-mean-square one)");
  if (facts.compatibility === "Bilinear") made.push("the matrix M");
  if (facts.position === "rotary") made.push("rotary positions (turned by their place)");
  byId("cell-note").replaceChildren(`Head ${labelOf(n)}, query `, tok(tokenText(i)), ` at ${i}, key `, tok(tokenText(j)), ` at ${j}.`, made.length && facts.compatibility !== "Additive" ? ` Query and key are shown as they meet: after ${made.join(" and ")}.` : "");
  const row = rowOf(head, n, i), seen = isVisible(i, j), s = score(head, n, i, j);
  const masked = seen ? s : -Infinity, e = row.exponentials[j], weight = e / row.sum;
  const v = Array.from(head.value.subarray(j * D, (j + 1) * D)), z = new Array(D).fill(0);
  for (let key = row.first; key < row.stop; key++) {
    const share = row.exponentials[key] / row.sum;
    for (let c = 0; c < D; c++) z[c] += share * head.value[key * D + c];
  }
  const C = facts.components + 1, written = (array, at) => Array.from(array.subarray(at * C + 1, (at + 1) * C));
  const length = (numbers) => Math.sqrt(numbers.reduce((sum, x) => sum + x * x, 0));
  const window = row.first > 0 ? `only keys ${row.first} … ${i} are visible` : "a query sees itself and what came before";
  const steps = [
    ...scoreSteps(head, i, j, s),
    { what: "mask", small: window, formula: [seen ? `key ${j} ≤ query ${i}: visible, the score stays` : j > i ? `key ${j} > query ${i}: not yet there, the score becomes −∞` : `key ${j} is out of the window: the score becomes −∞`], result: masked, id: "cell-masked" },
    { what: "exponentiate", small: "after taking off the row's largest score, so that nothing overflows", formula: [`e^(score − largest) = e^(${digits(masked)} − ${row.largest < 0 ? `(${digits(row.largest)})` : digits(row.largest)})`, make("div", {}, "largest at key ", `${row.at} `, tok(tokenText(row.at)))], result: e },
    { what: "normalise", small: "by the row's sum, so that the row's weights sum to 1", formula: [`${digits(e)} / ${digits(row.sum)}`, make("div", {}, `the row's sum over ${row.stop - row.first} visible keys`)], result: weight, unit: "the weight", id: "cell-weight" },
    { what: "× value", small: "what the key hands over, as much as it weighs", formula: [make("div", {}, "v = ", vector(v.slice(0, 6), D > 6)), make("div", {}, "weight · v = ", vector(v.slice(0, 6).map((x) => weight * x), D > 6))], result: weight * length(v), unit: "length" },
    { what: ["through W", make("sub", {}, "O")], small: "into the residual stream", formula: [make("div", {}, "weight · W", make("sub", {}, "O"), " v = ", vector(written(head.key_write, j).map((x) => weight * x), true)), head.key_push && seen ? pushLine(head.key_push_ids, head.key_push, j, weight) : null], result: weight * head.key_write[j * C], unit: "length" },
    { what: "all keys together", small: "what the head writes at this query", formula: [make("div", {}, "z = Σ weight · v = ", vector(z.slice(0, 6), D > 6)), make("div", {}, "W", make("sub", {}, "O"), " z = ", vector(written(head.query_write, i), true)), head.query_push ? pushLine(head.query_push_ids, head.query_push, i, 1) : null], result: head.query_write[i * C], unit: "length" },
  ];
  byId("steps").replaceChildren(...steps.map((step) => make("li", {}, make("div", { class: "what" }, step.what, make("small", {}, step.small)), make("div", { class: "formula" }, step.formula),
    make("div", { class: "result num" }, make("span", { id: step.id }, digits(step.result)), step.unit ? make("small", {}, step.unit) : null))));
  if (head.key_push) byId("steps").append(make("li", {}, make("div"), make("p", { class: "muted small" }, "up and down: the next tokens whose logits this adds to or takes from most, through the unembedding. The final norm is left out of this: it depends on everything the other heads and layers write."), make("div")));
}

// ------------------------------------------------------------------------------------------------------ next token

function writeNext() {
  const i = state.i, head = open(state.head), label = labelOf(state.head), isLast = i === T - 1;
  const watchedId = next.known_ids[i * KNOWN + KNOWN - 1], watched = next.known[i * KNOWN + KNOWN - 1];
  byId("next-lead").replaceChildren("What the model expects after ", tok(tokenText(i)), ` (${i})`,
    head.off_known ? `, and what it would expect if head ${label} wrote nothing there or anywhere else in the prompt (its z set to zero).` : ".");
  byId("bars-title").replaceChildren(make("span", { class: "swatch" }), "the model", ...(head.off_known ? ["  ", make("span", { class: "swatch off" }), `without head ${label}`] : []));
  const entries = [];
  for (let c = 0; c < KNOWN; c++) {
    const id = next.known_ids[i * KNOWN + c];
    if (!entries.some((entry) => entry.id === id)) entries.push({ id, on: next.known[i * KNOWN + c], off: head.off_known?.[i * KNOWN + c] });
  }
  if (head.off_known) {
    const W = head.off_top.length / T;
    for (let c = 0; c < W; c++) {
      const id = head.off_top_ids[i * W + c];
      if (!entries.some((entry) => entry.id === id)) entries.push({ id, on: null, off: head.off_top[i * W + c] });
    }
  }
  const bar = (p, name) => { const fill = make("span", { class: `fill ${name}` }); fill.style.width = `${100 * p}%`; return fill; };
  const change = (on, off) => `${off >= on ? "+" : "−"}${Math.abs(100 * (off - on)).toFixed(2)}`;
  const rows = entries.map(({ id, on, off }) => make("tr", { "data-token": id }, make("td", {}, tok(textOf(id)), !isLast && id === watchedId ? make("span", { class: "happens" }, " comes next") : null),
    make("td", { class: "track" }, on === null ? null : bar(on, ""), off === undefined ? null : bar(off, "off")),
    make("td", { class: "n" }, on === null ? make("span", { class: "muted" }, "not in top 10") : percent(on)), ...(off === undefined ? [] : [make("td", { class: "n" }, percent(off)), make("td", { class: "n muted" }, on === null ? "" : change(on, off))])));
  const titles = ["token", "", "model", ...(head.off_known ? ["without", "points"] : [])].map((title, c) => make("th", { scope: "col", class: c > 1 ? "n" : null }, title));
  byId("next-bars").replaceChildren(make("thead", {}, make("tr", {}, titles)), make("tbody", {}, rows));
  writeEffects(i, watchedId, watched, isLast);
}

const EFFECTS = 6;
function writeEffects(i, watchedId, watched, isLast) {
  byId("effects-box").hidden = !effects;
  if (!effects) return;
  const all = fullHeads.map((n, at) => ({ n, off: effects[at * T + i] })).sort((one, other) => one.off - other.off);
  byId("effects-lead").replaceChildren("The probability of ", tok(textOf(watchedId)), `, ${isLast ? "the likeliest next token" : "the token that does come"}, with each head switched off alone: the largest drops, and the largest rise. The model gives it ${percent(watched)}.`);
  const shown = all.slice(0, Math.min(EFFECTS, all.length));
  if (all.length > EFFECTS) shown.push(all[all.length - 1]);
  const rows = shown.map(({ n, off }) => make("tr", {}, make("td", {}, make("button", { type: "button", onclick: () => choose({ head: n }) }, labelOf(n)), " ", make("span", { class: "muted small" }, titlesOf(n).map((name) => name.title).join(", "))),
    make("td", { class: "n" }, percent(off)), make("td", { class: "n" }, off > watched ? `× ${digits(off / watched, 3)}` : `÷ ${digits(watched / Math.max(off, 1e-38), 3)}`)));
  byId("effects").replaceChildren(make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "without head"), make("th", { scope: "col", class: "n" }, "probability"), make("th", { scope: "col", class: "n" }, "factor"))), make("tbody", {}, rows));
}

// --------------------------------------------------------------------------------------------------------- acting

function choose(change) {
  const isOtherHead = change.head !== undefined && change.head !== state.head;
  Object.assign(state, change, { hover: null });
  const keepsKey = "j" in change || (change.i === undefined && !isOtherHead);
  if (!keepsKey || state.j === null) state.j = strongestKey(state.i);
  draw();
}

function draw() {
  const label = labelOf(state.head), titles = titlesOf(state.head);
  layOutMap();
  byId("head-name").replaceChildren(`Head ${label}`, ...titles.map((name) => make("span", { class: "muted" }, `, ${name.title}`)));
  byId("head-choice").value = state.head;
  byId("log").checked = state.log;
  byId("hide").checked = state.hide;
  byId("chosen").replaceChildren(`head ${label} · `, make("span", { class: "query" }, `${state.i} `), tok(tokenText(state.i)), " → ", make("span", { class: "key" }, `${state.j} `), tok(tokenText(state.j)));
  for (const { n, button } of cards) {
    button.setAttribute("aria-pressed", n === state.head);
    button.tabIndex = n === state.head ? 0 : -1;
  }
  if (!byId("maps").querySelector('.card[tabindex="0"]')) byId("maps").querySelector(".card")?.setAttribute("tabindex", "0");
  writeHeadNote();
  writeScores();
  drawLegend();
  look();
  drawWhole();
  keepTokenInView();
  writeCell();
  writeNext();
  writeHash();
}

function look() { // what follows the pointer
  drawHeadMap();
  shadeTokens();
  writeReadout();
  writeLooks();
}

function hover(place) {
  if (place?.i === state.hover?.i && place?.j === state.hover?.j) return;
  state.hover = place;
  look();
}

function cellAt(event) {
  const box = byId("map").getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left - part.left) / part.cell), y = Math.floor((event.clientY - box.top - part.top) / part.cell);
  return x >= 0 && y >= 0 && x < part.count && y < part.count ? { i: part.row + y, j: part.column + x } : null;
}

const within = (at) => Math.min(T - 1, Math.max(0, at));

function listen() {
  byId("theme").addEventListener("click", () => { setTheme(theme() === "dark" ? "light" : "dark"); drawThumbnails(); draw(); });
  byId("sort").append(...SORTS.map(([key, title]) => make("option", { value: key }, title)));
  byId("sort").value = state.sort;
  byId("sort").addEventListener("change", (event) => { state.sort = event.target.value; drawOverview(); draw(); });
  byId("filter").addEventListener("input", (event) => { state.filter = event.target.value; drawOverview(); draw(); });
  byId("maps").addEventListener("keydown", moveInOverview);
  byId("head-choice").append(...facts.heads.map((_, n) => make("option", { value: n }, [labelOf(n), ...titlesOf(n).map((name) => name.title)].join(" "))));
  byId("head-choice").addEventListener("change", (event) => choose({ head: +event.target.value }));
  byId("head-back").addEventListener("click", () => choose({ head: (state.head + L * H - 1) % (L * H) }));
  byId("head-on").addEventListener("click", () => choose({ head: (state.head + 1) % (L * H) }));
  for (const name of ["log", "hide"]) byId(name).addEventListener("change", (event) => choose({ [name]: event.target.checked }));
  for (const [id, name] of [["query-choice", "i"], ["key-choice", "j"]]) {
    byId(id).append(...facts.tokens.map((_, i) => make("option", { value: i }, `${i} ${tokenText(i)}`)));
    byId(id).addEventListener("change", (event) => choose(name === "i" ? { i: +event.target.value, j: state.j } : { j: +event.target.value }));
  }
  const tokens = byId("tokens"), at = (event) => event.target.closest("[role=option]");
  tokens.addEventListener("pointerover", (event) => { if (event.pointerType !== "touch") hover(at(event) ? { i: +at(event).dataset.i, j: null } : null); });
  tokens.addEventListener("pointerleave", () => hover(null));
  tokens.addEventListener("click", (event) => at(event) && choose({ i: +at(event).dataset.i }));
  tokens.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: { i: within(state.i - 1) }, ArrowRight: { i: within(state.i + 1) }, ArrowUp: { j: within(state.j - 1) }, ArrowDown: { j: within(state.j + 1) }, Home: { i: 0 }, End: { i: T - 1 } };
    if (moves[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); choose(moves[event.key]); }
  });
  const map = byId("map");
  map.addEventListener("pointermove", (event) => { if (event.pointerType !== "touch" && open(state.head).weights) hover(cellAt(event)); });
  map.addEventListener("pointerleave", () => hover(null));
  map.addEventListener("click", (event) => { const place = open(state.head).weights && cellAt(event); if (place) choose(place); });
  map.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: { j: within(state.j - 1) }, ArrowRight: { j: within(state.j + 1) }, ArrowUp: { i: within(state.i - 1), j: state.j }, ArrowDown: { i: within(state.i + 1), j: state.j } };
    if (moves[event.key] && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); choose(moves[event.key]); }
  });
  byId("whole").addEventListener("click", (event) => {
    const box = byId("whole").getBoundingClientRect();
    choose({ i: within(Math.floor(((event.clientY - box.top) / box.height) * T)), j: within(Math.floor(((event.clientX - box.left) / box.width) * T)) });
  });
  for (const link of document.querySelectorAll('nav a, a.skip')) link.addEventListener("click", (event) => { event.preventDefault(); byId(link.hash.slice(1)).scrollIntoView(); });
  window.addEventListener("resize", draw);
  window.addEventListener("hashchange", () => { readHash(); choose({ j: state.j }); });
}

function writeFacts() {
  const words = { ScaledDotProduct: "scaled dot product", DotProduct: "dot product", Bilinear: "bilinear", Cosine: "cosine", Additive: "additive" };
  const heads = facts.kv_heads === H ? `${L} layers × ${H} heads` : `${L} layers × ${H} heads, ${facts.kv_heads} of keys and values`;
  byId("facts-line").replaceChildren(make("b", {}, facts.title), ` · ${(facts.parameters / 1e6).toFixed(1)}M parameters · ${heads} of width ${D} · ${words[facts.compatibility]} · ${T} of ${facts.sequence_length} tokens`);
  byId("foot").textContent = [facts.checkpoint, `tokenizer ${facts.tokenizer}`, `${fullHeads.length} of ${facts.heads.length} heads in full`, "␣ blank, ↵ line end, → tab, ⟨…⟩ bytes that are no whole character"].filter(Boolean).join(" · ");
  if (L * H > 48) byId("maps").classList.add("dense");
}

setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
readHash();
writeFacts();
writeNames();
writeTokens();
drawThumbnails();
drawOverview();
listen();
choose({ j: state.j });
document.documentElement.dataset.ready = "yes";
})();
