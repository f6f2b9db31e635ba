// Section 4: the predicted next token, with and without the head, and the heads with the largest effect on it.

const SHOWN_EFFECTS = 6; // heads whose ablation lowers the probability most; one more is that which raises it most

function writeNext() {
  const { i } = state;
  const head = openHead(state.head);
  const label = labelOf(state.head);
  const ablated =
    ", and its prediction when head " + label + " is ablated: its output z set to zero at every position.";
  byId("next-lead").replaceChildren(
    "The model's prediction after ",
    tokenLabel(tokenText(i)),
    ` (${i})${head.ablated_candidates ? ablated : "."}`,
  );
  const withoutHead = [" ", span("swatch off"), `without head ${label}`];
  byId("bars-title").replaceChildren(span("swatch"), "the model", ...(head.ablated_candidates ? withoutHead : []));
  const added = hasDirect() ? ["#adds"] : [];
  const titles = ["token", "", "#model", ...(head.ablated_candidates ? ["#without", "#% points"] : []), ...added];
  fillTable(
    byId("next-bars"),
    titles,
    predictions(head, i).map((prediction) => predictionRow(i, prediction)),
  );
  writeDirect(i);
  writeEffects(i);
}

// {id, probability, ablated} of each token worth a row. probability: null where the file does not have it; ablated:
// without the head, undefined where the head is not in the file in full.
function predictions(head, i) {
  const found = new Map();
  for (let c = 0; c < CANDIDATES; c++) {
    const at = i * CANDIDATES + c;
    const id = next.candidate_ids[at];
    const adds = hasDirect() ? directEffect(partOfHead.get(state.head), i, c) : undefined;
    found.set(id, { id, probability: next.candidates[at], ablated: head.ablated_candidates?.[at], adds });
  }
  if (head.ablated_top) {
    const width = head.ablated_top.length / T;
    for (let at = i * width; at < (i + 1) * width; at++) {
      const id = head.ablated_top_ids[at];
      if (!found.has(id)) found.set(id, { id, probability: null, ablated: head.ablated_top[at] });
    }
  }
  return [...found.values()];
}

function predictionRow(i, { id, probability, ablated, adds }) {
  const bar = (p, className) => {
    const fill = span(`fill ${className}`);
    fill.style.width = `${100 * p}%`;
    return fill;
  };
  const comesNext = i < T - 1 && id === facts.tokens[i + 1];
  const isKnown = probability !== null;
  const hasAblated = ablated !== undefined;
  const bars = [isKnown ? bar(probability, "") : null, hasAblated ? bar(ablated, "off") : null];
  const cells = [
    cell(tokenLabel(textOf(id)), comesNext ? span("happens", " comes next") : null),
    newElement("td", { class: "track" }, bars),
    numberCell(isKnown ? formatPercent(probability) : span("muted", "not in top 10")),
  ];
  if (hasAblated) {
    const change = 100 * (ablated - probability);
    const text = `${change >= 0 ? "+" : "−"}${Math.abs(change).toFixed(2)}`;
    cells.push(numberCell(formatPercent(ablated)), newElement("td", { class: "n muted" }, isKnown ? text : ""));
  }
  if (hasDirect()) cells.push(adds === undefined ? cell() : addsCell(adds));
  return newElement("tr", { "data-token": id }, cells);
}

function writeEffects(i) {
  byId("effects-box").hidden = !effects;
  if (!effects) return;
  const target = i * CANDIDATES + CANDIDATES - 1;
  const probability = next.candidates[target];
  const kind = i === T - 1 ? "the most likely next token" : "the token that comes next";
  byId("effects-lead").replaceChildren(
    "The probability of ",
    tokenLabel(textOf(next.candidate_ids[target])),
    `, ${kind}, with one head ablated. The table shows the largest decreases and the largest increase. With all heads the probability is ${formatPercent(probability)}.`,
  );
  const all = fullHeads.map((n, index) => ({ n, ablated: effects[index * T + i] }));
  all.sort((one, other) => one.ablated - other.ablated);
  const shown = all.slice(0, SHOWN_EFFECTS);
  if (all.length > SHOWN_EFFECTS) shown.push(all.at(-1));
  const rows = shown.map((effect) => effectRow(effect, probability));
  fillTable(byId("effects"), ["ablated head", "#probability", "#factor"], rows);
}

function effectRow({ n, ablated }, probability) {
  const names = namesOf(n).map((name) => name.title);
  const button = newButton(() => select({ head: n }), labelOf(n));
  const factor =
    ablated > probability
      ? `× ${formatNumber(ablated / probability, 3)}`
      : `÷ ${formatNumber(probability / Math.max(ablated, 1e-38), 3)}`;
  return row(
    cell(button, " ", span("muted small", names.join(", "))),
    numberCell(formatPercent(ablated)),
    numberCell(factor),
  );
}
