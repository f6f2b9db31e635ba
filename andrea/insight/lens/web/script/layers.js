// Section 7: the logit lens, a table of stages (rows) and positions (columns).

const stages = facts.layouts.stages ? unpack("stages", facts.layouts.stages) : null; // stages, stage_ids: (2 L + 1, T)
const MOST_COLUMNS = 64; // positions drawn at once
const columns = { start: 0, count: Math.min(T, MOST_COLUMNS) };

function writeLayers() {
  byId("layers").hidden = byId("layers-link").hidden = !stages;
  if (!stages) return;
  columns.start = Math.max(0, Math.min(T - columns.count, state.i - columns.count / 2));
  const rows = Array.from({ length: 2 * L + 1 }, (_, stage) =>
    gridRow(stageTitle(stage), (i) => stageCell(stage, i)),
  );
  fillGrid("layers-grid", rows);
}

function stageTitle(stage) {
  if (stage === 0) return "embedding";
  const layer = Math.floor((stage - 1) / 2);
  return stage % 2 ? `+ attention ${layer}` : `+ MLP ${layer}`;
}

function stageCell(stage, i) {
  const [id, probability] = [stages.stage_ids[stage * T + i], stages.stages[stage * T + i]];
  const last = stages.stage_ids[2 * L * T + i];
  const name = id === last ? "is-last" : null;
  return shadedCell(probability, { class: name, onclick: () => select({ i }) }, span("tok-text", textOf(id)), formatPercent(probability));
}

// ------------------------------------------------------------------------------------------- tables with shaded cells

// A row with a cell for each position that is drawn. cellAt: position -> td.
function gridRow(title, cellAt) {
  const cells = Array.from({ length: columns.count }, (_, column) => cellAt(columns.start + column));
  return row(newElement("th", { scope: "row" }, title), cells);
}

// The table of such rows, under the prompt's tokens, with the selected query's column in view.
function fillGrid(id, rows) {
  const head = gridRow("", (i) => {
    const attributes = { scope: "col", class: i === state.i ? "query" : null };
    return newElement("th", attributes, line(i), span("tok-text", tokenText(i)));
  });
  byId(id).replaceChildren(newElement("thead", {}, head), newElement("tbody", {}, rows));
  const box = byId(id).parentElement;
  const column = byId(id).querySelector("th.query");
  if (column) box.scrollLeft = column.offsetLeft - 0.5 * box.clientWidth;
}

// A cell shaded from 0 to 1; below 0 in the colour of what works against.
function shadedCell(share, attributes, ...children) {
  const colour = shadeAt(Math.abs(share));
  const cellOf = newElement("td", attributes, children);
  cellOf.style.background = share < 0 ? `color-mix(in srgb, var(--off) ${Math.round(100 * Math.min(1, -share))}%, transparent)` : cssColour(colour);
  if (share >= 0) cellOf.style.color = isDark(colour) ? "#fff" : "#16181a";
  return cellOf;
}
