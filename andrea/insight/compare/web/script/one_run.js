// The parts of the page of a single run: its heads over time, and the texts that it wrote.

const HEAD_FIGURES = {
  entropy_share: "entropy, share of its maximum",
  entropy_nats: "entropy, nats",
  largest_logit: "largest logit",
  first_token_mass: "weight on the first token",
  previous_token_mass: "weight on the previous token",
  ...Object.fromEntries(data.patterns.map(({ score, title }) => [`${score}_score`, `score: ${title}`])),
};
const HEAD_CELL = { width: 16, height: 15, left: 44, bottom: 34 }; // pixels

function fillOneRun() {
  for (const section of document.querySelectorAll(".several")) section.hidden = data.runs.length === 1;
  byId("samples-section").hidden = !data.samples.length;
  byId("heads-section").hidden = !data.measured_heads.length;
  byId("lenses-section").hidden = !data.lenses.length;
  byId("settings-section").hidden = !data.settings.length;
  byId("lenses").append(...data.lenses.map(lensLink));
  fillTable(byId("settings"), [["key"], ["value"]], data.settings);
  if (data.samples.length) fillSamples();
  if (data.measured_heads.length) fillHeads();
}

function lensLink(address) {
  return newElement("a", { href: address }, `step ${+address.match(/\d+/)[0]}`);
}

// The newest sample is open.
function fillSamples() {
  const earlier = data.earlier_samples ? ` ${data.earlier_samples} earlier ones are in samples.jsonl.` : "";
  byId("samples-note").textContent = `Texts that the model wrote during training, the newest first.${earlier}`;
  data.samples.forEach(({ step, prompt, text }, index) => {
    const box = newElement("details", index === 0 ? { open: "" } : {});
    const written = newElement("pre");
    written.append(newElement("b", {}, prompt), text);
    box.append(newElement("summary", {}, `step ${step}`), written);
    byId("samples").append(box);
  });
}

function fillHeads() {
  const names = Object.keys(data.measured_heads.at(-1).tables);
  const known = Object.keys(HEAD_FIGURES).filter((name) => names.includes(name));
  for (const name of [...known, ...names.filter((name) => !known.includes(name))]) {
    byId("head-figure").append(newElement("option", { value: name }, HEAD_FIGURES[name] ?? name));
  }
  byId("head-figure").addEventListener("change", drawHeads);
  drawHeads();
}

function drawHeads() {
  const name = byId("head-figure").value;
  const shown = data.measured_heads.filter((measured) => measured.tables[name]);
  const numbers = shown.flatMap((measured) => measured.tables[name].flat()).filter((number) => number !== null);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const chart = byId("heads");
  const { width, height, left, bottom } = HEAD_CELL;
  const labels = shown.at(-1).tables[name].flatMap((row, layer) => row.map((_, head) => `${layer}.${head}`));
  const size = { width: left + shown.length * width + 40, height: labels.length * height + bottom };
  chart.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
  chart.setAttribute("width", size.width);
  chart.setAttribute("height", size.height);
  chart.replaceChildren();
  byId("head-range").textContent = numbers.length ? `from ${format(low)} (pale) to ${format(high)} (strong)` : "not measurable";
  labels.forEach((label, row) => {
    chart.append(newShape("text", { x: left - 6, y: row * height + 12, "text-anchor": "end" }, label));
  });
  shown.forEach((measured, column) => {
    measured.tables[name].flat().forEach((number, row) => {
      const share = high > low ? (number - low) / (high - low) : 1;
      const place = { x: left + column * width, y: row * height, width: width - 1, height: height - 1 };
      const fill = number === null ? "none" : "var(--accent)";
      const cell = newShape("rect", { ...place, fill, "fill-opacity": 0.06 + 0.94 * share });
      const figure = number === null ? "not measured" : format(number);
      const text = `head ${labels[row]}, step ${measured.step}: ${figure}`;
      for (const event of ["pointerenter", "pointerdown"]) {
        cell.addEventListener(event, () => (byId("head-tip").textContent = text));
      }
      chart.append(cell);
    });
  });
  for (const column of new Set([0, shown.length - 1])) {
    const place = { x: left + (column + 0.5) * width, y: size.height - 14, "text-anchor": "middle" };
    chart.append(newShape("text", place, `step ${shown[column].step}`));
  }
  byId("head-tip").textContent = "";
}

function format(number) {
  return String(+number.toPrecision(3));
}
