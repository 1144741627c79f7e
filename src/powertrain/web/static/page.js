// Acts on data- attributes that the server writes:
//   data-post="ADDRESS" data-send='JSON'   a button or form that changes something; data-ask="TEXT" asks first
//                                          an answer {ask: TEXT} asks too, and a Yes sends the same again with sure=TEXT
//   data-live="ADDRESS" data-every="S"     an element with an id that is fetched again
//   data-stream="ADDRESS"                  on <body>: one stream of numbers; elements with data-field="NAME" show them
//   data-watch="ADDRESS"                   a form whose values are sent while they change; the answer goes into #data-into
// Text comes in as text or through DOMParser, in which nothing runs.
"use strict";

const one = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

function say(problem) {
  const place = one("#problem"), code = document.createElement("code");
  place.replaceChildren(...problem.split(/`([^`]+)`/).map((part, number) =>         // commands between backticks
    number % 2 ? Object.assign(code.cloneNode(), {textContent: part}) : part));
  place.hidden = !problem;
  if (problem) place.scrollIntoView({block: "nearest"});
}

async function send(address, value, options = {}) {
  try {
    const answer = await fetch(address, {method: "POST", headers: {"content-type": "application/json"},
                                         body: JSON.stringify(value), ...options});
    const kind = answer.headers.get("content-type") || "";
    if (kind.includes("json")) return await answer.json();
    const text = await answer.text();
    return answer.ok ? {html: text} : {problem: text};
  } catch (error) {
    if (error.name === "AbortError") return {aborted: true};
    return {problem: "The page's server does not answer. Runs go on without it; start it again with `powertrain ui`."};
  }
}

function act(answer) {
  say(answer.problem || "");
  if (answer.go) location.assign(answer.go);
  if (answer.refresh) refreshAll();
}

function valuesOf(form) {
  const values = {};
  for (const field of form.elements) {
    if (!field.name || field.disabled) continue;
    if (field.type === "checkbox") {
      if (field.value === "on") values[field.name] = field.checked;
      else (values[field.name] ||= []).push(...(field.checked ? [field.value] : []));
    } else if (field.type === "radio") {
      if (field.checked) values[field.name] = field.value;
    } else if (field.type !== "file" && field.type !== "submit" && field.type !== "button") values[field.name] = field.value;
  }
  return values;
}

// ---------------------------------------------------------------- asking before something is lost

function asked(text) {
  return new Promise((resolve) => {
    const box = document.createElement("dialog"), words = document.createElement("p"), row = document.createElement("p");
    const button = (label, answer) => {
      const made = document.createElement("button");
      made.textContent = label;
      made.addEventListener("click", () => { box.close(); resolve(answer); });
      row.append(made);
      return made;
    };
    words.textContent = text;
    box.setAttribute("aria-label", "Please confirm");
    const no = button("No", false);
    button("Yes", true);
    box.append(words, row);
    box.addEventListener("cancel", () => resolve(false));
    box.addEventListener("close", () => box.remove());
    document.body.append(box);
    box.showModal();
    no.focus();
  });
}

async function change(element) {
  for (const text of [element.dataset.ask, element.dataset.askAgain]) if (text && !await asked(text)) return;
  const value = element.tagName === "FORM" ? valuesOf(element) :
    {...element.form ? valuesOf(element.form) : {}, ...JSON.parse(element.dataset.send || "{}")};
  element.setAttribute("aria-busy", "true");
  let answer = await send(element.dataset.post, value);
  if (answer.ask) answer = await asked(answer.ask) ? await send(element.dataset.post, {...value, sure: answer.ask}) : {};
  act(answer);
  element.removeAttribute("aria-busy");
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-post]");
  if (button && !button.hasAttribute("aria-busy")) { event.preventDefault(); change(button); }
});

document.addEventListener("submit", (event) => {
  const form = event.target;
  event.preventDefault();
  if (form.dataset.post && !form.hasAttribute("aria-busy")) change(form);
  else if (form.dataset.go) location.assign(form.dataset.go + "?" + new URLSearchParams(
    Object.entries(valuesOf(form)).flatMap(([name, value]) => [value].flat().map((one) => [name, one]))));
});

// ---------------------------------------------------------------- parts that are fetched again

async function fetched(address) {
  const answer = await fetch(address);
  return answer.ok ? new DOMParser().parseFromString(await answer.text(), "text/html") : null;
}

async function refresh(part, documents = {}) {
  if (document.hidden || part.dataset.fetching) return lookAfter(part, 2);
  part.dataset.fetching = "yes";
  try {
    const answer = await (documents[part.dataset.live] ||= fetched(part.dataset.live)), fresh = answer?.getElementById(part.id);
    if (answer) markTouched();
    if (!fresh || part.contains(document.activeElement) && document.activeElement.matches("input,select,textarea")) return;
    const open = new Set(all("details[open]", part).map(keyOf));
    all("details", fresh).forEach((details) => { details.open ||= open.has(keyOf(details)); });
    const scrolls = all("[data-follow]", part).map((box) => box.scrollTop + box.clientHeight + 8 >= box.scrollHeight ? -1 : box.scrollTop);
    const read = one("[data-pointed]", part), shown = one("[data-pointed]", fresh);
    if (read && shown) shown.textContent = read.textContent;
    const focused = part.contains(document.activeElement) ? pathTo(document.activeElement, part) : null;
    renew(part, fresh);
    if (focused && !part.contains(document.activeElement)) one(focused, part)?.focus({preventScroll: true});
    follow(part, scrolls);
  } catch { /* the stream says when the server is gone */ } finally { delete part.dataset.fetching; lookAfter(part, 2); }
}

function keyOf(details) { return details.dataset.key || details.textContent.slice(0, 40); }

function pathTo(element, top) {
  const steps = [];
  for (; element && element !== top; element = element.parentElement) {
    steps.unshift(`:nth-child(${1 + [...element.parentElement.children].indexOf(element)})`);
  }
  return ":scope > " + steps.join(" > ");
}

// What stays the same stays in place, so that no button goes while it is pressed. One that does something else now is another,
// and so is a form, whose values are no attributes.
function renew(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== Node.ELEMENT_NODE || old.nodeName !== fresh.nodeName || old.nodeName === "FORM" ||
      ["data-post", "data-send", "href"].some((name) => old.getAttribute(name) !== fresh.getAttribute(name))) return old.replaceWith(fresh);
  for (const name of old.getAttributeNames()) if (!fresh.hasAttribute(name) && name !== "aria-busy") old.removeAttribute(name);
  for (const name of fresh.getAttributeNames()) old.setAttribute(name, fresh.getAttribute(name));
  const before = [...old.childNodes], after = [...fresh.childNodes];
  before.slice(after.length).forEach((node) => node.remove());
  after.forEach((node, place) => place < before.length ? renew(before[place], node) : old.append(node));
}

function follow(within, scrolls = []) {
  all("[data-follow]", within).forEach((box, number) => { box.scrollTop = scrolls[number] >= 0 ? scrolls[number] : box.scrollHeight; });
}

function refreshAll() {
  const documents = {};                      // parts of one address are fetched together
  all("[data-live]").forEach((part) => refresh(part, documents));
}

const looks = new WeakMap();               // the next look at each part

function lookAfter(part, least = 0) {
  const seconds = Number(part.dataset.every || 0);
  clearTimeout(looks.get(part));
  if (seconds && part.isConnected) looks.set(part, setTimeout(() => refresh(part), Math.max(least, seconds) * 1000));
}

// ---------------------------------------------------------------- the stream

const STALE_MS = 10000;
let stream = null, silent = 0;

function markTouched() {
  clearTimeout(silent);
  silent = setTimeout(() => showStale(listens() && !document.hidden), STALE_MS);
  showStale(false);
}

function listens() {
  return stream ? stream !== "ended" : all("[data-live]").some((part) => part.dataset.every >= 1 && part.dataset.every <= 5);
}

function showStale(is) {
  const stale = one("#stale");
  if (stale && stale.hidden === is) stale.hidden = !is;        // the browser draws again for each change, even for none
}

function listen() {
  const address = document.body.dataset.stream;
  if (!address || document.hidden || stream) return;
  stream = new EventSource(address);
  stream.onmessage = (message) => {
    markTouched();
    const {fields, lines, changed, ended} = JSON.parse(message.data);
    for (const [name, text] of Object.entries(fields || {})) {
      all(`[data-field="${CSS.escape(name)}"]`).forEach((place) => { if (place.textContent !== text) place.textContent = text; });
      all(`progress[data-progress="${CSS.escape(name)}"]`).forEach((bar) => { bar.value = Number(text); });
    }
    const log = one("#log");
    for (const line of log && lines || []) {
      log.append(line + "\n");
      if (log.textContent.length > 400000) log.textContent = log.textContent.slice(-200000);
    }
    if (log && lines?.length) follow(document);
    if (changed) refreshAll();
    if (ended) { stream.close(); stream = "ended"; }
  };
  stream.addEventListener("beat", () => markTouched());
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden && stream && stream !== "ended") { stream.close(); stream = null; }
  if (!document.hidden) { markTouched(); listen(); refreshAll(); }
});

// ---------------------------------------------------------------- forms that answer while they change

all("form[data-watch]").forEach((form) => {
  let timer = 0, last = null;
  const look = async () => {
    last?.abort();
    last = new AbortController();
    const place = document.getElementById(form.dataset.into);
    place.setAttribute("aria-busy", "true");
    const answer = await send(form.dataset.watch, valuesOf(form), {signal: last.signal});
    if (answer.aborted) return;
    place.removeAttribute("aria-busy");
    say(answer.problem || "");
    if (answer.html) {
      const fresh = new DOMParser().parseFromString(answer.html, "text/html").getElementById(place.id);
      if (fresh) place.scrollTop = 0;
      if (fresh) place.replaceChildren(...fresh.childNodes);
      const start = one("[data-start]", form);
      if (start && fresh) start.disabled = fresh.dataset.refused === "yes";
    }
  };
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(look, 400); });
  look();
});

document.addEventListener("change", async (event) => {
  const field = event.target;
  if (!field.dataset.read || !field.files[0]) return;
  field.form.elements[field.dataset.read].value = await field.files[0].text();
  field.form.elements[field.dataset.name].value = field.files[0].name;
});

all("[data-drop]").forEach((place) => {
  place.addEventListener("dragover", (event) => event.preventDefault());
  place.addEventListener("drop", async (event) => {
    const file = event.dataTransfer.files[0];
    if (!file) return;                       // text, which the browser puts in itself
    event.preventDefault();
    place.value = await file.text();
    place.form.elements[place.dataset.drop].value = file.name;
  });
});

// ---------------------------------------------------------------- dragging across a curve shows that range

let dragged = null;

document.addEventListener("pointerdown", (event) => {
  const svg = event.target.closest("[data-zoom] svg[data-x]");
  if (svg && event.button === 0) { dragged = {svg, from: event.clientX}; event.preventDefault(); }
});

document.addEventListener("pointerup", (event) => {
  if (!dragged) return;
  const {svg, from} = dragged, box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
  const [start, end, low, high] = svg.dataset.x.split(" ").map(Number);
  dragged = null;
  if (Math.abs(event.clientX - from) < 6) return;
  const [first, last] = [from, event.clientX].sort((a, b) => a - b).map((place) =>
    low + (high - low) * Math.min(1, Math.max(0, ((place - box.left) * scale - start) / (end - start))));
  const [address, query] = svg.closest("[data-zoom]").dataset.zoom.split("?"), values = new URLSearchParams(query);
  values.set("from", first);
  values.set("to", last);
  location.assign(`${address}?${values}#curves`);
});

// ---------------------------------------------------------------- pointing at a curve tells the numbers of its step

let pointing = null, asksAt = 0;

function point(svg, event) {
  const box = svg.getBoundingClientRect(), [start, end, low, high] = svg.dataset.x.split(" ").map(Number);
  const share = ((event.clientX - box.left) * svg.viewBox.baseVal.width / box.width - start) / (end - start);
  const area = svg.closest("[data-at]");
  all(".crosshair", area).forEach((line) => line.remove());
  if (share < 0 || share > 1) return;
  for (const other of all("svg[data-x]", area)) {          // the same place in all of them
    const [from, to] = other.dataset.x.split(" ").map(Number), line = document.createElementNS(svg.namespaceURI, "line");
    const place = from + share * (to - from), values = {class: "crosshair", x1: place, x2: place, y1: 0, y2: other.viewBox.baseVal.height};
    for (const [name, value] of Object.entries(values)) line.setAttribute(name, value);
    other.append(line);
  }
  clearTimeout(asksAt);
  asksAt = setTimeout(async () => {
    pointing?.abort();
    pointing = new AbortController();
    try {
      const answer = await fetch(`${area.dataset.at}&at=${low + share * (high - low)}`, {signal: pointing.signal});
      if (answer.ok) one("[data-pointed]", area).textContent = (await answer.json()).says.join("\n");
    } catch { /* a newer place is asked for, or the stream says that the server is gone */ }
  }, 60);
}

document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest?.("[data-at] svg[data-x]");
  if (svg) point(svg, event);
});

document.addEventListener("change", async (event) => {
  const field = event.target, file = field.dataset.upload && field.files[0];
  if (!file) return;
  say(`Uploading ${file.name}.`);
  const answer = await send(`/uploads/${encodeURIComponent(file.name)}`, null, {
    method: "PUT", headers: {"content-type": "application/octet-stream"}, body: file});
  say(answer.problem || "");
  if (answer.path) {
    const place = field.form.elements[field.dataset.upload];
    place.value = answer.path;
    place.dispatchEvent(new Event("input", {bubbles: true}));
  }
});

// ---------------------------------------------------------------- chat: each model answers in a column of its own

function bubble(place, label, text, before = null) {
  const box = document.createElement("div"), name = document.createElement("strong"), words = document.createElement("span");
  box.className = "bubble";
  name.textContent = `${label}: `;
  words.textContent = text;
  box.append(name, words);
  place.insertBefore(box, before);
  return words;
}

async function converse(column, values, signal) {
  const talk = one(".talk", column);
  bubble(talk, "You", values.message);
  const words = bubble(talk, "Model", ""), box = words.parentElement;
  box.setAttribute("aria-busy", "true");
  const told = (line) => {
    if (line.piece) words.textContent += line.piece;
    if (line.notice) bubble(talk, "Note", line.notice, box);
    if (line.problem) words.textContent += `[${line.problem}]`;
    if (line.prompt) {
      const details = document.createElement("details"), summary = document.createElement("summary"), exact = document.createElement("pre");
      summary.textContent = `The exact prompt${line.speed ? "; " + line.speed : ""}`;
      exact.textContent = line.prompt;
      details.append(summary, exact);
      box.append(details);
    }
  };
  try {
    const answer = await fetch("/chat/ask", {method: "POST", headers: {"content-type": "application/json"}, signal,
                                             body: JSON.stringify({...values, model: column.dataset.model})});
    if (!answer.ok) told(await answer.json());
    const reader = answer.ok && answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", part; reader && !(part = await reader.read()).done;) {
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      lines.filter(Boolean).forEach((line) => told(JSON.parse(line)));
    }
  } catch (error) {
    told({problem: error.name === "AbortError" ? "stopped" : "the page's server does not answer"});
  }
  box.removeAttribute("aria-busy");
}

all("form[data-chat]").forEach((form) => {
  const stop = one("[data-stop]", form), columns = all("[data-model]"), anew = () => Math.random().toString(36).slice(2);
  let asking = null, conversation = anew(), turn = 0;
  const ask = async () => {
    const values = {...valuesOf(form), conversation, turn};
    if (asking || !values.message.trim()) return;
    asking = new AbortController();
    turn += 1;
    stop.hidden = false;
    one("#message").value = "";
    await Promise.all(columns.map((column) => converse(column, values, asking.signal)));
    stop.hidden = true;
    asking = null;
  };
  form.addEventListener("submit", ask);
  one("#message").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(); });
  stop.addEventListener("click", () => asking?.abort());
  one("[data-reset]", form).addEventListener("click", () => {
    asking?.abort();
    conversation = anew();
    turn = 0;
    columns.forEach((column) => one(".talk", column).replaceChildren());
    one("#message").value ||= one("#message").defaultValue;
    one("#message").focus();
  });
});

// ---------------------------------------------------------------- copying, getting in

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  try {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
  } catch { say("The browser does not let the page copy; select the text instead."); }
});

if ("enter" in document.body.dataset) {
  const token = new URLSearchParams(location.hash.slice(1)).get("t") || "";
  history.replaceState(null, "", "/enter");
  send("/enter", {token}).then((answer) => {
    if (answer.go) location.replace(answer.go);
    else say(answer.problem);
  });
}

follow(document);
all("[data-live]").forEach((part) => lookAfter(part));
markTouched();
listen();
