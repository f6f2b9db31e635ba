// Selecting, and drawing all sections again; what the page listens to; and what starts it.

function select(change) {
  const isOtherHead = change.head !== undefined && change.head !== state.head;
  Object.assign(state, change, { hovered: null });
  const keepsKey = "j" in change || (change.i === undefined && !isOtherHead);
  if (!keepsKey || state.j === null) state.j = strongestKey(state.i);
  draw();
}

function draw() {
  layOutMap();
  writeSelection();
  writeHeadNote();
  writeScores();
  drawLegend();
  drawHovered();
  drawWholeMap();
  keepTokenInView();
  writeCell();
  writeWhy();
  writeReads();
  writeNext();
  writeExamples();
  writeOther();
  writeLayers();
  writeTwoPrompts();
  writeAddress();
}

// What follows the pointer.
function drawHovered() {
  drawMap();
  shadeTokens();
  writeReadout();
  writeTopKeys();
}

function hover(place) {
  if (place?.i === state.hovered?.i && place?.j === state.hovered?.j) return;
  state.hovered = place;
  drawHovered();
}

function writeSelection() {
  const label = labelOf(state.head);
  const names = namesOf(state.head).map((name) => span("muted", `, ${name.title}`));
  byId("head-name").replaceChildren(`Head ${label}`, ...names);
  byId("chosen").replaceChildren(`head ${label} · `, ...queryAndKey(state.i, state.j, "", ""));
  byId("head-choice").value = state.head;
  byId("log").checked = state.log;
  byId("hide").checked = state.hide;
  byId("gate").checked = state.gate;
  byId("written").checked = state.written;
  for (const { n, button } of cards) {
    button.setAttribute("aria-pressed", n === state.head);
    button.tabIndex = n === state.head ? 0 : -1;
  }
  const canBeReached = byId("maps").querySelector('.card[tabindex="0"]');
  if (!canBeReached) byId("maps").querySelector(".card")?.setAttribute("tabindex", "0");
}

// ------------------------------------------------------------------------------------------------------- listening

function listen() {
  listenToControls();
  listenToTokens();
  listenToMap();
  for (const link of document.querySelectorAll("nav a, a.skip")) {
    link.addEventListener("click", (event) => {
      event.preventDefault(); // the address belongs to the selection
      byId(link.hash.slice(1)).scrollIntoView();
    });
  }
  window.addEventListener("resize", draw);
  window.addEventListener("hashchange", () => {
    readAddress();
    select({ j: state.j });
  });
}

function onEvent(id, type, listener) {
  byId(id).addEventListener(type, listener);
}

function listenToControls() {
  onEvent("theme", "click", () => {
    setTheme(theme() === "dark" ? "light" : "dark");
    drawSmallMaps();
    draw();
  });
  fillChoice("sort", SORTS);
  byId("sort").value = state.sort;
  onEvent("sort", "change", (event) => {
    state.sort = event.target.value;
    drawOverview();
    draw();
  });
  onEvent("filter", "input", (event) => {
    state.filter = event.target.value;
    drawOverview();
    draw();
  });
  onEvent("maps", "keydown", moveInOverview);
  const titles = (n) => [labelOf(n), ...namesOf(n).map((name) => name.title)].join(" ");
  fillChoice(
    "head-choice",
    facts.heads.map((_, n) => [n, titles(n)]),
  );
  onEvent("head-choice", "change", (event) => select({ head: +event.target.value }));
  onEvent("head-back", "click", () => select({ head: (state.head + L * H - 1) % (L * H) }));
  onEvent("head-on", "click", () => select({ head: (state.head + 1) % (L * H) }));
  byId("gate-switch").hidden = gates === null;
  for (const name of ["log", "hide", "gate", "written"]) onEvent(name, "change", (event) => select({ [name]: event.target.checked }));
  onEvent("only-head", "change", (event) => select({ onlyHead: event.target.checked }));
  const positions = facts.tokens.map((_, i) => [i, `${i} ${tokenText(i)}`]);
  fillChoice("query-choice", positions);
  fillChoice("key-choice", positions);
  onEvent("query-choice", "change", (event) => select({ i: +event.target.value, j: state.j }));
  onEvent("key-choice", "change", (event) => select({ j: +event.target.value }));
}

function fillChoice(id, entries) {
  byId(id).append(...entries.map(([value, title]) => newElement("option", { value }, title)));
}

function listenToTokens() {
  const tokenAt = (event) => event.target.closest("[role=option]");
  onEvent("tokens", "pointerover", (event) => {
    if (event.pointerType !== "touch") hover(tokenAt(event) ? { i: +tokenAt(event).dataset.i, j: null } : null);
  });
  onEvent("tokens", "pointerleave", () => hover(null));
  onEvent("tokens", "click", (event) => tokenAt(event) && select({ i: +tokenAt(event).dataset.i }));
  onArrowKeys("tokens", () => ({
    ArrowLeft: { i: within(state.i - 1) },
    ArrowRight: { i: within(state.i + 1) },
    ArrowUp: { j: within(state.j - 1) },
    ArrowDown: { j: within(state.j + 1) },
    Home: { i: 0 },
    End: { i: T - 1 },
  }));
}

function listenToMap() {
  const cellAt = (event) => {
    if (!openHead(state.head).weights) return null;
    const box = byId("map").getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - view.left) / view.cell);
    const y = Math.floor((event.clientY - box.top - view.top) / view.cell);
    const isInside = x >= 0 && y >= 0 && x < view.count && y < view.count;
    return isInside ? { i: view.row + y, j: view.column + x } : null;
  };
  onEvent("map", "pointermove", (event) => {
    if (event.pointerType !== "touch") hover(cellAt(event));
  });
  onEvent("map", "pointerleave", () => hover(null));
  onEvent("map", "click", (event) => {
    const place = cellAt(event);
    if (place) select(place);
  });
  onArrowKeys("map", () => ({
    ArrowLeft: { j: within(state.j - 1) },
    ArrowRight: { j: within(state.j + 1) },
    ArrowUp: { i: within(state.i - 1), j: state.j },
    ArrowDown: { i: within(state.i + 1), j: state.j },
  }));
  onEvent("whole", "click", (event) => {
    const box = byId("whole").getBoundingClientRect();
    const i = within(Math.floor(((event.clientY - box.top) / box.height) * T));
    const j = within(Math.floor(((event.clientX - box.left) / box.width) * T));
    select({ i, j });
  });
}

// moves: a function that gives, for each key of the keyboard, the change to select.
function onArrowKeys(id, moves) {
  onEvent(id, "keydown", (event) => {
    const change = moves()[event.key];
    if (!change || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    select(change);
  });
}

function within(position) {
  return Math.min(T - 1, Math.max(0, position));
}

// -------------------------------------------------------------------------------------------------------- starting

const FUNCTION_NAMES = {
  ScaledDotProduct: "scaled dot product",
  DotProduct: "dot product",
  Bilinear: "bilinear",
  Cosine: "cosine",
  Additive: "additive",
};

function writeFacts() {
  const shared = facts.kv_heads === H ? "" : ` (${facts.kv_heads} for keys and values)`;
  const parts = [
    `${facts.parameters.toLocaleString("en-US")} parameters`,
    `${L} layers × ${H} heads${shared} of width ${D}`,
    FUNCTION_NAMES[facts.compatibility] ?? facts.compatibility,
    `${T} of at most ${facts.sequence_length} tokens`,
  ];
  byId("facts-line").replaceChildren(newElement("b", {}, facts.title), ...parts.map((part) => ` · ${part}`));
  byId("foot").textContent = [
    facts.checkpoint,
    `tokenizer ${facts.tokenizer}`,
    `${fullHeads.length} of ${facts.heads.length} heads in full`,
    "␣ space, ↵ newline, → tab, ⟨…⟩ bytes that are not a whole character",
  ]
    .filter(Boolean)
    .join(" · ");
  if (L * H > 48) byId("maps").classList.add("dense");
}

setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
readAddress();
writeFacts();
writeNames();
writeTokens();
drawSmallMaps();
drawOverview();
listen();
startTwoPrompts();
select({ j: state.j });
document.documentElement.dataset.ready = "yes"; // for tests
