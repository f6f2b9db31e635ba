// Section 3: the arithmetic of one attention weight, from the query and the key to the residual stream.

const SHOWN_PRODUCTS = 4; // of a dot product

function writeCell() {
  const head = openHead(state.head);
  byId("query-choice").value = state.i;
  byId("key-choice").value = state.j;
  if (!head.query) {
    const label = labelOf(state.head);
    byId("cell-note").textContent =
      `This file does not hold the vectors of head ${label}. This command writes a file that holds them: python -m andrea lens heads=${label} …`;
    return byId("steps").replaceChildren();
  }
  writeCellNote();
  const steps = [...scoreSteps(head), ...modifierSteps(head), ...weightSteps(head), ...outputSteps(head)];
  byId("steps").replaceChildren(...steps.map(newStep));
  if (head.key_logits) byId("steps").append(attributionNote());
}

function writeCellNote() {
  const { head: n, i, j } = state;
  const changes = [];
  if (facts.qk_norm) {
    const weighted = facts.qk_norm === "learned" ? ", then each channel times a learned weight" : "";
    changes.push(`QK-norm (scaled to a root mean square of 1${weighted})`);
  }
  if (facts.compatibility === "Bilinear") changes.push("the matrix M");
  const turned = facts.rotary_share < 1 ? ` of ${Math.round(100 * facts.rotary_share)} % of the channels` : "";
  if (facts.position === "rotary") changes.push(`rotary position embedding${turned}`);
  const hasNote = changes.length && facts.compatibility !== "Additive";
  const note = ` Query and key are shown after ${changes.join(" and ")}, just before their product is taken.`;
  const query = [`Head ${labelOf(n)}, query `, tokenLabel(tokenText(i)), ` at ${i}, key `];
  byId("cell-note").replaceChildren(...query, tokenLabel(tokenText(j)), ` at ${j}.`, hasNote ? note : "");
}

// A step: what is done (title), why or how (detail), with which numbers (formula: lines), and the result with its unit.
function newStep({ title, detail, formula, result, unit, id }) {
  const number = [newElement("span", { id }, formatNumber(result)), unit && newElement("small", {}, unit)];
  return newElement(
    "li",
    {},
    newElement("div", { class: "what" }, title, newElement("small", {}, detail)),
    newElement("div", { class: "formula" }, formula),
    newElement("div", { class: "result num" }, number),
  );
}

// Row `at` of a matrix with rows of that many numbers.
function rowOf(matrix, at, width) {
  return Array.from(matrix.subarray(at * width, (at + 1) * width));
}

// The numbers in the file of a vector at a position.
function shownNumbers(matrix, at) {
  return rowOf(matrix, at, matrix.length / T);
}

function isCut(width) {
  return width > SHOWN_NUMBERS;
}

// 'a1 × b1 + a2 × b2 + (60 more terms: rest)'. pairs: the first of a dot product. total: the sum over all pairs.
function sumOfProducts(pairs, total) {
  const shown = pairs.slice(0, SHOWN_PRODUCTS);
  const rest = total - shown.reduce((sum, [a, b]) => sum + a * b, 0);
  const factor = (x) => (x < 0 ? `(${formatNumber(x, 4)})` : formatNumber(x, 4));
  const term = ([a, b], index) => {
    const sign = index === 0 ? (a < 0 ? "−" : "") : a < 0 ? " − " : " + ";
    return `${sign}${formatNumber(Math.abs(a), 4)} × ${factor(b)}`;
  };
  const more = facts.score_width - SHOWN_PRODUCTS;
  return shown.map(term).join("") + (more > 0 ? ` + (${more} more terms: ${formatNumber(rest)})` : "");
}

// ---------------------------------------------------------------------------------------------------------- score

// From the vectors to the score. The query in the file holds every factor of the score; it is divided out where a step
// of its own shows it.
function scoreSteps(head) {
  if (state.j > state.i) return []; // a later key: no score is computed
  const steps = scoreStepsOf(head);
  const shares = facts.convolution && facts.convolution[layerOf(state.head)][state.head % H];
  if (shares) steps[0].formula.push(line(mixtureText("q", shares.query), "; ", mixtureText("k", shares.key)));
  return steps;
}

// The weights of a convolution over tokens: 'k mixes its own token (57 %), 1 before (30 %), 2 before (13 %)'.
function mixtureText(name, shares) {
  const places = shares.map((share, distance) => `${distance ? `${distance} before` : "its own token"} (${Math.round(100 * share)} %)`);
  return `${name} mixes ${places.join(", ")}`;
}

function scoreStepsOf(head) {
  const { head: n, i, j } = state;
  const [query, key] = [shownNumbers(head.query, i), shownNumbers(head.key, j)];
  const score = compatibilityOf(head, n, i, j);
  switch (facts.compatibility) {
    case "ScaledDotProduct":
      return scaledDotProductSteps(query, key, score);
    case "DotProduct": {
      const detail = "how well the key matches the query; not scaled";
      return [productStep("query · key", detail, ["q", "k", "q·k"], query, key, score)];
    }
    case "Bilinear": {
      const detail = "a learned matrix M between query and key, which also sets the scale";
      return [productStep("qᵀ M k", detail, ["Mᵀq", "k", "(Mᵀq)·k"], query, key, score)];
    }
    case "Cosine":
      return cosineSteps(query, key, score, facts.sharpness[layerOf(n)][n % H]);
    case "Additive":
      return [additiveStep(query, key, score, facts.mixing[layerOf(n)][n % H])];
    default: {
      if (!facts.lowers) {
        const formula = [`score = ${formatNumber(score)}`];
        return [{ title: `${facts.compatibility}(q, k)`, detail: "the model's own function", formula, result: score }];
      }
      const detail = "query and key as the model's own compatibility function has transformed them";
      return [productStep("query · key", detail, ["q", "k", "q·k"], query, key, score)];
    }
  }
}

// names: of the two vectors and of their product.
function productStep(title, detail, names, query, key, result) {
  const pairs = query.map((x, c) => [x, key[c]]);
  const formula = [
    line(`${names[0]} = `, formatVector(query, isCut(facts.score_width))),
    line(`${names[1]} = `, formatVector(key, isCut(facts.score_width))),
    line(`${names[2]} = ${sumOfProducts(pairs, result)}`),
  ];
  return { title, detail, formula, result };
}

function scaledDotProductSteps(query, key, score) {
  const root = Math.sqrt(D);
  const product = score * root;
  const unscaled = query.map((x) => x * root);
  return [
    productStep("query · key", "how well the key matches the query", ["q", "k", "q·k"], unscaled, key, product),
    {
      title: ["÷ √d", sub("k")],
      detail: "keeps scores from growing with the head's width",
      formula: [`q·k / √${D} = ${formatNumber(product)} / ${formatNumber(root)}`],
      result: score,
    },
  ];
}

function cosineSteps(query, key, score, sharpness) {
  const cosine = score / sharpness;
  const unit = query.map((x) => x / sharpness);
  const detail = "both vectors have norm 1, so only their directions matter";
  return [
    productStep("cos(query, key)", detail, ["q/|q|", "k/|k|", "cos"], unit, key, cosine),
    {
      title: "× sharpness",
      detail: "a factor s that this head has learned",
      formula: [`s · cos = ${formatNumber(sharpness)} × ${formatNumber(cosine)}`],
      result: score,
    },
  ];
}

function additiveStep(query, key, score, mixing) {
  const pairs = query.map((x, c) => [mixing[c], Math.tanh(x + key[c])]);
  const formula = [
    line("A q = ", formatVector(query, isCut(facts.score_width))),
    line("B k = ", formatVector(key, isCut(facts.score_width))),
    line(`score = ${sumOfProducts(pairs, score)}`),
  ];
  return { title: "w · tanh(A q + B k)", detail: "a network with one hidden layer", formula, result: score };
}

// The soft cap and ALiBi, where the model has them.
function modifierSteps(head) {
  const { head: n, i, j } = state;
  if (j > i) return [];
  const score = compatibilityOf(head, n, i, j);
  const [capped, cap] = [cappedScore(score), facts.softcap];
  const steps = [];
  if (cap !== null) {
    steps.push({
      title: "soft cap",
      detail: `keeps scores between −${cap} and ${cap}`,
      formula: [`${cap} · tanh(${formatNumber(score)} / ${cap})`],
      result: capped,
    });
  }
  if (facts.slopes !== null) {
    const slope = facts.slopes[n % H];
    steps.push({
      title: "ALiBi",
      detail: "the score falls with the distance, in each head at its own rate",
      formula: [`${formatNumber(capped)} − ${formatNumber(slope)} × |${i} − ${j}|`],
      result: capped - slope * Math.abs(i - j),
    });
  }
  return steps;
}

// --------------------------------------------------------------------------------------------------------- weight

// From the score to the weight.
function weightSteps(head) {
  const { head: n, i, j } = state;
  const softmax = softmaxRow(head, n, i);
  const masked = isVisible(n, i, j) ? scoreOf(head, n, i, j) : -Infinity;
  const exponential = softmax.exponentials[j];
  const largest = formatNumber(softmax.largest);
  const exponent = `${formatNumber(masked)} − ${softmax.largest < 0 ? `(${largest})` : largest}`;
  const first = softmax.keys[0];
  return [
    {
      title: "mask",
      detail: first > 0 ? `query ${i} sees keys ${first} to ${i}` : "a query sees itself and earlier tokens",
      formula: [maskText(n, i, j)],
      result: masked,
      id: "cell-masked",
    },
    {
      title: "exponentiate",
      detail: "the row's largest score is subtracted to prevent overflow",
      formula: [
        `e^(score − largest) = e^(${exponent})`,
        line(`largest at key ${softmax.largestKey} `, tokenLabel(tokenText(softmax.largestKey))),
      ],
      result: exponential,
    },
    {
      title: "normalise",
      detail: hasSink()
        ? `divide by the row's sum; the sink, with the logit ${formatNumber(sinkOf(n))}, takes part in it`
        : "divide by the row's sum, so that the row's weights sum to 1",
      formula: [
        `${formatNumber(exponential)} / ${formatNumber(softmax.sum)}`,
        line(`the row's sum over ${softmax.keys.length} visible keys${hasSink() ? " and the sink" : ""}`),
      ],
      result: exponential / softmax.sum,
      unit: "the weight",
      id: "cell-weight",
    },
  ];
}

function maskText(n, i, j) {
  if (isVisible(n, i, j)) return `key ${j} ≤ query ${i}: visible, the score is kept`;
  return j > i
    ? `key ${j} > query ${i}: later than the query, the score becomes −∞`
    : `key ${j} is too far back for query ${i}: the score becomes −∞`;
}

// --------------------------------------------------------------------------------------------------------- output

// From the weight to what the head adds to the residual stream.
function outputSteps(head) {
  const { head: n, i, j } = state;
  const softmax = softmaxRow(head, n, i);
  const weight = softmax.exponentials[j] / softmax.sum;
  const [valueNorm, ...value] = shownNumbers(head.value, j);
  const z = weightedSum(head, softmax);
  const width = facts.components + 1; // of a row of key_write and query_write: the norm, then the first numbers
  const [keyNorm, ...keyWrite] = rowOf(head.key_write, j, width);
  const [queryNorm, ...queryWrite] = rowOf(head.query_write, i, width);
  const weighted = (numbers) => numbers.map((x) => weight * x);
  return [
    {
      title: "× value",
      detail: "the key's value vector times the weight",
      formula: [line("v = ", formatVector(value, isCut(D))), ...valueOrigin(head), line("weight · v = ", formatVector(weighted(value), isCut(D)))],
      result: weight * valueNorm,
      unit: "norm",
    },
    {
      title: ["× W", sub("O")],
      detail: `what this key adds to the residual stream${whenOfKey(head)}`,
      formula: [
        line("weight · W", sub("O"), " v = ", formatVector(weighted(keyWrite), true)),
        head.key_logits && isVisible(n, i, j) ? attributionLine(head.key_logits_ids, head.key_logits, j, weight) : null,
      ],
      result: weight * keyNorm,
      unit: "norm",
    },
    {
      title: "sum over all keys",
      detail: "what the head adds at this query",
      formula: [
        line("z = Σ weight · v = ", formatVector(z, isCut(D))),
        facts.own_shares ? exclusionLine(head, z) : null,
        head.gate ? gateLine(head, i, excluded(head, z)) : null,
        line("W", sub("O"), " z = ", formatVector(queryWrite, true)),
        head.query_logits ? attributionLine(head.query_logits_ids, head.query_logits, i, 1) : null,
      ],
      result: queryNorm,
      unit: "norm",
    },
  ];
}

// What the key's value is made of: the norms of its parts, and the tokens that a convolution then mixes.
function valueOrigin(head) {
  const { head: n, j } = state;
  const lines = [];
  if (head.value_parts) {
    const names = facts.value_parts;
    const norms = rowOf(head.value_parts, j, names.length);
    lines.push(line("v = ", names.map((name, part) => `${name} (norm ${formatNumber(norms[part], 3)})`).join(" + ")));
  }
  const shares = facts.convolution && facts.convolution[layerOf(n)][n % H];
  if (shares) lines.push(line(mixtureText(lines.length ? "then v" : "v", shares.value)));
  return lines;
}

// Between z and W_O: the words that say which steps the vector of a single key is shown without.
function whenOfKey(head) {
  const later = [facts.own_shares && "exclusion", head.gate && "the gate"].filter(Boolean);
  return later.length ? `, before ${later.join(" and ")}` : "";
}

// Exclusive attention: the first numbers of z, without a share of its component along the query's own value.
function excluded(head, z) {
  if (!facts.own_shares) return z;
  const { head: n, i } = state;
  const [along] = rowOf(head.own_value, i, 2);
  const [, ...own] = shownNumbers(head.value, i);
  return z.map((x, c) => x - facts.own_shares[layerOf(n)][n % H] * along * own[c]);
}

function exclusionLine(head, z) {
  const { head: n, i } = state;
  const cosine = rowOf(head.own_value, i, 2)[1];
  return [
    line(`cosine of z and the own value of query ${i}: ${formatNumber(cosine, 3)}; share removed: `, shareOf(n)),
    line("z ← z − share · (z·v / v·v) v = ", formatVector(excluded(head, z), isCut(D))),
  ];
}

function shareOf(n) {
  return newElement("b", { class: "num" }, formatNumber(facts.own_shares[layerOf(n)][n % H], 4));
}

// The head's gate at query i times z: one number for the head, or one for each channel.
function gateLine(head, i, z) {
  const gate = rowOf(head.gate, i, head.gate.length / T);
  const shown = gate.length === 1 ? newElement("b", { class: "num" }, formatNumber(gate[0])) : formatVector(gate, isCut(D));
  const gated = z.map((x, c) => x * gate[c % gate.length]);
  return line("gate = 2·sigmoid(w·x) = ", shown, "; z ← gate · z = ", formatVector(gated, isCut(D)));
}

// The first numbers of z.
function weightedSum(head, softmax) {
  const z = shownNumbers(head.value, 0).slice(1).fill(0);
  for (const j of softmax.keys) {
    const weight = softmax.exponentials[j] / softmax.sum;
    const [, ...value] = shownNumbers(head.value, j);
    value.forEach((x, c) => (z[c] += weight * x));
  }
  return z;
}

// The tokens whose logits a vector raises most, then those it lowers most. factor: of all changes.
function attributionLine(ids, changes, at, factor) {
  const width = ids.length / T;
  const half = width / 2;
  const list = (from) =>
    Array.from({ length: half }, (_, index) => {
      const place = at * width + from + index;
      const change = factor * changes[place];
      const number = ` ${change >= 0 ? "+" : ""}${formatNumber(change, 3)}`;
      return [index ? " " : "", tokenLabel(textOf(ids[place])), number];
    });
  const [up, down] = [newElement("b", {}, "up "), newElement("b", {}, "down ")];
  return newElement("div", { class: "push" }, up, list(0), " · ", down, list(half));
}

function attributionNote() {
  const text =
    "up, down: the next tokens whose logits the vector raises and lowers most. The change is the vector times the " +
    "unembedding matrix (direct logit attribution). The final norm is left out: it depends on all other heads and layers.";
  return newElement("li", {}, line(), newElement("p", { class: "muted small" }, text), line());
}
