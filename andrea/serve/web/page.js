"use strict";
// A conversation is a tree: retries, edits and alternatives are branches, and `chosen` leads to the shown one. Every answer
// keeps the ids that the model read (`context`) and those that it wrote (`tokens`); a place counts over both.

const byId = (id) => document.getElementById(id);

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const percent = (nats) => share(Math.exp(nats));
const share = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)}\u00a0%` : p >= 0.00095 ? `${(100 * p).toFixed(1)}\u00a0%` : p.toExponential(0).replace("-", "−"));
const signed = (x) => (x < 0 ? "−" : "+") + Math.abs(x).toFixed(2);
const count = (n) => (n >= 1e6 ? `${(n / 1e6).toPrecision(3)} M` : n.toLocaleString("en"));

// ------------------------------------------------------------------------------------------------------- the server

class Failure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // 0: no answer
  }
}

const GONE = "The server does not answer. It may have been stopped, or is busy starting; the page goes on when it is back.";

async function ask(address, body, signal) {
  const key = byId("key").value.trim();
  if (/[^\x21-\x7e]/.test(key)) throw new Failure(401, "A key has no spaces and no letters beyond ASCII.");
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const sent = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(address, { headers, signal, cache: "no-store", ...sent });
  } catch (error) {
    throw signal?.aborted ? error : new Failure(0, GONE);
  }
  if (answer.ok) return answer;
  const told = (await answer.json().catch(() => null))?.error?.message ?? answer.statusText;
  const after = answer.headers.get("retry-after");
  throw new Failure(answer.status, answer.status === 429 ? `The server is busy: ${told}. Try again in ${after ?? 5} s.` : told);
}

const askJson = async (...words) => (await ask(...words)).json();

// Server-sent events, until [DONE].
async function* events(address, body, signal) {
  const reader = (await ask(address, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let waiting = ""; ; ) {
    const { done, value } = await reader.read().catch((error) => {
      throw signal?.aborted ? error : new Failure(0, GONE);
    });
    if (done) throw new Failure(0, GONE);
    const parts = (waiting + value).split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const data = JSON.parse(part.slice("data: ".length));
      if (data.error) throw new Failure(500, data.error.message);
      yield data;
    }
  }
}

// ------------------------------------------------------------------------------------------------------ its refusals

let retries = []; // what "Try again" does

function tell(error, again = null) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Failure)) console.error(error);
  const key = error.status === 401;
  byId("notice").hidden = false;
  byId("notice").firstElementChild.textContent = key ? `${error.message} Give it under Settings, then try again.` : error.message;
  if (again) retries.push(again);
  byId("again").hidden = !retries.length;
  if (key) {
    byId("settings").open = true;
    byId("key").focus();
  }
  if (error.status === 0) setTimeout(waitForServer, 1000);
}

function quiet() {
  byId("notice").hidden = true;
  retries = [];
}

async function waitForServer() {
  if (byId("notice").hidden) return;
  const answer = await fetch("health", { cache: "no-store" }).catch(() => null);
  if (!answer?.ok) return void setTimeout(waitForServer, 1000);
  byId("notice").firstElementChild.textContent = "The server is back.";
  if (!columns.length) start();
}

// -------------------------------------------------------------------------------------------------------- tokens

const bytesOf = (name) =>
  /^bytes:(\\x[0-9a-f]{2})+$/.test(name) ? Uint8Array.from(name.slice(8).split("x"), (hex) => parseInt(hex, 16)) : null;

// Tokens to their texts. A character of several tokens comes with the last of them; until then a token's text is empty.
class Reader {
  constructor(special) {
    this.special = special;
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  }
  read({ id, name }) {
    if (id in this.special) return "";
    return this.decoder.decode(bytesOf(name) ?? new TextEncoder().encode(name), { stream: true });
  }
}

function textOf(tokens, special) {
  const reader = new Reader(special);
  return tokens.map((token) => reader.read(token)).join("");
}

const shown = (name) =>
  name.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\0-\x1f]/g, (letter) => String.fromCodePoint(0x2400 + letter.codePointAt(0)));

function tokenElement(token, place, special, text) {
  const made = element("span", { className: "tok", textContent: token.id in special ? token.name : text });
  made.dataset.place = place;
  made.classList.toggle("special", token.id in special);
  made.classList.toggle("part", /^[^\S \n\t]*$|^\p{C}+$/u.test(made.textContent) && !/[ \n\t]/.test(made.textContent)); // invisible otherwise
  made.classList.toggle("branch", !!token.isBranch);
  return made;
}

// -------------------------------------------------------------------------------------------------------- the trees

let mode = "chat";
let columns = [];
let picked = null; // {column, node, place}, and what the server says of this token
let edited = null; // depth in the tree
const all = (node) => node.context.concat(node.tokens);
const isBusy = () => columns.some((column) => column.stopper);

function numberOf(id) {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
}

class Column {
  constructor(base, facts) {
    Object.assign(this, { base, facts, stopper: null, n: columns.length });
    this.roots = { chat: { children: [] }, text: { children: [] } };
    this.body = element("div");
    this.about = element("p", { className: "soft about" });
    this.box = element("section", { className: "column" }, element("h2", { textContent: facts.name }), this.about, this.body);
    this.box.setAttribute("aria-label", `Model ${facts.name}`);
    this.describe();
  }

  describe() {
    const { step, n_parameter, bits_per_byte, precision } = this.facts;
    const figure = bits_per_byte ? `, ${bits_per_byte.toFixed(3)} bits per byte` : "";
    this.about.textContent = `step ${step}, ${count(n_parameter)} parameters${figure}, ${precision}`;
  }

  path() {
    const found = [];
    for (let node = this.roots[mode]; node.children.length; found.push(node)) node = node.children[node.chosen];
    return found;
  }

  add(parent, node) {
    parent.chosen = parent.children.push({ ...node, parent, children: [] }) - 1;
    return parent.children[parent.chosen];
  }

  // The user's text, as a child of the node at `depth` of the path, and its answer.
  send(text, depth, seed) {
    const path = this.path();
    if (depth === null) depth = mode === "chat" ? path.length : 0;
    const parent = depth > 0 ? path[Math.min(depth, path.length) - 1] : this.roots[mode];
    return this.answer(this.add(parent, { role: "user", text }), seed);
  }

  answer(user, seed) {
    const node = this.add(user, { role: "assistant", context: [], tokens: [], seed });
    return this.write(node, mode === "chat" ? { messages: this.messages(user) } : { prompt: user.text });
  }

  messages(user) {
    const found = [];
    for (let node = user; node.parent; node = node.parent) {
      const content = node.role === "user" ? node.text : textOf(node.tokens, this.facts.special);
      found.unshift({ role: node.role, content });
    }
    const system = byId("system").value.trim();
    return system ? [{ role: "system", content: system }, ...found] : found;
  }

  // The ids before `place`, then the alternative: a new answer to the same text.
  branch(node, place, alternative) {
    const kept = all(node).slice(0, place);
    const tokens = [...kept.slice(node.context.length), { ...alternative, isBranch: true }];
    const made = this.add(node.parent, {
      role: "assistant", tokens, context: kept.slice(0, node.context.length), seed: node.seed, nLeftOut: node.nLeftOut,
    });
    return made.tokens.at(-1).id in this.facts.special ? this.finish(made) : this.goOn(made);
  }

  finish(node) {
    node.finish = "stop";
    render();
  }

  goOn(node) {
    const ids = all(node).map((token) => token.id);
    // As the model's window slides while it writes: by halves.
    const hop = Math.ceil(this.facts.n_window / 2);
    const first = hop * Math.ceil(Math.max(0, ids.length - this.facts.n_window) / hop);
    return this.write(node, { prompt: ids.slice(first) }, first);
  }

  async write(node, prompt, first = 0) {
    this.stopper = new AbortController();
    quiet();
    Object.assign(node, { isWriting: true, finish: null, error: null });
    render();
    const { signal } = this.stopper;
    const maxTokens = numberOf("max_tokens") ?? Math.min(256, this.facts.max_tokens); // else the server's default, 16
    const settings = { max_tokens: maxTokens, seed: node.seed, stream: true, logprobs: 0 };
    for (const id of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]) settings[id] = numberOf(id);
    const began = performance.now();
    const nBefore = node.tokens.length;
    try {
      const told = await askJson(`${this.base}v1/andrea/tokens`, { ...prompt, max_tokens: maxTokens }, signal);
      this.takePrompt(node, told, first);
      node.nLeftOut ??= told.turns_left_out;
      render();
      for await (const chunk of events(`${this.base}v1/completions`, { ...settings, prompt: told.ids }, signal)) {
        for (const choice of chunk.choices) this.takeTokens(node, choice);
      }
      node.rate = (1000 * (node.tokens.length - nBefore)) / (performance.now() - began);
    } catch (error) {
      node.error = error.name === "AbortError" ? "stopped" : "broken off";
      tell(error, () => (node.tokens.length ? this.goOn(node) : this.write(node, prompt, first)));
    } finally {
      node.isWriting = false;
      this.stopper = null;
      render();
      if (!node.error) byId("announce").textContent = `${this.facts.name}: ${textOf(node.tokens, this.facts.special)}`;
    }
  }

  // What the model reads differs from the ids at their end, if that was a space (token healing).
  takePrompt(node, { read, names }, first) {
    const known = all(node);
    const tokens = read.map((id, place) => (known[first + place]?.id === id ? known[first + place] : { id, name: names[place] }));
    const whole = known.slice(0, first).concat(tokens);
    const border = known.length ? Math.min(node.context.length, whole.length) : whole.length;
    Object.assign(node, { context: whole.slice(0, border), tokens: whole.slice(border) });
  }

  takeTokens(node, { logprobs, finish_reason }) {
    logprobs.token_ids.forEach((id, place) => {
      node.tokens.push({ id, name: logprobs.tokens[place], nats: logprobs.token_logprobs[place] });
    });
    node.finish = finish_reason ?? node.finish;
    node.frame ??= requestAnimationFrame(() => this.drawNew(node));
  }

  // Once a frame, because measuring the page takes as long as the text.
  drawNew(node) {
    node.frame = null;
    if (!node.isWriting || !node.list.isConnected) return; // `draw` shows all of it
    const page = document.documentElement;
    const isAtEnd = page.scrollTop + innerHeight > page.scrollHeight - 80;
    const added = node.tokens.slice(node.nDrawn).map((token, n) => {
      const place = node.context.length + node.nDrawn + n;
      const made = tokenElement(token, place, this.facts.special, node.reader.read(token));
      dress(made, token, node.list, this, node);
      return made;
    });
    node.nDrawn = node.tokens.length;
    node.list.lastElementChild.before(...added);
    if (isAtEnd) page.scrollTop = page.scrollHeight;
  }

  // ---------------------------------------------------------------------------------------------- what is shown

  draw() {
    const nodes = this.path();
    const told = mode === "chat" ? "Say something; the model answers here." : "Begin a text; the model goes on with it.";
    this.body.replaceChildren(...(nodes.length ? [] : [element("p", { className: "soft", textContent: told })]));
    nodes.forEach((node, depth) => {
      if (node.role === "assistant") this.body.append(this.answerBox(node, depth));
      else if (mode === "chat") this.body.append(this.userBox(node, depth));
    });
  }

  userBox(node, depth) {
    const said = element("div", { className: "said", textContent: node.text });
    return element("div", { className: "turn user" }, said, element("div", { className: "tools" }, ...this.userTools(node, depth)));
  }

  userTools(node, depth) {
    const edit = tool("Edit", () => beginEdit(node.text, depth));
    return [edit, ...this.switcher(node, mode === "chat" ? "Message" : "Prompt")];
  }

  answerBox(node, depth) {
    const list = (node.list = element("div", { className: "text listing", tabIndex: 0 }));
    const reader = (node.reader = new Reader(this.facts.special));
    const before = new Reader(this.facts.special);
    node.nDrawn = node.tokens.length;
    all(node).forEach((token, place) => {
      const isContext = place < node.context.length;
      if (isContext && (mode === "chat" || token.id in this.facts.special)) return;
      const made = tokenElement(token, place, this.facts.special, (isContext ? before : reader).read(token));
      made.classList.toggle("given", isContext);
      list.append(made);
      dress(made, token, list, this, node);
    });
    list.append(element("span", { className: "doing", hidden: !node.isWriting }));
    if (list.children.length > 1) list.role = "listbox";
    list.ariaLabel = `Answer of ${this.facts.name}, token by token: arrow keys move, Enter shows why`;
    list.ariaBusy = String(!!node.isWriting);
    list.onclick = (event) => event.target.dataset.place && pick(this, node, Number(event.target.dataset.place), list);
    list.onkeydown = (event) => moveIn(list, event);
    const tools = element("div", { className: "tools" }, ...(mode === "text" ? this.userTools(node.parent, depth - 1) : []));
    if (!node.isWriting) {
      tools.append(tool("Retry", () => this.again(node)));
      if (node.finish !== "stop" && node.tokens.length) tools.append(tool("Go on", () => this.goOn(node)));
    }
    tools.append(...this.switcher(node, "Answer"), element("span", { className: "soft", textContent: this.figures(node) }));
    return element("div", { className: "turn" }, list, tools);
  }

  figures(node) {
    const nats = node.tokens.filter((token) => token.nats !== undefined).map((token) => token.nats);
    const bits = nats.reduce((sum, each) => sum - each / Math.LN2, 0) / nats.length;
    const words = [node.error, `seed ${node.seed}`, `${node.tokens.length} tokens`];
    if (nats.length) words.push(`${bits.toFixed(2)} bits per token`);
    if (node.rate) words.push(`${node.rate.toFixed(0)} tokens/s`);
    if (node.finish === "length") words.push("cut at “most tokens”");
    if (node.nLeftOut) words.push(`the first ${node.nLeftOut} messages no longer fit`);
    return node.isWriting ? "" : words.filter(Boolean).join(" · ");
  }

  // A fixed seed writes the same text again, so each retry adds one, as the n-th text of a request does.
  again(node) {
    const fixed = numberOf("seed");
    this.answer(node.parent, fixed === undefined ? newSeed() : fixed + node.parent.children.length);
  }

  switcher(node, what) {
    const { children, chosen } = node.parent;
    if (children.length < 2) return [];
    const go = (step) => () => {
      node.parent.chosen = (chosen + step + children.length) % children.length;
      render();
    };
    const back = tool("‹", go(-1), `${what}: the one before`);
    return [back, element("span", { className: "soft", textContent: `${what} ${chosen + 1}/${children.length}` }), tool("›", go(1), `${what}: the next one`)];
  }
}

function tool(text, onclick, label) {
  const made = element("button", { type: "button", className: "small", textContent: text, onclick, disabled: isBusy() });
  if (label) made.ariaLabel = label;
  return made;
}

// A token's role, name and shade.
function dress(made, token, list, column, node) {
  const place = Number(made.dataset.place);
  made.role = "option";
  made.id = `token-${column.n}-${column.path().indexOf(node)}-${place}`;
  made.ariaSelected = String(picked?.node === node && picked.place === place);
  made.classList.toggle("active", made.ariaSelected === "true");
  if (made.textContent.trim() === "") made.ariaLabel = shown(token.name);
  if (token.nats !== undefined) made.title = percent(token.nats);
  list.role = "listbox";
  shade(made, node, token, place);
}

function shade(made, node, token, place) {
  const kind = byId("shade").value;
  const isLooked = kind === "attention" && picked?.node === node;
  const bits = token.nats === undefined ? 0 : -token.nats / Math.LN2;
  made.classList.toggle("looked", isLooked);
  made.style.setProperty("--share", kind === "surprise" ? Math.min(1, bits / 8) : isLooked ? Math.sqrt(attentionAt(place)) : 0);
}

function shadeAll() {
  for (const column of columns) {
    for (const node of column.path()) {
      if (!node.list) continue;
      const tokens = all(node);
      for (const made of node.list.querySelectorAll(".tok")) shade(made, node, tokens[made.dataset.place], Number(made.dataset.place));
    }
  }
}

// The keys of a list of tokens. The active one is where the mouse would be.
function moveIn(list, event) {
  const tokens = [...list.querySelectorAll(".tok")];
  const now = tokens.findIndex((made) => made.classList.contains("active"));
  const to = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1, Home: 0, End: tokens.length - 1 }[event.key];
  if ((event.key === "Enter" || event.key === " ") && now >= 0) tokens[now].click();
  else if (to === undefined) return;
  event.preventDefault();
  const target = tokens[Math.max(0, Math.min(to ?? now, tokens.length - 1))];
  if (!target) return;
  tokens.forEach((made) => made.classList.toggle("active", made === target));
  list.setAttribute("aria-activedescendant", target.id);
  target.scrollIntoView({ block: "nearest" });
}

// --------------------------------------------------------------------------------------------------- why this token

async function pick(column, node, place, list) {
  if (place < 1) return;
  picked?.stopper.abort();
  picked = { column, node, place, first: 0, changes: [], stopper: new AbortController() };
  const mine = picked;
  quiet();
  for (const made of document.querySelectorAll(".listing .tok")) {
    const isMine = made.parentElement === list && Number(made.dataset.place) === place;
    made.classList.toggle("active", isMine);
    made.ariaSelected = String(isMine);
    if (isMine) setTimeout(() => made.scrollIntoView({ block: "nearest" })); // not below the panel of a phone
  }
  const tokens = all(node);
  const hop = Math.ceil(column.facts.n_window / 2);
  mine.first = hop * Math.ceil(Math.max(0, place - column.facts.n_window) / hop);
  byId("panel").hidden = false;
  byId("stage").classList.add("open");
  byId("token-title").replaceChildren("Token ", element("span", { className: "name", textContent: shown(tokens[place].name) }));
  byId("token-facts").textContent = "The model reads the text again …";
  for (const id of ["alternatives", "heads", "top-heads", "lens", "context"]) byId(id).replaceChildren();
  byId("heads-note").textContent = byId("attended").textContent = "";
  try {
    const ids = tokens.slice(mine.first, place + 1).map((token) => token.id);
    for await (const part of events(`${column.base}v1/andrea/token`, { ids }, mine.stopper.signal)) {
      if (picked !== mine) return;
      if (part.attention) showToken(Object.assign(mine, part));
      if (part.changes) {
        mine.changes[part.layer] = part.changes;
        showHeads(mine);
      }
    }
  } catch (error) {
    if (picked !== mine || error.name === "AbortError") return;
    byId("token-facts").textContent = error.message;
    tell(error, () => pick(column, node, place, node.list));
  }
}

function showToken({ column, node, place, nats, rank, likeliest, lens, attention }) {
  const token = all(node)[place];
  const { n_layer, n_head } = column.facts;
  byId("token-facts").textContent =
    `probability ${percent(nats)}, rank ${rank + 1}; surprise ${(-nats / Math.LN2).toFixed(2)} bits; token ${place}`;
  byId("alternatives").replaceChildren(...likeliest.map((other) => alternative(other, token, column, node, place)));
  const bytes = Uint8Array.from(atob(attention), (letter) => letter.charCodeAt(0));
  picked.shares = Float32Array.from(new Uint16Array(bytes.buffer), (whole) => whole / 65535);
  picked.n_key = picked.shares.length / (n_layer * n_head);
  const chosen = byId("head").value;
  byId("head").replaceChildren(element("option", { value: "mean", textContent: "mean of all" }));
  for (let layer = 0; layer < n_layer; layer++) {
    for (let head = 0; head < n_head; head++) byId("head").append(element("option", { value: `${layer}.${head}`, textContent: `${layer}.${head}` }));
  }
  byId("head").value = chosen;
  if (byId("head").selectedIndex < 0) byId("head").value = "mean";
  showLens(lens, column.facts);
  showAttention();
  showHeads(picked);
}

function alternative(other, token, column, node, place) {
  const bar = element("span", { className: "bar" });
  bar.style.setProperty("--share", Math.exp(other.nats));
  const made = element("button", { type: "button", disabled: other.id === token.id || isBusy() });
  made.append(element("span", { className: "name", textContent: shown(other.name) }), bar, element("span", { className: "figure", textContent: percent(other.nats) }));
  made.classList.toggle("own", other.id === token.id);
  made.onclick = () => {
    column.branch(node, place, { id: other.id, name: other.name, nats: other.nats });
    closePanel();
  };
  return element("li", {}, made);
}

function showLens(lens, facts) {
  const rows = lens.map(({ nats, likeliest }, layer) => {
    const names = likeliest.map((other) => element("span", { className: "name", textContent: shown(other.name), title: percent(other.nats) }));
    const cells = names.map((name) => element("td", {}, name));
    const title = element("th", { scope: "row", textContent: layer ? `after ${layer - 1}` : "before 0" });
    return element("tr", {}, title, element("td", { className: "figure", textContent: percent(nats) }), ...cells);
  });
  const heads = ["layer", "p", "1st", "2nd", "3rd"].map((text) => element("th", { scope: "col", textContent: text }));
  byId("lens").replaceChildren(element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
}

// Rows are layers. Blue: the head spoke for the token; orange: against it.
function showHeads(mine) {
  const { n_layer, n_head } = mine.column.facts;
  const known = mine.changes.flatMap((row, layer) => row.map((change, head) => ({ layer, head, change })));
  const strongest = Math.max(0.05, ...known.map(({ change }) => Math.abs(change)));
  const isDone = mine.changes.length === n_layer;
  byId("heads-note").textContent =
    (isDone ? "" : `Switching off one head after the other: layer ${mine.changes.length} of ${n_layer} … `) +
    "What happens to ln p of this token if one head is switched off: blue heads spoke for it, orange ones against it. Choose one to see where it looks.";
  const titles = [...Array(n_head).keys()].map((head) => element("th", { scope: "col", textContent: `head ${head}` }));
  const rows = mine.changes.map((row, layer) => {
    const cells = row.map((change, head) => {
      const cell = element("td", { textContent: signed(change), onclick: () => chooseHead(`${layer}.${head}`) });
      cell.style.setProperty("--share", Math.abs(change) / strongest);
      cell.classList.toggle("against", change > 0);
      cell.classList.toggle("chosen", byId("head").value === `${layer}.${head}`);
      return cell;
    });
    return element("tr", {}, element("th", { scope: "row", textContent: `layer ${layer}` }), ...cells);
  });
  byId("heads").replaceChildren(element("thead", {}, element("tr", {}, element("th", { scope: "col", textContent: "ln p" }), ...titles)), element("tbody", {}, ...rows));
  if (!isDone) return byId("top-heads").replaceChildren();
  const top = known.filter(({ change }) => Math.abs(change) >= 0.01).sort((a, b) => Math.abs(b.change) - Math.abs(a.change)).slice(0, 3);
  if (!top.length) byId("heads-note").textContent += " Here no single head matters.";
  byId("top-heads").replaceChildren(...top.map(({ layer, head, change }) => {
    const text = `Without head ${layer}.${head} the token has ${percent(mine.nats + change)} instead of ${percent(mine.nats)}.`;
    return element("li", {}, element("button", { type: "button", textContent: text, onclick: () => chooseHead(`${layer}.${head}`) }));
  }));
}

function chooseHead(name) {
  byId("head").value = name;
  byId("shade").value = "attention";
  showHeads(picked);
  showAttention();
}

// The share of the chosen head's attention on a place, when the picked token was chosen.
function attentionAt(place) {
  const key = place - picked.first;
  if (!picked.shares || key < 0 || key >= picked.n_key) return 0;
  const { n_layer, n_head } = picked.column.facts;
  const at = (row) => picked.shares[row * picked.n_key + key];
  if (byId("head").value !== "mean") {
    const [layer, head] = byId("head").value.split(".").map(Number);
    return at(layer * n_head + head);
  }
  const n = n_layer * n_head;
  return [...Array(n).keys()].reduce((sum, row) => sum + at(row), 0) / n;
}

function showAttention() {
  const { column, node, first, n_key } = picked;
  const tokens = all(node).slice(first, first + n_key);
  const reader = new Reader(column.facts.special);
  const shares = tokens.map((_, key) => attentionAt(first + key));
  byId("context").replaceChildren(...tokens.map((token, key) => {
    const made = tokenElement(token, first + key, column.facts.special, reader.read(token));
    made.classList.add("looked");
    made.style.setProperty("--share", Math.sqrt(shares[key])); // so that small shares can be seen
    made.title = `${shown(token.name)}: ${share(shares[key])}`;
    return made;
  }));
  const best = shares.map((value, key) => [value, key]).sort((a, b) => b[0] - a[0]).slice(0, 3);
  byId("attended").textContent = `looks at ${best.map(([value, key]) => `“${shown(tokens[key].name)}” ${share(value)}`).join(", ")}`;
  shadeAll();
}

function closePanel() {
  picked?.stopper.abort();
  const node = picked?.node;
  picked = null;
  byId("panel").hidden = true;
  byId("stage").classList.remove("open");
  render();
  return node?.list;
}

// --------------------------------------------------------------------------------------------------- a run that trains

let run = null;

async function watchRun() {
  if (mode !== "run") return;
  try {
    run = await askJson("v1/andrea/run");
    if (watchRun.hasFailed) quiet();
    watchRun.hasFailed = false;
    showRun();
  } catch (error) {
    if (!watchRun.hasFailed) tell(error, watchRun);
    watchRun.hasFailed = true;
  }
  clearTimeout(watchRun.timer);
  watchRun.timer = setTimeout(watchRun, 5000);
}

function showRun() {
  const [line] = run.runs;
  const last = line.validation.at(-1);
  byId("run-title").textContent = run.title;
  byId("run-state").textContent =
    `${run.is_training ? "It is training" : "It is not training now"}; newest checkpoint: step ${run.newest_step}; you talk to step ${run.served_step}.` +
    (last ? ` Validation at step ${last.step}: loss ${last.loss.toFixed(3)}, ${last.bpb.toFixed(3)} bits per byte.` : "");
  byId("run-stop").disabled = !run.is_training;
  byId("run-load").disabled = run.newest_step === run.served_step;
  byId("run-warnings").hidden = !run.warnings.length;
  byId("run-warnings").replaceChildren(...run.warnings.map((text) => element("li", { textContent: text })));
  const points = (list, name) => list.filter((point) => Number.isFinite(point[name])).map((point) => [point.tokens, point[name]]);
  drawCurves(byId("loss"), [["training", points(line.training, "loss")], ["", points(line.validation, "loss")]]);
  drawCurves(byId("bpb"), [["", points(line.validation, "bpb")]]);
  const names = Object.keys(run.measured_heads.at(-1)?.tables ?? {});
  if (byId("run-figure").children.length !== names.length) {
    byId("run-figure").replaceChildren(...names.map((name) => element("option", { value: name, textContent: name.replaceAll("_", " ") })));
  }
  drawHeads();
  byId("run-samples-title").hidden = !run.samples.length;
  byId("run-heads-part").hidden = !names.length;
  byId("run-samples").replaceChildren(...run.samples.slice(0, 4).map(({ step, prompt, text }) =>
    element("div", {}, element("p", { className: "soft", textContent: `step ${step}` }), element("pre", {}, element("b", { textContent: prompt }), text)),
  ));
}

function shape(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// Curves over tokens, in a box of 420 x 200.
function drawCurves(chart, curves) {
  const drawn = curves.flatMap(([, points]) => points);
  if (!drawn.length) return chart.replaceChildren(shape("text", { x: 40, y: 100 }, "no figures yet"));
  const [xs, ys] = [drawn.map(([x]) => x), drawn.map(([, y]) => y)];
  const right = Math.max(...xs);
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const x = (value) => 40 + (370 * value) / (right || 1);
  const y = (value) => 170 - (155 * (value - low)) / (high - low || 1);
  chart.replaceChildren();
  for (const value of [low, (low + high) / 2, high]) {
    chart.append(shape("line", { class: "grid", x1: 40, x2: 410, y1: y(value), y2: y(value) }), shape("text", { x: 2, y: y(value) + 4 }, value.toFixed(2)));
  }
  chart.append(shape("text", { x: 410, y: 192, "text-anchor": "end" }, `${count(right)} tokens`), shape("text", { x: 40, y: 192 }, "0"));
  for (const [kind, points] of curves) {
    chart.append(shape("polyline", { class: kind, points: points.map(([a, b]) => `${x(a)},${y(b)}`).join(" ") }));
    if (!kind) chart.append(...points.map(([a, b]) => shape("circle", { cx: x(a), cy: y(b), r: 3 })));
  }
  const ends = curves.map(([kind, points]) => `${kind || "validation"} ends at ${points.at(-1)?.[1].toFixed(3)}`);
  chart.setAttribute("aria-label", ends.join(", "));
}

// One row for each head, one column for each measurement.
function drawHeads() {
  const name = byId("run-figure").value;
  const measured = run.measured_heads.filter(({ tables }) => tables[name]);
  const numbers = measured.flatMap(({ tables }) => tables[name].flat()).filter((number) => number !== null);
  const chart = byId("run-heads");
  chart.replaceChildren();
  if (!numbers.length) return;
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  byId("run-range").textContent = `from ${low.toPrecision(3)} (pale) to ${high.toPrecision(3)} (strong)`;
  const labels = measured.at(-1).tables[name].flatMap((row, layer) => row.map((_, head) => `${layer}.${head}`));
  chart.setAttribute("width", 50 + 18 * measured.length);
  chart.setAttribute("height", 16 * labels.length);
  chart.setAttribute("aria-label", `${name.replaceAll("_", " ")} of ${labels.length} heads at ${measured.length} steps`);
  labels.forEach((label, row) => chart.append(shape("text", { x: 38, y: 16 * row + 12, "text-anchor": "end" }, label)));
  measured.forEach(({ step, tables }, column) => tables[name].flat().forEach((number, row) => {
    const opacity = number === null ? 0 : 0.06 + (0.94 * (number - low)) / (high - low || 1);
    const cell = shape("rect", { x: 44 + 18 * column, y: 16 * row, width: 17, height: 15, fill: "var(--accent)", "fill-opacity": opacity });
    cell.append(shape("title", {}, `head ${labels[row]}, step ${step}: ${number?.toPrecision(3) ?? "not measured"}`));
    chart.append(cell);
  }));
}

async function loadNewest() {
  byId("run-state").textContent = "The checkpoint is loaded; texts that are being written end first …";
  try {
    await askJson("v1/andrea/run/load", {});
    columns[0].facts = await askJson("v1/andrea");
    columns[0].describe();
    show(columns[0].facts.can_chat ? "chat" : "text");
  } catch (error) {
    tell(error, loadNewest);
  }
}

async function stopRun() {
  if (!confirm("Stop the training? It saves a checkpoint and ends, as with Ctrl-C; it can be resumed.")) return;
  try {
    await askJson("v1/andrea/run/stop", {});
    byId("run-state").textContent = "The training ends after its step, and saves.";
    clearTimeout(watchRun.timer);
    watchRun.timer = setTimeout(watchRun, 3000);
  } catch (error) {
    tell(error, stopRun);
  }
}

// ------------------------------------------------------------------------------------------------------- the controls

const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;

function render() {
  const focused = document.activeElement?.closest?.(".listing");
  const place = focused && columns.flatMap((column) => column.path()).find((node) => node.list === focused);
  for (const column of columns) column.draw();
  place?.list.focus();
  byId("stop").hidden = !isBusy();
  byId("send").disabled = byId("new").disabled = isBusy();
}

// As sample.py has them: a text of a small model repeats itself at a low temperature.
const DEFAULTS = { chat: { temperature: "0.7", repetition_penalty: "1" }, text: { temperature: "1", repetition_penalty: "1.1" } };

function show(name) {
  mode = name;
  for (const [id, value] of Object.entries(DEFAULTS[mode] ?? {})) {
    const isUntouched = byId(id).value === byId(id).defaultValue;
    byId(id).defaultValue = value;
    if (isUntouched) byId(id).value = value;
  }
  for (const made of document.querySelectorAll("nav button")) made.ariaPressed = String(made.dataset.mode === mode);
  byId("run").hidden = mode !== "run";
  byId("talk").hidden = document.querySelector(".shade").hidden = mode === "run";
  byId("system-label").hidden = mode !== "chat";
  byId("input-label").textContent = mode === "chat" ? "Message" : "Beginning of a text";
  byId("input").placeholder = byId("input-label").textContent;
  endEdit();
  if (picked) closePanel();
  if (mode === "run") watchRun();
  else render();
}

function beginEdit(text, depth) {
  edited = depth;
  byId("editing").hidden = false;
  byId("input").value = text;
  byId("input").focus();
}

function endEdit() {
  if (edited !== null) byId("input").value = "";
  edited = null;
  byId("editing").hidden = true;
}

function send() {
  const text = byId("input").value;
  if (!text.trim() || isBusy()) return;
  if (!columns.length) return void start();
  for (const input of document.querySelectorAll("#settings input")) {
    if (!input.checkValidity()) {
      byId("settings").open = true;
      return void input.reportValidity();
    }
  }
  const [depth, seed] = [edited, numberOf("seed") ?? newSeed()];
  endEdit();
  byId("input").value = "";
  if (picked) closePanel();
  for (const column of columns) column.send(text, depth, seed);
  byId("composer").scrollIntoView({ block: "end" });
}

function stop() {
  for (const column of columns) column.stopper?.abort();
}

byId("composer").onsubmit = (event) => (event.preventDefault(), send());
byId("input").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), send());
};
byId("fields").onsubmit = (event) => event.preventDefault();
byId("stop").onclick = stop;
byId("no-edit").onclick = endEdit;
byId("new").onclick = () => {
  for (const column of columns) column.roots[mode] = { children: [] };
  endEdit();
  closePanel();
  quiet();
  byId("input").focus();
};
byId("again").onclick = () => {
  const again = retries;
  quiet();
  for (const each of again) each();
};
byId("key").onchange = () => !columns.length && start();
byId("close").onclick = () => closePanel()?.focus();
byId("head").onchange = () => chooseHead(byId("head").value);
byId("shade").onchange = shadeAll;
byId("run-figure").onchange = drawHeads;
byId("run-load").onclick = loadNewest;
byId("run-stop").onclick = stopRun;
for (const made of document.querySelectorAll("nav button")) made.onclick = () => show(made.dataset.mode);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (isBusy()) stop();
  else if (picked) closePanel()?.focus();
  else endEdit();
});

async function start() {
  quiet();
  try {
    const facts = [["", await askJson("v1/andrea")]];
    if (facts[0][1].has_beside) facts.push(["beside/", await askJson("beside/v1/andrea")]);
    columns = [];
    for (const each of facts) columns.push(new Column(...each));
    const canChat = facts.every(([, { can_chat }]) => can_chat);
    byId("columns").replaceChildren(...columns.map((column) => column.box));
    const chat = document.querySelector("[data-mode=chat]");
    chat.disabled = !canChat;
    chat.title = canChat ? "" : "This model was not trained on conversations (data=chat)";
    document.querySelector("[data-mode=run]").hidden = !facts[0][1].has_run;
    byId("max_tokens").max = facts[0][1].max_tokens;
    byId("max_tokens").value = Math.min(256, facts[0][1].max_tokens);
    document.title = `${facts.map(([, { name }]) => name).join(" and ")} – ANDREA`;
    show(canChat ? "chat" : "text");
    byId("input").focus();
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    tell(error, start);
  }
}

start();
