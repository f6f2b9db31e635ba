// The rest of the page: legend, tables, lines of text; and what starts everything.

// The legend: a button for each run, which hides or shows it.
function fillLegend() {
  byId("runs").replaceChildren(
    ...data.runs.map((run, index) => {
      const button = newElement("button", { type: "button", "aria-pressed": String(!hidden.has(index)) });
      button.append(newSample(run), newElement("span", {}, `${run.name} · ${run.size}`));
      button.addEventListener("click", () => {
        hidden.has(index) ? hidden.delete(index) : hidden.add(index);
        button.setAttribute("aria-pressed", String(!hidden.has(index)));
        drawAll();
      });
      const item = newElement("li");
      item.append(button);
      return item;
    }),
  );
}

// A short piece of the run's line.
function newSample(run) {
  const sample = newShape("svg", { width: 34, height: 14, "aria-hidden": "true" });
  const style = { stroke: colourOf(run), "stroke-width": 2.2, "stroke-dasharray": run.dash };
  sample.append(newShape("line", { x1: 1, x2: 33, y1: 7, y2: 7, ...style }));
  sample.append(newMarker(run.marker, 17, 7, 4, colourOf(run)));
  return sample;
}

// heads: [title, unit] of each column; rows: texts, the first the row's name.
function fillTable(table, heads, rows) {
  const [head, headRow, body] = [newElement("thead"), newElement("tr"), newElement("tbody")];
  for (const [title, unit] of heads) {
    const cell = newElement("th", { scope: "col" }, title);
    if (unit) cell.append(newElement("small", {}, unit));
    headRow.append(cell);
  }
  for (const [name, ...figures] of rows) {
    const row = newElement("tr");
    row.append(newElement("th", { scope: "row" }, name), ...figures.map((figure) => newElement("td", {}, figure)));
    body.append(row);
  }
  head.append(headRow);
  table.replaceChildren(head, body);
}

function paragraphs(lines, attributes = {}) {
  return lines.map((line) => newElement("p", attributes, line));
}

function fillDifferences() {
  if (!data.differences.length) return byId("differences").append(...paragraphs(["None."], { class: "soft" }));
  const breakable = (key) => key.replace(/[._]/g, "$&\u200b"); // allows a line break after each dot and underscore
  const box = newElement("div", { class: "scroll" });
  const table = newElement("table");
  const heads = [["key"], ...data.runs.map((run) => [run.name])];
  fillTable(table, heads, data.differences.map(([key, ...values]) => [breakable(key), ...values]));
  box.append(table);
  byId("differences").append(box);
}

function drawAll() {
  drawChart();
  drawBirths();
}

byId("title").textContent = data.title;
document.title = `ANDREA: ${data.title}`;
byId("summary").textContent = data.summary;
byId("warnings").append(...paragraphs(data.warnings, { class: "warning" }), ...paragraphs(data.notes, { class: "soft" }));
fillTable(byId("figures"), data.heads, data.rows);
byId("scaling").append(...paragraphs(data.scaling));
fillDifferences();
fillLegend();
fillBirths();
drawAll();
fillOneRun();

for (const input of document.querySelectorAll(".switches input")) input.addEventListener("change", drawAll);
byId("chart").addEventListener("pointermove", selectNearest);
byId("chart").addEventListener("pointerdown", selectNearest);
byId("chart").addEventListener("pointerleave", unselect);
byId("chart").addEventListener("keydown", moveSelection);
addEventListener("resize", unselect); // the tip would stay where it was, outside a narrower window
darkTheme.addEventListener("change", () => {
  fillLegend();
  drawAll();
});
new ResizeObserver(drawAll).observe(byId("frame"));
