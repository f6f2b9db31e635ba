// The page's data, and the attention weights computed from it in double precision.
//
// T tokens, L layers, H heads per layer, D width of a value. Heads are numbered
// n = layer * H + head; i is the position of a query, j of a key. Matrices are flat arrays.

const facts = JSON.parse(document.getElementById("facts").textContent);
const [T, L, H, D] = [facts.tokens.length, facts.layers, facts.heads_per_layer, facts.d_head];
const ARRAY_TYPES = { f4: Float32Array, u4: Uint32Array, u2: Uint16Array, i2: Int16Array, u1: Uint8Array };

const maps = unpack("maps", facts.layouts.maps).maps; // (L * H, SIDE, SIDE), 255 times the square root of a weight
const SIDE = facts.layouts.maps[0][2][2];
const next = unpack("next", facts.layouts.next); // candidate_ids and candidates, (T, CANDIDATES) each
const CANDIDATES = facts.layouts.next[0][2][1]; // next tokens with a known probability; the last is the one that follows
const fullHeads = facts.heads.flatMap((head, n) => (head.full ? [n] : [])); // those with all their vectors in the file
const gates = facts.layouts.gates ? unpack("gates", facts.layouts.gates).gates : null; // (L * H, T), from 0 to 2
const effects = facts.layouts.effects ? unpack("effects", facts.layouts.effects).ablated : null; // (full heads, T)

const MOST_OPEN_HEADS = T > 256 ? 4 : 64;
const openHeads = new Map(); // n -> the result of openHead(n); the last one used is last

function byId(id) {
  return document.getElementById(id);
}

function layerOf(n) {
  return Math.floor(n / H);
}

function labelOf(n) {
  return `${layerOf(n)}.${n % H}`;
}

function namesOf(n) {
  return facts.names.filter((name) => facts.heads[n].names.includes(name.score));
}

function textOf(id) {
  return facts.texts[id];
}

function tokenText(i) {
  return textOf(facts.tokens[i]);
}

// The first key that each query of head n sees, and one past the last.
function intervalsOf(n) {
  return facts.visible[facts.visible_of_layer[layerOf(n)]];
}

function isVisible(n, i, j) {
  const { first, stop } = intervalsOf(n);
  return first[i] <= j && j < stop[i];
}

function visibleKeys(n, i) {
  const { first, stop } = intervalsOf(n);
  return Array.from({ length: Math.max(0, stop[i] - first[i]) }, (_, index) => first[i] + index);
}

// The gate of head n for token i: the mean over the head's channels.
function gateOf(n, i) {
  return gates[n * T + i];
}

function meanGate(n) {
  return gates.subarray(n * T, (n + 1) * T).reduce((sum, gate) => sum + gate, 0) / T;
}

function isPresent(x) {
  return x !== null && x !== undefined;
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
  return bytes;
}

// The arrays of a data element. layout: [name, type, shape] of each, in their order.
function unpack(name, layout) {
  const bytes = bytesOf(document.getElementById(`data-${name}`).textContent);
  const arrays = {};
  let offset = bytes.byteOffset;
  for (const [field, type, shape] of layout) {
    const count = shape.reduce((product, side) => product * side, 1);
    arrays[field] = new ARRAY_TYPES[type](bytes.buffer, offset, count);
    offset += arrays[field].byteLength;
  }
  return arrays;
}

// A head's vectors, its weights (T, T), and what each weight writes: weight × norm of W_O v. The weights are exact for
// a head that is in the file in full, which alone has the others; else, where the small map has a
// cell for each weight, approximate and without vectors; else null.
function openHead(n) {
  let head = openHeads.get(n);
  if (head) openHeads.delete(n);
  else if (facts.heads[n].full) head = withWeights(unpack(labelOf(n), facts.layouts.head), n);
  else head = { weights: SIDE === T ? weightsFromMap(n) : null, isApproximate: true };
  openHeads.set(n, head);
  if (openHeads.size > MOST_OPEN_HEADS) openHeads.delete(openHeads.keys().next().value);
  return head;
}

function weightsFromMap(n) {
  return Float64Array.from(maps.subarray(n * T * T, (n + 1) * T * T), (shade) => (shade / 255) ** 2);
}

function withWeights(head, n) {
  head.weights = new Float64Array(T * T);
  for (let i = 0; i < T; i++) {
    const row = softmaxRow(head, n, i);
    for (const j of row.keys) head.weights[i * T + j] = row.exponentials[j] / row.sum;
  }
  const width = head.key_write.length / T;
  head.written = head.weights.map((weight, at) => weight * head.key_write[(at % T) * width]);
  return head;
}

// The softmax of query i: the largest score and its key, e^(score - largest) of each visible key, and their sum, in which
// the head's sink takes part.
function softmaxRow(head, n, i) {
  const keys = visibleKeys(n, i);
  const exponentials = new Float64Array(T);
  const scores = keys.map((j) => scoreOf(head, n, i, j));
  const largest = scores.reduce((most, score) => Math.max(most, score), -Infinity);
  let sum = 0;
  keys.forEach((j, index) => (sum += exponentials[j] = Math.exp(scores[index] - largest)));
  if (hasSink()) sum += Math.exp(sinkOf(n) - largest);
  return { keys, exponentials, largest, largestKey: keys[scores.indexOf(largest)], sum };
}

function hasSink() {
  return facts.sinks !== null;
}

// The logit of a head's sink.
function sinkOf(n) {
  return facts.sinks[layerOf(n)][n % H];
}

// The score as the softmax takes it: capped, and lower with the distance, where the model does so.
function scoreOf(head, n, i, j) {
  const score = cappedScore(compatibilityOf(head, n, i, j));
  return facts.slopes === null ? score : score - facts.slopes[n % H] * Math.abs(i - j);
}

function cappedScore(score) {
  return facts.softcap === null ? score : facts.softcap * Math.tanh(score / facts.softcap);
}

// What the compatibility function says of a key up to the query. The file has the scores, row i for the keys 0 to i; for a long
// prompt it has the whole queries and keys instead.
function compatibilityOf(head, n, i, j) {
  if (head.scores) return head.scores[(i * (i + 1)) / 2 + j];
  const N = facts.score_width;
  const mixing = facts.mixing && facts.mixing[layerOf(n)][n % H]; // of the additive function alone
  let sum = 0;
  if (mixing) for (let c = 0; c < N; c++) sum += mixing[c] * Math.tanh(head.query[i * N + c] + head.key[j * N + c]);
  else for (let c = 0; c < N; c++) sum += head.query[i * N + c] * head.key[j * N + c];
  return sum;
}
