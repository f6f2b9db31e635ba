// Elements of the page, numbers as text, and colours.

// attributes: a name that starts with 'on' adds a listener; true is an empty attribute; false, null and undefined leave it out.
function newElement(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && isPresent(value)) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter(isPresent));
  return element;
}

function span(className, ...children) {
  return newElement("span", { class: className }, ...children);
}

function line(...children) {
  return newElement("div", {}, ...children);
}

function tokenLabel(text) {
  return span("tok", text);
}

function sub(text) {
  return newElement("sub", {}, text);
}

function newButton(onclick, ...children) {
  return newElement("button", { type: "button", onclick }, ...children);
}

function cell(...children) {
  return newElement("td", {}, ...children);
}

function numberCell(...children) {
  return newElement("td", { class: "n" }, ...children);
}

function row(...cells) {
  return newElement("tr", {}, ...cells);
}

// titles: of the columns; those of numeric columns start with '#'.
function fillTable(table, titles, rows) {
  const heads = titles.map((title) => {
    const isNumeric = title.startsWith("#");
    return newElement("th", { scope: "col", class: isNumeric ? "n" : null }, isNumeric ? title.slice(1) : title);
  });
  table.replaceChildren(newElement("thead", {}, row(heads)), newElement("tbody", {}, rows));
}

// ------------------------------------------------------------------------------------------------ numbers as text

function withMinusSign(text) {
  return text.replace(/-/g, "−");
}

function formatNumber(x, digits = 5) {
  if (x === 0) return "0";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const isExtreme = Math.abs(x) < 1e-4 || Math.abs(x) >= 1e6;
  return withMinusSign(isExtreme ? x.toExponential(digits - 1) : x.toPrecision(digits));
}

function formatScore(x, decimals = 3) {
  return isPresent(x) ? withMinusSign(x.toFixed(decimals)) : "–";
}

function formatPercent(p) {
  if (p < 1e-4) return `${withMinusSign((100 * p).toExponential(1))} %`;
  return `${(100 * p).toFixed(p >= 0.0995 ? 1 : 2)} %`;
}

const SHOWN_NUMBERS = 6; // of a long vector

// isCut: whether the vector has more numbers than the file.
function formatVector(numbers, isCut) {
  const shown = numbers.slice(0, SHOWN_NUMBERS).map((x) => formatNumber(x, 4));
  return span("vector", `[${shown.join(", ")}${isCut ? ", …" : ""}]`);
}

// -------------------------------------------------------------------------------------------------------- colours

const SCALE_STOPS = {
  light: ["f0f3f6", "c9dcec", "86b4d8", "3e80b8", "104a85", "05264d"],
  dark: ["1e2226", "1d3c5a", "266294", "4a93cd", "94c8ef", "ecf6ff"],
};
const LOG_DECADES = 5; // of weights, from 1 down, on the log scale
let shades = null; // 256 colours [r, g, b] of the theme, from weight 0 to weight 1

function theme() {
  return document.documentElement.dataset.theme;
}

function setTheme(name) {
  const other = name === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = other;
  byId("theme").setAttribute("aria-label", `switch to ${other} colours`);
  const stops = SCALE_STOPS[name].map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  shades = Array.from({ length: 256 }, (_, n) => {
    const place = (n / 255) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(place));
    return [0, 1, 2].map((c) => Math.round(stops[low][c] + (place - low) * (stops[low + 1][c] - stops[low][c])));
  });
}

function shadeAt(strength) {
  return shades[Math.round(255 * Math.min(1, Math.max(0, strength)))];
}

function cssColour(colour) {
  return `rgb(${colour.join(",")})`;
}

function isDark(colour) {
  return 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 140;
}

function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// What shades a head's cells, and the number that has the strongest shade: weights and 1, or what each cell writes and the
// most that one of the head's cells writes.
function shading(head) {
  if (!state.written || !head.written) return { cells: head.weights, full: 1 };
  const full = head.written.reduce((most, size, at) => (state.hide && at % T === 0 ? most : Math.max(most, size)), 0);
  return { cells: head.written, full: full || 1, isWritten: true };
}

// How strongly a cell is shaded, from 0 to 1. shaded: from `shading`.
function strength({ cells, full, isWritten }, i, j) {
  let weight = cells[i * T + j] / full;
  if (state.hide) {
    if (j === 0) return 0;
    const rest = isWritten ? 1 : 1 - cells[i * T];
    weight = rest > 1e-9 ? weight / rest : 0;
  }
  return state.log ? 1 + Math.log10(Math.max(weight, 1e-30)) / LOG_DECADES : weight;
}
