// The selection: it follows the page's address, so that a link opens the page as it was.

const state = {
  head: mostInterestingHead(),
  i: T - 1, // the selected query
  j: null, // the selected key
  hovered: null, // {i, j} under the pointer; j is null over a token of the text
  log: false, // shades on a log scale
  hide: false, // shades without the first token
  gate: false, // the text is shaded by the head's gate of each token
  written: false, // shades by what each cell writes, not by its weight
  onlyHead: false, // the graph shows the arrows of the selected head alone
  sort: "layer",
  filter: "",
};

// The head that exceeds the threshold of a name by the largest factor.
function mostInterestingHead() {
  const factors = (n) => facts.names.map((name) => (facts.heads[n].probe[name.score] ?? 0) / name.threshold);
  const interest = (n) => Math.max(...factors(n));
  const candidates = fullHeads.length ? fullHeads : facts.heads.map((_, n) => n);
  return candidates.reduce((best, n) => (interest(n) > interest(best) ? n : best), candidates[0]);
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const position = (name) => (/^\d+$/.test(given.get(name) ?? "") && +given.get(name) < T ? +given.get(name) : null);
  const [layer, head] = (given.get("h") ?? "").split(".").map(Number);
  if (layer >= 0 && layer < L && head >= 0 && head < H) state.head = layer * H + head;
  state.i = position("q") ?? state.i;
  state.j = position("k") ?? state.j;
  state.log = given.get("log") === "1";
  state.hide = given.get("hide") === "1";
  state.gate = gates !== null && given.get("gate") === "1";
  state.written = given.get("written") === "1";
  state.onlyHead = given.get("only") === "1";
  if (SORTS.some(([key]) => key === given.get("sort"))) state.sort = given.get("sort");
}

function writeAddress() {
  const parts = [`h=${labelOf(state.head)}`, `q=${state.i}`, `k=${state.j}`];
  if (state.log) parts.push("log=1");
  if (state.hide) parts.push("hide=1");
  if (state.gate) parts.push("gate=1");
  if (state.written) parts.push("written=1");
  if (state.onlyHead) parts.push("only=1");
  if (state.sort !== "layer") parts.push(`sort=${state.sort}`);
  try {
    history.replaceState(null, "", `#${parts.join("&")}`);
  } catch {
    // Inside a frame without an address of its own, as in wandb.
  }
}

function strongestKey(i) {
  const { weights } = openHead(state.head);
  if (!weights) return Math.max(0, i - 1);
  const keys = visibleKeys(state.head, i).filter((j) => !(state.hide && j === 0 && i > 0));
  return keys.reduce((best, j) => (weights[i * T + j] > weights[i * T + best] ? j : best), keys[0]);
}
