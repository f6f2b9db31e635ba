// Section 8: two prompts. What moves the prediction after the last token from that of the first to that of the second.

const patched = facts.layouts.patched ? unpack("patched", facts.layouts.patched) : null; // logits (…, COMPARED) of the compared tokens
const COMPARED = patched ? patched.compared_ids.length : 0;
const PATCHED_PARTS = [
  ["stream", "residual stream"],
  ["attention", "attention's output"],
  ["mlp", "MLP's output"],
];
const SHOWN_PATCHES = 5; // of the list of the strongest
const comparison = { part: "stream", toward: 0, away: 0 }; // two of the compared tokens, by their place

function startTwoPrompts() {
  byId("two-prompts").hidden = byId("two-prompts-link").hidden = !patched;
  if (!patched) return;
  chooseCompared();
  const tokens = Array.from(patched.compared_ids, (id, place) => [place, textOf(id)]);
  fillChoice(
    "patched-part",
    PATCHED_PARTS.filter(([name]) => patched[name]),
  );
  byId("patched-left-out").hidden = Boolean(patched.mlp);
  fillChoice("patched-toward", tokens);
  fillChoice("patched-away", tokens);
  for (const name of ["part", "toward", "away"]) {
    byId(`patched-${name}`).value = comparison[name];
    onEvent(`patched-${name}`, "change", (event) => {
      comparison[name] = name === "part" ? event.target.value : +event.target.value;
      writeTwoPrompts();
    });
  }
  const tokenAt = (ids, i) => newElement("span", { class: patched.against_ids[i] === facts.tokens[i] ? null : "differs" }, textOf(ids[i]));
  const text = (ids) => facts.tokens.map((_, i) => tokenAt(ids, i));
  byId("patched-texts").replaceChildren(
    line(span("muted small", "prompt "), span("example", text(facts.tokens))),
    line(span("muted small", "second text "), span("example", text(patched.against_ids))),
  );
}

// The likeliest token of each text. If it is the same, the second is the one that gains most on it in the second text.
function chooseCompared() {
  const [first, second] = [0, 1].map((text) => Array.from(patched.whole.subarray(text * COMPARED, (text + 1) * COMPARED)));
  const largest = (numbers) => numbers.indexOf(Math.max(...numbers));
  const gains = second.map((logit, place) => (place === largest(first) ? -Infinity : logit - first[place]));
  comparison.away = largest(first);
  comparison.toward = largest(second) === comparison.away ? largest(gains) : largest(second);
}

// Logit of one compared token minus that of the other, in row `at` of an array.
function difference(array, at) {
  return array[at * COMPARED + comparison.toward] - array[at * COMPARED + comparison.away];
}

// The share of the way from the first text's difference (0) to the second's (1).
function movedShare(array, at) {
  const [from, to] = [difference(patched.whole, 0), difference(patched.whole, 1)];
  return (difference(array, at) - from) / (to - from);
}

function writeTwoPrompts() {
  if (!patched) return;
  const [from, to] = [difference(patched.whole, 0), difference(patched.whole, 1)];
  const [toward, away] = [comparison.toward, comparison.away].map((place) => tokenLabel(textOf(patched.compared_ids[place])));
  byId("patched-note").replaceChildren(
    "Logit of ", toward, " minus logit of ", away,
    ` after the last token: ${formatNumber(from, 4)} for the prompt (0 %), ${formatNumber(to, 4)} for the second text (100 %).`,
    from === to ? " The texts do not differ in it: choose other tokens." : "",
  );
  byId("patched-tables").hidden = from === to;
  if (from === to) return;
  const array = patched[comparison.part];
  const position = (layer) => (i) => patchedCell(movedShare(array, layer * T + i), { onclick: () => select({ i }) });
  fillGrid("patched-grid", Array.from({ length: L }, (_, layer) => gridRow(`layer ${layer}`, position(layer))));
  const headCell = (n) => patchedCell(movedShare(patched.heads, n), { onclick: () => select({ head: n }) });
  const rows = Array.from({ length: L }, (_, layer) =>
    row(newElement("th", { scope: "row" }, `layer ${layer}`), Array.from({ length: H }, (_, index) => headCell(layer * H + index))),
  );
  const titles = Array.from({ length: H }, (_, index) => newElement("th", { scope: "col" }, `head ${index}`));
  byId("patched-heads").replaceChildren(newElement("thead", {}, row(newElement("th"), titles)), newElement("tbody", {}, rows));
  writeStrongestPatches(array);
}

function patchedCell(share, attributes) {
  const percent = Math.round(100 * share) || 0; // not −0
  return shadedCell(percent / 100, attributes, `${withMinusSign(percent.toString())} %`);
}

// The strongest heads, and the strongest positions of the chosen part, as a list with buttons.
function writeStrongestPatches(array) {
  const heads = facts.heads.map((_, n) => ({ share: movedShare(patched.heads, n), label: [newButton(() => select({ head: n }), `head ${labelOf(n)}`), ...namesOf(n).map((name) => span("muted small", ` ${name.title}`))] }));
  const places = Array.from({ length: L * T }, (_, at) => ({
    share: movedShare(array, at),
    label: [`layer ${Math.floor(at / T)} at `, newButton(() => select({ i: at % T }), `${at % T} `, tokenLabel(tokenText(at % T)))],
  }));
  const strongest = (all) => all.sort((one, other) => Math.abs(other.share) - Math.abs(one.share)).slice(0, SHOWN_PATCHES);
  const rowOf = ({ share, label }) => row(cell(label), numberCell(formatPercentOf(share)));
  fillTable(byId("patched-strongest-heads"), ["head, at all positions", "#moves"], strongest(heads).map(rowOf));
  fillTable(byId("patched-strongest-places"), [PATCHED_PARTS.find(([name]) => name === comparison.part)[1], "#moves"], strongest(places).map(rowOf));
}

function formatPercentOf(share) {
  return `${withMinusSign((100 * share).toFixed(1))} %`;
}
