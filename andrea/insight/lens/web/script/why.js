// Section 4: why a query looked at a key: the score as a sum over pairs of what was written into the two residual streams.

const direct = facts.layouts.direct ? unpack("direct", facts.layouts.direct) : null; // of each part, on the candidates' logits
const FULL_SHARE = 32767; // the stored share of the largest number of a list

function writeWhy() {
  const head = openHead(state.head);
  byId("why-note").replaceChildren(...whyNote(head));
  const at = head.pair_keys ? placeOfPairs(head, state.i, state.j) : -1;
  byId("why-table").hidden = at < 0;
  if (at < 0) return;
  const pairs = pairsAt(head, at);
  const largest = Math.abs(pairs[0]?.adds ?? 1);
  fillTable(
    byId("why-pairs"),
    ["#adds", "", "what the query reads", "what the key offers"],
    [...pairs.map((pair) => pairRow(pair, largest)), ...remainderRows(head, at, pairs)],
  );
}

// Why there is no table, or which cell it is about.
function whyNote(head) {
  const { head: n, i, j } = state;
  if (!head.query) return ["This file does not hold the vectors of this head."];
  if (!facts.detail) return ["This small page holds no parts of scores. The command python -m andrea lens … writes them."];
  if (!head.pair_keys) {
    return [
      `The compatibility function ${FUNCTION_NAMES[facts.compatibility] ?? facts.compatibility} is not bilinear: `,
      "its score is no sum over pairs of parts.",
    ];
  }
  if (!isVisible(n, i, j)) return ["This query does not see this key: there is no score."];
  const cell = [`Head ${labelOf(n)}: `, ...queryAndKey(i, j, "query ", "key "), "."];
  if (placeOfPairs(head, i, j) >= 0) return cell;
  const keys = storedKeys(head, i).map((key) => newButton(() => select({ i, j: key }), `${key} `, tokenLabel(tokenText(key))));
  return [...cell, " The file holds the parts of each query's largest weights only. Here these are the keys ", ...keys];
}

function storedKeys(head, i) {
  const count = head.pair_keys.length / T;
  return Array.from(head.pair_keys.subarray(i * count, (i + 1) * count)).filter((j) => isVisible(state.head, i, j));
}

// The place of a cell among those whose pairs are in the file, or -1.
function placeOfPairs(head, i, j) {
  const count = head.pair_keys.length / T;
  const place = head.pair_keys.subarray(i * count, (i + 1) * count).indexOf(j);
  return place < 0 || !isVisible(state.head, i, j) ? -1 : i * count + place;
}

// {query, key, adds} of the largest pairs of a cell. query, key: a row of the residual stream, as {part, distance}.
function pairsAt(head, at) {
  const count = head.pair_shares.length / head.pair_largest.length;
  const sourceOf = (row) => ({ part: facts.parts[Math.floor(row / facts.mixed)], distance: row % facts.mixed });
  const pairs = Array.from({ length: count }, (_, index) => {
    const place = at * count + index;
    const adds = (head.pair_largest[at] * head.pair_shares[place]) / FULL_SHARE;
    return { query: sourceOf(head.pair_rows[2 * place]), key: sourceOf(head.pair_rows[2 * place + 1]), adds };
  });
  return pairs.filter(({ adds }) => adds !== 0);
}

function pairRow({ query, key, adds }, largest) {
  return row(addsCell(adds), barCell(adds / largest), cell(sourceLabel(query, state.i)), cell(sourceLabel(key, state.j)));
}

function addsCell(adds) {
  return numberCell(`${adds > 0 ? "+" : ""}${formatNumber(adds, 4)}`);
}

function barCell(share) {
  const fill = span(`fill ${share < 0 ? "off" : ""}`);
  fill.style.width = `${100 * Math.min(1, Math.abs(share))}%`;
  return newElement("td", { class: "track" }, fill);
}

// A part of the residual stream at `position`, or of that so many tokens before it.
function sourceLabel({ part: [kind, layer, index], distance }, position) {
  const at = position - distance;
  const token = (place) => tokenLabel(place < 0 ? "∅" : tokenText(place));
  const saysWhere = ["token", "pair", "position"].includes(kind);
  const before = distance ? [span("muted small", `, ${distance} before${saysWhere ? "" : ", at "}`), saysWhere ? null : token(at)] : null;
  const n = layer * H + index;
  const names = namesOf(n).map((name) => name.title);
  switch (kind) {
    case "token":
      return ["token ", token(at), before];
    case "pair":
      return ["token pair ", token(at - 1), token(at), before];
    case "position":
      return [`position ${at}`, before];
    case "mlp":
      return [`MLP ${layer}`, before];
    default:
      return [
        newButton(() => select({ head: n, i: Math.max(0, at) }), `head ${labelOf(n)}`),
        names.length ? span("muted small", ` ${names.join(", ")}`) : null,
        before,
      ];
  }
}

// What is left of the score after its largest pairs, and what comes after the sum.
function remainderRows(head, at, pairs) {
  const { head: n, i, j } = state;
  const sum = compatibilityOf(head, n, i, j);
  const biases = head.pair_biases[at];
  const rest = sum - biases - pairs.reduce((total, { adds }) => total + adds, 0);
  const rows = [remainderRow("all other pairs together", rest)];
  if (biases !== 0) rows.push(remainderRow("pairs with a bias in them", biases));
  const [capped, score] = [cappedScore(sum), scoreOf(head, n, i, j)];
  if (facts.softcap !== null) rows.push(remainderRow("the soft cap on the sum", capped - sum));
  if (facts.slopes !== null) rows.push(remainderRow("ALiBi, for the distance", score - capped));
  return [...rows, remainderRow("the score, as in section 3", score, "why-score")];
}

// A row without a bar. id: of the number in the last row, the sum.
function remainderRow(title, adds, id) {
  const number = id ? newElement("td", { class: "n", id }, formatNumber(adds, 5)) : addsCell(adds);
  return newElement("tr", { class: id ? "sum" : "total" }, number, cell(), newElement("td", { colspan: 2 }, title));
}

// What a part adds to the logit of candidate c after token i, directly. part: its place in facts.parts.
function directEffect(part, i, c) {
  const width = facts.parts.length + 1; // the last are the biases
  const at = i * CANDIDATES + c;
  return (direct.direct_largest[at] * direct.direct_shares[at * width + part]) / FULL_SHARE;
}

const partOfHead = new Map(facts.parts.flatMap(([kind, layer, head], part) => (kind === "head" ? [[layer * H + head, part]] : [])));

function hasDirect() {
  return direct !== null;
}

const SHOWN_PARTS = 8;

// The parts that add most to the logit of the token that comes next.
function writeDirect(i) {
  byId("direct-box").hidden = !hasDirect();
  if (!hasDirect()) return;
  const c = CANDIDATES - 1;
  byId("direct-title").replaceChildren("What adds to the logit of ", tokenLabel(textOf(next.candidate_ids[i * CANDIDATES + c])));
  const parts = facts.parts.map((part, place) => ({ part, adds: directEffect(place, i, c) }));
  const bySize = [...parts].sort((one, other) => Math.abs(other.adds) - Math.abs(one.adds));
  const [shown, rest] = [bySize.slice(0, SHOWN_PARTS), bySize.slice(SHOWN_PARTS)];
  const sum = (list) => list.reduce((total, { adds }) => total + adds, 0);
  const biases = directEffect(parts.length, i, c);
  const rows = shown.map(({ part, adds }) =>
    row(addsCell(adds), barCell(adds / Math.abs(shown[0].adds || 1)), cell(sourceLabel({ part, distance: 0 }, i))),
  );
  if (rest.length) rows.push(remainderRow(`the other ${rest.length} parts`, sum(rest)));
  if (biases !== 0) rows.push(remainderRow("biases", biases));
  rows.push(remainderRow(facts.logit_softcap ? `the logit, before its cap at ${facts.logit_softcap}` : "the logit", sum(parts) + biases, "direct-sum"));
  fillTable(byId("direct"), ["#adds", "", "part"], rows);
}
