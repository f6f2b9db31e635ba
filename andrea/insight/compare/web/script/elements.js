// Elements of the page and numbers as text.

const data = JSON.parse(document.getElementById("data").textContent);

function byId(id) {
  return document.getElementById(id);
}

function newElement(tag, attributes = {}, text = null, namespace = document.documentElement.namespaceURI) {
  const element = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

function newShape(tag, attributes, text) {
  return newElement(tag, attributes, text, "http://www.w3.org/2000/svg");
}

const COUNT_UNITS = { T: 1e12, B: 1e9, M: 1e6, k: 1e3 };

// Three significant digits and a unit: 3.34M.
function formatNumber(value) {
  if (value >= 1e15) return formatPower(value, 2);
  for (const [unit, size] of Object.entries(COUNT_UNITS)) {
    if (value >= size) return +(value / size).toPrecision(3) + unit;
  }
  return String(+value.toPrecision(3));
}

function formatPower(value, digits) {
  return value.toExponential(digits).replace("e+", "e");
}
