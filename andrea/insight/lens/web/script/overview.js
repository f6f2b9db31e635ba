// Section 1: a small map of each head, and the names of heads.

const SORTS = [
  ["layer", "layer and head"],
  ["entropy_share", "entropy (lowest first)"],
  ...facts.names.map((name) => [name.score, name.title]),
  ...(facts.detail ? [["loss_change", "loss change when ablated"]] : []),
  ...(facts.other ? [["distance", "change from the other checkpoint"]] : []),
  ...(gates ? [["gate", "mean gate (lowest first)"]] : []),
];

const cards = facts.heads.map((_, n) => newCard(n));

function newCard(n) {
  const score = (name) => facts.heads[n].probe[name.score].toFixed(2);
  const breakable = (title) => title.replace("/", "/\u200b"); // allows a line break after the slash
  const badges = namesOf(n).map((name) => span("badge", `${breakable(name.title)} `, newElement("i", {}, score(name))));
  const spoken = namesOf(n).map((name) => `${name.title}, score ${score(name)}, threshold ${name.threshold}`);
  const value = newElement("span");
  const canvas = newElement("canvas", { "aria-hidden": "true" });
  const attributes = {
    type: "button",
    class: "card",
    "data-head": labelOf(n),
    title: spoken.join("; ") || null,
    "aria-label": [`head ${labelOf(n)}`, ...spoken].join(", "),
    onclick: () => showHead(n),
  };
  const label = span("id", newElement("b", {}, labelOf(n)), value);
  const button = newElement("button", attributes, canvas, label, badges);
  return { n, button, canvas, value };
}

function showHead(n) {
  select({ head: n });
  byId("head").scrollIntoView();
}

function drawSmallMap(canvas, n) {
  canvas.width = canvas.height = SIDE;
  const context = canvas.getContext("2d");
  const image = context.createImageData(SIDE, SIDE);
  for (let c = 0; c < SIDE * SIDE; c++) image.data.set([...shades[maps[n * SIDE * SIDE + c]], 255], 4 * c);
  context.putImageData(image, 0, 0);
}

function drawSmallMaps() {
  for (const { n, canvas } of cards) drawSmallMap(canvas, n);
}

// The number by which a head is sorted and that its card shows.
function sortValue(n) {
  const head = facts.heads[n];
  if (state.sort === "loss_change") return head.loss_change;
  if (state.sort === "distance") return facts.other.heads[n].distance;
  if (state.sort === "gate") return meanGate(n);
  return state.sort === "entropy_share" ? head.prompt.entropy_share : head.probe[state.sort];
}

function passesFilter(n) {
  const words = state.filter
    .toLowerCase()
    .split(/[\s,]+/)
    .filter(Boolean);
  const matches = (word) => {
    if (/^[\d.]+$/.test(word)) return labelOf(n).startsWith(word);
    return (word === "named" && namesOf(n).length > 0) || namesOf(n).some((name) => name.title.includes(word));
  };
  return !words.length || words.some(matches);
}

function drawOverview() {
  const shown = cards.filter(({ n }) => passesFilter(n));
  const byLayer = state.sort === "layer";
  for (const { n, value } of cards) value.textContent = byLayer ? "" : formatScore(sortValue(n), 2);
  if (!byLayer) {
    const sign = ["entropy_share", "gate"].includes(state.sort) ? -1 : 1;
    const key = ({ n }) => sign * (sortValue(n) ?? -Infinity);
    shown.sort((one, other) => key(other) - key(one) || one.n - other.n);
  }
  const layers = Array.from({ length: L }, (_, layer) => shown.filter(({ n }) => layerOf(n) === layer));
  const groups = byLayer ? layers.map((members, layer) => [`layer ${layer}`, members]) : [[null, shown]];
  byId("maps").replaceChildren(
    ...groups.filter(([, members]) => members.length).map(([title, members]) => newGroup(title, members)),
  );
  const count = shown.length === cards.length ? "" : `${shown.length} of `;
  byId("count").textContent = `${count}${cards.length} heads`;
}

function newGroup(title, members) {
  const buttons = members.map(({ button }) => button);
  const heading = title && newElement("p", {}, title);
  return newElement("div", { class: "layer" }, heading, newElement("div", { class: "cards" }, buttons));
}

// Arrow keys move the focus between cards, up and down to the nearest card of another line.
function moveInOverview(event) {
  const all = [...byId("maps").querySelectorAll(".card")];
  const at = all.indexOf(document.activeElement);
  if (!["ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp"].includes(event.key) || at < 0) return;
  event.preventDefault();
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const target = step ? all[at + step] : nearestInOtherLine(all, all[at], event.key === "ArrowDown" ? 1 : -1);
  target?.focus();
}

function nearestInOtherLine(all, card, direction) {
  const here = card.getBoundingClientRect();
  const distance = (other) => {
    const box = other.getBoundingClientRect();
    return 1000 * Math.abs(box.top - here.top) + Math.abs(box.left - here.left);
  };
  const beyond = all.filter((other) => direction * (other.getBoundingClientRect().top - here.top) > 4);
  return beyond.sort((one, other) => distance(one) - distance(other))[0];
}

function writeNames() {
  const rows = facts.names.map((name) => {
    const score = (n) => facts.heads[n].probe[name.score];
    const byScore = facts.heads.map((_, n) => n).sort((one, other) => (score(other) ?? -1) - (score(one) ?? -1));
    const named = byScore.filter((n) => namesOf(n).includes(name));
    const chips = named.map((n) =>
      newButton(() => showHead(n), `${labelOf(n)} `, span("muted num", formatScore(score(n)))),
    );
    const best = byScore[0];
    const none = isPresent(score(best))
      ? `none; the highest score is ${formatScore(score(best))}, of head ${labelOf(best)}`
      : "not measurable at this sequence length";
    return row(
      cell(newElement("b", {}, name.title)),
      cell(name.meaning),
      cell(name.probe === "repeat" ? "shuffled tokens, repeated" : "passage"),
      numberCell(`≥ ${name.threshold.toFixed(2)}`),
      cell(chips.length ? chips : span("muted", none)),
    );
  });
  fillTable(
    byId("names"),
    ["name", "what the head does", "measured on", "#threshold", "heads with their scores"],
    rows,
  );
}
