"use strict";
// All that a model, a passage or a file wrote enters the page as text nodes: nothing is parsed as HTML.
//
// An item is a question: {question, gold, type, hops, evidence, where, step, sides}. A side is what was
// sampled for it: {name, nodes, trajectories, beside}. Training has one side; a test question has one before
// and one after training, or one of each run. Nodes and trajectories are those of common/page/record.py.
// question.js shows one, tree.js and curves.js draw; all are one script in the page.

// ---------------------------------------------------------------- elements, numbers, outcomes

const $ = id => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter(child => child !== null && child !== undefined && child !== ""));
  return node;
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function button(label, act, attributes = {}) {
  const made = el("button", attributes, label);
  made.addEventListener("click", act);
  return made;
}

function number(x, digits = 3) {
  if (x === null || x === undefined) return "";
  if (typeof x === "number") return Number.isInteger(x) ? String(x) : x.toFixed(digits);
  return typeof x === "object" ? JSON.stringify(x) : String(x);
}

function mean(values) {
  const known = values.filter(v => typeof v === "number");
  return known.length ? known.reduce((sum, v) => sum + v, 0) / known.length : undefined;
}

const last = list => list[list.length - 1];
const COLOUR = { "right": "good", "wrong": "bad", "bad format": "warn", "not scored": "none" };

function outcomeOf(trajectory) {
  if (trajectory.problem) return "bad format";
  if (typeof trajectory.correct !== "boolean") return "not scored";
  return trajectory.correct ? "right" : "wrong";
}

const dotOf = outcome => el("span", { class: "dot " + COLOUR[outcome] });
const outcomes = side => side.trajectories.map(outcomeOf);

// ---------------------------------------------------------------- what is shown

const state = { at: 0, paths: [0], picked: "", open: new Set(), text: "", outcome: "", told: false };
let items = [], shown = [];

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return parsed(await new Response(stream).text());
}

function add(found) {
  const taken = new Set(items.map(item => item.id));
  for (const item of found) {
    item.id = String(item.question_id);
    if (taken.has(item.id)) item.id += "@" + (item.step ?? item.where);
    for (let n = 2; taken.has(item.id); n++) item.id = `${item.question_id}~${n}`;
    taken.add(item.id);
    const texts = [item.id, item.question, item.plainly, ...(item.gold || [])];
    for (const side of item.sides) {
      texts.push(...side.trajectories.map(t => t.answer));
      texts.push(...side.nodes.flatMap(n => [n.text, n.observation]));
    }
    item.haystack = texts.join("\n").toLowerCase();
  }
  items = items.concat(found);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch { // Python writes numbers that JSON does not have
    return JSON.parse(text.replace(/([:[,]\s*)(NaN|-?Infinity)(?=\s*[,}\]])/g, "$1null"));
  }
}

const textOf = content => typeof content === "string" ? content
  : (content || []).map(part => part.text ?? `(${part.type})`).join("\n");

// A group of what other tools write: OpenAI's messages, or a trajectory in ATIF (common/report/export.py).
function groupOf(row, i) {
  if (row.nodes || !(row.messages || row.steps)) return row;
  const steps = row.messages ? row.messages.map(m => ({ ...m, source: m.role, message: m.content })) : row.steps;
  const about = { ...row.extra, ...row }, nodes = [{ id: 0, parents: [], label: "question", sampled: false }];
  let question = "";
  for (const step of steps) {
    const calls = (step.tool_calls || []).map(call => JSON.stringify(call.function || {
      name: call.function_name, arguments: call.arguments }));
    const text = [step.reasoning_content, textOf(step.message), ...calls].filter(Boolean).join("\n");
    const seen = (step.observation?.results || []).map(result => textOf(result.content)).join("\n");
    if (["assistant", "agent"].includes(step.source)) {
      const own = { id: nodes.length, parents: [nodes.length - 1], text, observation: seen, how: undefined };
      nodes.push({ ...step.extra, ...own });
    } else if (nodes.length > 1) last(nodes).observation += text;
    else if (step.source === "user") question += text;
  }
  for (const key of ["gold", "evidence"]) if (!Array.isArray(about[key])) about[key] = [about[key] ?? []].flat();
  const { reward, answer, problem, correct } = about, path = nodes.map(node => node.id);
  return { ...about, question_id: about.id ?? about.trajectory_id ?? about.session_id ?? `${i + 1}`, question,
    nodes, trajectories: [{ path, reward, answer, problem, correct }] };
}

// What the page left out: samples.jsonl (a group a line) or eval_<set>.json; or a file of others. It is read
// here and sent nowhere.
async function load(files) {
  for (const file of files) {
    try {
      const text = await file.text(), lines = text.split("\n").filter(Boolean);
      const found = file.name.endsWith(".jsonl") ? lines.map(parsed) : parsed(text);
      const groups = (found.predictions || [found].flat()).map(groupOf);
      const whole = groups.filter(g => g.nodes.length && g.trajectories.length);
      add(whole.map(g => ({ ...g, where: file.name, sides: [g] })));
      $("left-out").textContent = `${whole.length} questions of ${file.name} were added.`;
    } catch (error) {
      $("left-out").textContent = `${file.name} holds no trajectories: ${error.message}`;
    }
  }
  fillFilters();
  filter();
}

// The page opens on a tree that shows a method at work: early, with right and wrong leaves, the longest way
// to a right one; without such a tree on a question whose sides differ.
function telling(list) {
  const lastStep = Math.max(0, ...list.map(item => item.step || 0));
  const early = item => item.step <= Math.max(5, lastStep / 3);
  const right = item => item.sides[0].trajectories.filter(t => outcomeOf(t) === "right");
  const longest = item => Math.max(...right(item).map(t => t.path.length));
  const isMixed = item => right(item).length > 0 && right(item).length < item.sides[0].trajectories.length;
  const mixed = list.filter(item => item.sides.length === 1 && isMixed(item));
  const pool = mixed.some(early) ? mixed.filter(early) : mixed;
  pool.sort((a, b) => longest(b) - longest(a) || (a.step || 0) - (b.step || 0));
  return Math.max(0, pool.length ? list.indexOf(pool[0]) : list.findIndex(differs));
}

// ---------------------------------------------------------------- filters and the list

const CHOICES = { where: "everywhere", hops: "all hops", type: "all types" };

function fillFilters() {
  for (const [key, label] of Object.entries(CHOICES)) {
    const values = [...new Set(items.map(item => item[key] ?? ""))].filter(value => value !== "");
    values.sort((a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
    $(key).hidden = values.length < 2;
    const options = values.map(value => el("option", { value }, String(value)));
    $(key).replaceChildren(el("option", { value: "" }, label), ...options);
  }
  const met = new Set(items.flatMap(item => outcomes(last(item.sides))));
  const kinds = Object.keys(COLOUR).filter(kind => met.has(kind));
  if (items.some(differs)) kinds.push("changed");
  $("outcome").replaceChildren(...["all", ...kinds].map(kind =>
    button(kind, () => choose(kind), { value: kind === "all" ? "" : kind })));
  $("outcome").hidden = kinds.length < 2;
}

const differs = item => item.sides.length > 1 && outcomes(item.sides[0])[0] !== outcomes(last(item.sides))[0];

function choose(kind) {
  state.outcome = kind === "all" ? "" : kind;
  filter(shown[state.at]);
}

function passes(item) {
  const { outcome } = state;
  if (outcome === "changed" && !differs(item)) return false;
  if (outcome && outcome !== "changed" && !outcomes(last(item.sides)).includes(outcome)) return false;
  if (Object.keys(CHOICES).some(key => $(key).value && String(item[key]) !== $(key).value)) return false;
  return item.haystack.includes(state.text);
}

function filter(keep) {
  shown = items.filter(passes);
  const count = shown.flatMap(item => item.sides.flatMap(side => side.trajectories)).length;
  $("count").textContent = `${shown.length} of ${items.length} questions, ${count} trajectories`;
  $("list").replaceChildren(...shown.map(listed));
  for (const b of $("outcome").children) b.setAttribute("aria-pressed", b.value === state.outcome);
  if (shown.length) show(Math.max(0, shown.indexOf(keep)));
  else {
    const none = items.length ? "No question passes the filters." : "Nothing has been sampled or evaluated yet.";
    $("main").replaceChildren(el("p", { class: "facts" }, none));
  }
}

function listed(item, i) {
  const marks = [];
  for (const side of item.sides) {
    const tally = {};
    for (const outcome of outcomes(side)) tally[outcome] = (tally[outcome] || 0) + 1;
    if (marks.length) marks.push("→");
    for (const [name, n] of Object.entries(tally)) {
      let text = name;
      if (item.sides.length > 1) text = "";
      if (side.trajectories.length > 1) text = String(n);
      marks.push(el("span", { class: COLOUR[name], title: name }, dotOf(name), text));
    }
  }
  const hops = item.hops && (item.hops > 1 ? `${item.hops} hops` : "1 hop");
  const facts = [item.where, item.step && `step ${item.step}`, hops, item.type];
  const about = el("small", {}, ...marks, ...facts.filter(Boolean).map(fact => el("span", {}, fact)));
  const made = el("li", { role: "option", id: "item" + i }, item.plainly || item.question, about);
  made.addEventListener("click", () => go(i));
  return made;
}

function show(i) {
  $("item" + state.at)?.setAttribute("aria-selected", false);
  state.at = i;
  const item = shown[i];
  $("item" + i).setAttribute("aria-selected", true);
  $("list").setAttribute("aria-activedescendant", "item" + i);
  $("item" + i).scrollIntoView({ block: "nearest" });
  const wanted = side => Math.max(0, outcomes(side).indexOf(state.outcome || "right"));
  state.paths = item.sides.map(wanted);
  state.picked = "";
  state.open.clear();
  render(item);
}

// A question that the reader chose stands in the address.
function go(i) {
  show(i);
  $("list").classList.add("folded");
  link(0, state.paths[0]);
}

function pick(side, path, id) {
  state.paths[side] = path;
  state.picked = `turn-${side}-${id}`;
  render(shown[state.at]);
  link(side, path, id);
  $(state.picked)?.scrollIntoView({ block: "nearest" });
}

// ---------------------------------------------------------------- a link: #id/trajectory/turn

function link(side, path, id) {
  if (location.protocol === "about:") return;  // in a notebook's frame
  const item = shown[state.at];
  const before = item.sides.slice(0, side).reduce((n, s) => n + s.trajectories.length, 0);
  const parts = [encodeURIComponent(item.id), before + path];
  if (id !== undefined) parts.push(item.sides[side].trajectories[path].path.indexOf(id));
  history.replaceState(null, "", "#" + parts.join("/"));
}

function follow() {
  const [name, trajectory, turn] = location.hash.slice(1).split("/");
  let id = name;
  try { id = decodeURIComponent(name); } catch { return false; }
  const item = items.find(item => item.id === id);
  if (!item) return false;
  if (!shown.includes(item)) clear();
  show(shown.indexOf(item));
  const places = item.sides.flatMap((side, at) => side.trajectories.map((t, path) => ({ at, path, t })));
  const place = places[Number(trajectory)];
  if (trajectory && place) pick(place.at, place.path, turn ? place.t.path[Number(turn)] : undefined);
  return true;
}

function clear() {
  $("search").value = state.text = state.outcome = "";
  for (const key of Object.keys(CHOICES)) $(key).value = "";
  filter();
}

// ---------------------------------------------------------------- start

function tableOf(header, rows) {
  const shown = cell => typeof cell === "number" ? String(cell) : number(cell);
  const line = (tag, cells) => el("tr", {}, ...cells.map(cell => el(tag, {}, shown(cell))));
  return el("table", {}, header.length ? line("th", header) : null, ...rows.map(row => line("td", row)));
}

function settingsOf({ runs, first, rest, about }) {
  const header = runs.length > 1 ? ["", ...runs] : [];
  if (!first.length) return [tableOf(header, rest)];
  return [el("p", {}, about), tableOf(header, first), el("p", {}, "all others"), tableOf(header, rest)];
}

function step(by) {
  if (shown.length) go(Math.min(shown.length - 1, Math.max(0, state.at + by)));
}

// from one button to the next: equal trajectories are one step
function stepPath(by) {
  const item = shown[state.at];
  if (!item) return;
  const at = item.sides.length - 1;
  const ends = boxesOf(item.sides[at]).filter(box => box.ends.length).map(box => box.ends);
  const now = ends.findIndex(of => of.includes(state.paths[at]));
  pick(at, ends[Math.min(ends.length - 1, Math.max(0, now + by))][0]);
}

const KEYS = {
  j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
  l: () => stepPath(1), ArrowRight: () => stepPath(1), h: () => stepPath(-1), ArrowLeft: () => stepPath(-1),
  0: () => choose("all"), 1: () => choose("right"), 2: () => choose("wrong"), 3: () => choose("bad format"),
  "/": () => $("search").focus(), "?": () => $("help").showModal(),
  c: () => $("open-curves").hidden || $("curves").showModal(),
};

function onKey(event) {
  if (event.target === $("search")) {
    if (event.key === "Escape") clear();
    if (event.key === "Escape" || event.key === "Enter") $("search").blur();
    return;
  }
  const busy = document.querySelector("dialog[open]") || event.target.tagName === "SELECT";
  if (busy || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
  KEYS[event.key]();
  event.preventDefault();
}

const IDLE = 20; // seconds without a hand on mouse or keys

// The page of a run that goes on reads itself anew while nobody uses it, and comes back to the same place.
function watch() {
  let used = Date.now();
  for (const kind of ["pointermove", "pointerdown", "wheel", "keydown", "touchmove"]) {
    addEventListener(kind, () => { used = Date.now(); }, { capture: true, passive: true });
  }
  setInterval(() => {
    const filtered = shown.length < items.length || document.querySelector("dialog[open]");
    if (filtered || Date.now() - used < 1000 * IDLE) return;
    history.replaceState({ top: $("main").scrollTop, page: scrollY }, "");
    location.reload();
  }, 1000);
}

async function start() {
  const data = await unpack($("data").textContent);
  $("title").textContent = data.title;
  $("summary").textContent = data.summary;
  $("left-out").textContent = data.left_out;
  $("words").textContent = data.words || "";
  const { panels, runs } = data.curves;
  $("panels").append(...Object.entries(panels).map(([title, keys]) => panelOf(title, keys, runs)));
  $("to-step").hidden = !data.items.some(item => item.where === "training");
  $("open-curves").hidden = !$("panels").children.length;
  $("config").append(...settingsOf(data.settings));
  $("open-table").hidden = !data.table;
  if (data.table) $("table").append(tableOf(data.table.header, data.table.rows));
  for (const name of ["curves", "config", "table", "help"]) {
    $("open-" + name).addEventListener("click", () => $(name).showModal());
    $(name).prepend(button("×", () => $(name).close(), { class: "close", "aria-label": "close" }));
    $(name).addEventListener("click", event => event.target === $(name) && $(name).close());
  }
  add(data.items);
  $("search").addEventListener("input", () => {
    state.text = $("search").value.trim().toLowerCase();
    filter();
  });
  for (const key of Object.keys(CHOICES)) $(key).addEventListener("change", () => filter());
  $("count").addEventListener("click", () => $("list").classList.toggle("folded"));  // seen on a phone
  $("load").addEventListener("change", () => load([...$("load").files]));
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", follow);
  addEventListener("resize", () => shown.length && render(shown[state.at]));
  fillFilters();
  filter(items[telling(items)]);
  const place = history.state; // before a link takes it away
  follow();
  if (place) {
    $("main").scrollTop = place.top;
    scrollTo(0, place.page);
  }
  if (!data.how_far) return;
  $("live").textContent = `${data.how_far}, live`;
  watch();
}

addEventListener("DOMContentLoaded", start); // once all files of the script have been read
