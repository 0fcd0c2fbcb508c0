"use strict";
// All that a model, a passage or a file wrote enters the page as text nodes: nothing is parsed as HTML.
//
// An item is a question: {question, gold, type, hops, evidence, where, step, sides}. A side is what was sampled
// for it: {name, nodes, trajectories}. Training has one side; a test question has one before and one after
// training, or one of each run. Nodes and trajectories are those of common/page/record.py.

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
const COLOUR = { "right": "good", "wrong": "bad", "bad format": "warn" };

function outcomeOf(trajectory) {
  if (trajectory.problem) return "bad format";
  return trajectory.correct ? "right" : "wrong";
}

const outcomes = side => side.trajectories.map(outcomeOf);

// ---------------------------------------------------------------- what is shown

const state = { at: 0, paths: [0], node: null, open: new Set(), shade: false, text: "", outcome: "" };
let items = [], shown = [];

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function add(found) {
  const taken = new Set(items.map(item => item.id));
  for (const item of found) {
    item.id = String(item.question_id);
    if (taken.has(item.id)) item.id += "@" + (item.step ?? item.where);
    for (let n = 2; taken.has(item.id); n++) item.id = `${item.question_id}~${n}`;
    taken.add(item.id);
    const texts = [item.id, item.question, ...(item.gold || [])];
    for (const side of item.sides) {
      texts.push(...side.trajectories.map(t => t.answer), ...side.nodes.flatMap(n => [n.text, n.observation]));
    }
    item.haystack = texts.join("\n").toLowerCase();
  }
  items = items.concat(found);
}

// What the page left out: samples.jsonl (a group a line) or eval_<set>.json, read here and sent nowhere.
async function load(files) {
  for (const file of files) {
    let groups;
    try {
      const text = await file.text();
      const lines = file.name.endsWith(".jsonl") ? text.split("\n").filter(Boolean) : [text];
      // Python writes NaN, which JSON does not have
      const values = lines.map(line => JSON.parse(line.replace(/([:[,]\s*)(NaN|-?Infinity)(?=\s*[,}\]])/g, "$1null")));
      groups = file.name.endsWith(".jsonl") ? values : values[0].predictions;
      groups = groups.filter(g => g.nodes.length && g.trajectories.length);
    } catch (error) {
      $("left-out").textContent = `${file.name} holds no trajectories: ${error.message}`;
      continue;
    }
    add(groups.map(g => ({ ...g, where: file.name, sides: [{ nodes: g.nodes, trajectories: g.trajectories, beside: g.beside }] })));
    $("left-out").textContent = `${groups.length} questions of ${file.name} were added.`;
  }
  fillFilters();
  filter();
}

// The page opens on a tree that shows a method at work: with right and wrong leaves, early, the longest way right.
function telling(list) {
  const lastStep = Math.max(0, ...list.map(item => item.step || 0));
  const early = item => item.step <= Math.max(5, lastStep / 3);
  const longest = item => Math.max(...item.sides[0].trajectories.filter(t => t.correct).map(t => t.path.length));
  const mixed = list.filter(item => item.sides.length === 1 && new Set(outcomes(item.sides[0])).size > 1
    && item.sides[0].trajectories.some(t => t.correct));
  const pool = mixed.filter(early).length ? mixed.filter(early) : mixed;
  pool.sort((a, b) => longest(b) - longest(a) || (a.step || 0) - (b.step || 0));
  return Math.max(0, list.indexOf(pool[0]));
}

// ---------------------------------------------------------------- filters and the list

const CHOICES = { where: "everywhere", hops: "all hops", type: "all types" };

function fillFilters() {
  for (const [key, label] of Object.entries(CHOICES)) {
    const values = [...new Set(items.map(item => item[key]))].filter(v => v !== undefined && v !== null && v !== "");
    values.sort((a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b)));
    $(key).hidden = values.length < 2;
    $(key).replaceChildren(el("option", { value: "" }, label), ...values.map(v => el("option", { value: v }, String(v))));
  }
  const kinds = ["right", "wrong", "bad format"].filter(kind => items.some(item => outcomes(last(item.sides)).includes(kind)));
  if (items.some(changed)) kinds.push("changed");
  $("outcome").replaceChildren(...["all", ...kinds].map(kind =>
    button(kind, () => choose(kind), { value: kind === "all" ? "" : kind })));
  $("outcome").hidden = kinds.length < 2;
}

const changed = item => item.sides.length > 1 && outcomes(item.sides[0])[0] !== outcomes(last(item.sides))[0];

function choose(kind) {
  state.outcome = kind === "all" ? "" : kind;
  filter(shown[state.at]);
}

function passes(item) {
  const { outcome } = state;
  if (outcome === "changed" && !changed(item)) return false;
  if (outcome && outcome !== "changed" && !outcomes(last(item.sides)).includes(outcome)) return false;
  if (Object.keys(CHOICES).some(key => $(key).value && String(item[key]) !== $(key).value)) return false;
  return item.haystack.includes(state.text);
}

function filter(keep) {
  shown = items.filter(passes);
  const count = shown.reduce((n, item) => n + item.sides.reduce((m, side) => m + side.trajectories.length, 0), 0);
  $("count").textContent = `${shown.length} of ${items.length} questions, ${count} trajectories`;
  $("list").replaceChildren(...shown.map(listed));
  for (const b of $("outcome").children) b.setAttribute("aria-pressed", b.value === state.outcome);
  if (!shown.length) $("main").replaceChildren(el("p", { class: "facts" }, "No question passes the filters."));
  else show(Math.max(0, shown.indexOf(keep)));
}

function listed(item, i) {
  const marks = [];
  for (const side of item.sides) {
    const tally = {};
    for (const outcome of outcomes(side)) tally[outcome] = (tally[outcome] || 0) + 1;
    if (marks.length) marks.push("→");
    for (const [name, n] of Object.entries(tally)) {
      const text = side.trajectories.length > 1 ? String(n) : item.sides.length > 1 ? "" : name;
      marks.push(el("span", { class: COLOUR[name], title: name }, el("span", { class: "dot " + COLOUR[name] }), text));
    }
  }
  const facts = [item.where, item.step && `step ${item.step}`, item.hops && `${item.hops} hop${item.hops > 1 ? "s" : ""}`, item.type];
  const about = el("small", {}, ...marks, ...facts.filter(Boolean).map(fact => el("span", {}, fact)));
  const made = el("li", { role: "option", id: "item" + i }, item.question, about);
  made.addEventListener("click", () => show(i));
  return made;
}

function show(i, paths, node) {
  $("item" + state.at)?.setAttribute("aria-selected", false);
  state.at = i;
  const item = shown[i];
  $("item" + i).setAttribute("aria-selected", true);
  $("list").setAttribute("aria-activedescendant", "item" + i);
  $("item" + i).scrollIntoView({ block: "nearest" });
  const wanted = side => Math.max(0, outcomes(side).indexOf(state.outcome || "right"));
  state.paths = paths || item.sides.map(wanted);
  state.node = null;
  state.open.clear();
  render(item);
  if (node) pick(node.side, state.paths[node.side], node.id);
}

function pick(side, path, id = null) {
  state.paths[side] = path;
  state.node = id;
  render(shown[state.at]);
  link(side, path, id);
  if (id !== null) $("turn-" + side + "-" + id)?.scrollIntoView({ block: "nearest" });
}

// ---------------------------------------------------------------- a link: #id/trajectory/turn

function link(side, path, id) {
  const item = shown[state.at];
  const before = item.sides.slice(0, side).reduce((n, s) => n + s.trajectories.length, 0);
  const parts = [encodeURIComponent(item.id), before + path];
  if (id !== null) parts.push(item.sides[side].trajectories[path].path.indexOf(id));
  history.replaceState(null, "", "#" + parts.join("/"));
}

function follow() {
  const [name, trajectory, turn] = location.hash.slice(1).split("/");
  let id = name;
  try { id = decodeURIComponent(name); } catch { return false; }
  const item = items.find(item => item.id === id);
  if (!item) return false;
  if (!shown.includes(item)) clear();
  const i = shown.indexOf(item), paths = item.sides.map(() => 0);
  let n = Number(trajectory) || 0, side = 0;
  while (side < item.sides.length - 1 && n >= item.sides[side].trajectories.length) n -= item.sides[side++].trajectories.length;
  paths[side] = Math.min(n, item.sides[side].trajectories.length - 1);
  const wanted = item.sides[side].trajectories[paths[side]].path[Number(turn)];
  show(i, trajectory === undefined ? undefined : paths, turn === undefined || wanted === undefined ? null : { side, id: wanted });
  return true;
}

function clear() {
  $("search").value = state.text = state.outcome = "";
  for (const key of Object.keys(CHOICES)) $(key).value = "";
  filter();
}

// ---------------------------------------------------------------- a tree: equal turns of siblings are one box

function boxesOf(side) {
  const byId = new Map(side.nodes.map(n => [n.id, n])), depth = new Map();
  const deep = n => {
    if (!depth.has(n.id)) {
      depth.set(n.id, 0); // ends a circle
      depth.set(n.id, Math.max(-1, ...n.parents.filter(p => byId.has(p)).map(p => deep(byId.get(p)))) + 1);
    }
    return depth.get(n.id);
  };
  side.nodes.forEach(deep);
  const ends = new Map(side.trajectories.map((t, i) => [last(t.path), i]));
  const boxes = new Map(), boxOf = new Map();
  for (const n of [...side.nodes].sort((a, b) => depth.get(a.id) - depth.get(b.id))) {
    const parents = [...new Set(n.parents.map(p => boxOf.get(p)).filter(Boolean))];
    const end = ends.has(n.id) ? side.trajectories[ends.get(n.id)] : null;
    const what = [parents.map(b => b.number), n.label, n.text, n.observation, end && [outcomeOf(end), end.reward]];
    if (state.open.has(n.id)) what.push(n.id);
    const key = JSON.stringify(what);
    if (!boxes.has(key)) {
      boxes.set(key, { number: boxes.size, nodes: [], parents, children: [], depth: depth.get(n.id), ends: [] });
      for (const parent of parents) parent.children.push(boxes.get(key));
    }
    const box = boxes.get(key);
    box.nodes.push(n);
    boxOf.set(n.id, box);
    if (end) box.ends.push(ends.get(n.id));
  }
  return [...boxes.values()];
}

// Rows, from top to bottom: in a tree a leaf's, and its parents between theirs; in an outline each box's own.
function placeRows(boxes, outline, height) {
  const placed = new Set();
  let next = 0;
  const place = box => {
    if (placed.has(box)) return;
    placed.add(box);
    const below = box.children.filter(child => !placed.has(child));
    if (outline) box.y = next, next += height(box);
    below.forEach(place);
    if (outline) return;
    if (below.length) box.y = (below[0].y + last(below).y) / 2;
    else box.y = next + (height(box) - 1) / 2, next += height(box);
  };
  boxes.filter(box => !box.parents.length).forEach(place);
  return next;
}

const ruler = document.createElement("canvas").getContext("2d");
ruler.font = "11px system-ui, sans-serif";
const widthOf = text => ruler.measureText(text).width;

function fitted(text, room) {
  if (widthOf(text) <= room) return text;
  let n = text.length;
  while (n > 0 && widthOf(text.slice(0, n) + "…") > room) n--;
  return n > 2 ? text.slice(0, n) + "…" : "";
}

function wrapped(text, room) {
  const lines = [""];
  for (const word of text.split(/(?<=\s)/)) {
    if (lines[lines.length - 1] && widthOf(last(lines) + word) > room) lines.push("");
    for (const letter of word) {
      if (last(lines) && widthOf(last(lines) + letter) > room) lines.push("");
      lines[lines.length - 1] += letter;
    }
  }
  return lines;
}

function advantageColour(a) {
  if (typeof a !== "number") return "var(--seen)";
  const share = Math.min(100, 12 + 60 * Math.abs(a));
  return `color-mix(in srgb, ${a >= 0 ? "#2a78d6" : "#e0562c"} ${share}%, var(--panel))`;
}

const SHORT = 56; // a branch without a label

// Depth goes from left to right. A label stands on the branch that leads to its turn; an answer is never cut.
// Where the columns would be too narrow it is an outline, a line a box.
function draw(side, at, width) {
  const boxes = boxesOf(side), on = new Set(side.trajectories[state.paths[at]].path);
  const deepest = Math.max(...boxes.map(box => box.depth));
  for (const box of boxes) {
    const end = side.trajectories[box.ends[0]];
    box.answer = end ? end.answer || outcomeOf(end) : "";
    box.count = box.nodes.length > 1 ? `×${box.nodes.length}` : "";
    box.on = box.nodes.some(n => on.has(n.id));
    box.r = 3.5 + Math.min(5, 8 * Math.sqrt(Math.max(0, mean(box.nodes.map(n => n.entropy)) ?? .1)));
    box.label = (box.nodes[0].label || "").replace(/^search: /, "");
    if (box.answer && box.label.startsWith("answer")) box.label = "";
  }
  const longest = Math.max(40, ...boxes.map(box => widthOf(box.answer + box.count)));
  const answers = Math.min(longest, .3 * width) + 30;
  const short = boxes.some(box => box.depth === deepest && box.label) ? 0 : SHORT; // the last branches
  const column = (width - answers - 14 - short) / Math.max(1, deepest - (short ? 1 : 0));
  const outline = column < 105;
  for (const box of boxes) {
    box.x = 12 + box.depth * (outline ? 14 : column);
    if (!outline && box.answer && !box.label && box.depth) box.x += SHORT - column;
    const room = outline ? width - box.x - box.r - 44 : answers - 16 - widthOf(box.count);
    box.lines = box.answer ? wrapped(box.answer, Math.max(40, room)) : [];
  }
  const rows = placeRows(boxes, outline, box => Math.max(1, outline ? box.lines.length : (box.lines.length + 1) / 2));
  const tall = outline ? 20 : Math.max(23, Math.min(34, .44 * innerHeight / rows));
  const picture = svg("svg", { width, height: 20 + rows * tall, role: "img",
    "aria-label": `${side.nodes.length} turns, ${side.trajectories.length} trajectories` });
  for (const box of boxes) {
    box.y = 14 + box.y * tall;
    if (!outline) box.y += tall / 4;
  }
  for (const box of boxes) for (const parent of box.parents) {
    const bend = `C${parent.x + 22},${parent.y} ${parent.x + 10},${box.y} ${parent.x + 36},${box.y}H${box.x}`;
    const d = `M${parent.x},${parent.y}` + (outline ? `V${box.y}H${box.x}` : bend);
    const edge = svg("path", { d, class: box.on && parent.on ? "on" : "", "data-depth": box.depth });
    if (box.on) picture.append(edge); else picture.prepend(edge);
  }
  for (const box of boxes) picture.append(drawn(box, side, at, outline, width));
  return picture;
}

function drawn(box, side, at, outline, width) {
  const { x, y, r } = box, n = box.nodes[0], group = svg("g", { class: box.on ? "on" : "", "data-depth": box.depth });
  const dot = n.sampled === false ? svg("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 2 }) : svg("circle", { cx: x, cy: y, r });
  dot.style.fill = advantageColour(mean(box.nodes.map(m => m.advantage)));
  if (box.nodes.some(m => m.clipped)) dot.classList.add("clipped");
  if (box.nodes.some(m => m.id === state.node)) dot.classList.add("picked");
  const say = (text, x, y, more = {}) => group.append(svg("text", { x, y, ...more }, text));
  const beside = number(mean(box.nodes.map(m => m[side.beside])), 2);
  const from = Math.max(...box.parents.map(p => p.x)) + 40, count = box.parents.length ? box.count : "";
  let right = x + r + 5;
  if (box.answer) {
    const colour = `fill: var(--${COLOUR[outcomeOf(side.trajectories[box.ends[0]])]})`;
    box.lines.forEach((line, i) => say(line, right, y + 4 + 13 * (outline ? i : i - (box.lines.length - 1) / 2), { style: colour }));
    right += widthOf(last(box.lines)) + 4;
  } else if (outline && box.parents.length) {
    const label = fitted(box.label, width - right - widthOf(count + beside) - 16);
    say(label, right, y + 4);
    right += widthOf(label) + 5;
  }
  if (!outline && box.parents.length) {
    say(fitted(box.label, x - r - from - 2), from, y - 6);
    if (beside) say(beside, x - r - 4, y + 4, { class: "value", "text-anchor": "end" });
  } else if (beside && !box.answer) say(beside, right + widthOf(count) + 4, y + 4, { class: "value" });
  group.append(dot, svg("title", {}, [n.label, box.count, ...factsOf(n)].filter(Boolean).join(" · ")));
  if (count || state.open.has(n.id)) {
    const badge = svg("text", { x: right, y: outline || box.answer ? y + 4 : y - 4, class: "count" }, count || "−");
    badge.addEventListener("click", event => { event.stopPropagation(); toggle(box); });
    group.append(badge);
  }
  group.addEventListener("click", () => {
    const current = state.paths[at], through = side.trajectories.findIndex(t => t.path.includes(n.id));
    const stays = box.nodes.find(m => side.trajectories[current].path.includes(m.id));
    if (stays) pick(at, current, stays.id);
    else if (through >= 0) pick(at, through, n.id);
  });
  return group;
}

function toggle(box) {
  if (box.nodes.length > 1) for (const n of box.nodes) state.open.add(n.id);
  else { // all that were opened with it
    const side = shown[state.at].sides.find(s => s.nodes.includes(box.nodes[0]));
    for (const n of side.nodes) if (n.label === box.nodes[0].label && n.text === box.nodes[0].text) state.open.delete(n.id);
  }
  render(shown[state.at]);
}

// A file of its own, with the colours that the page has now.
function saveSvg(picture, name) {
  const copy = picture.cloneNode(true), shapes = "path, circle, rect, text";
  const live = [...picture.querySelectorAll(shapes)];
  [...copy.querySelectorAll(shapes)].forEach((node, i) => {
    const style = getComputedStyle(live[i]);
    for (const key of ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-weight", "paint-order"]) {
      node.setAttribute(key, style.getPropertyValue(key));
    }
    node.removeAttribute("class");
    node.removeAttribute("style");
  });
  copy.setAttribute("font-family", "system-ui, sans-serif");
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill: getComputedStyle(picture.parentNode).backgroundColor }));
  const text = new XMLSerializer().serializeToString(copy);
  el("a", { href: "data:image/svg+xml," + encodeURIComponent(text), download: name.replace(/[^\w.-]+/g, "_") + ".svg" }).click();
}

// ---------------------------------------------------------------- a question, turn by turn

const TOLD = new Set(["id", "parents", "text", "pieces", "logprobs", "observation", "label", "sampled", "how", "clipped",
  "ids", "observation_ids"]);
const PLAIN = ["role", "problem", "stopped by", "tokens", "entropy"]; // the others are told by `how`, where it is

function factsOf(n) {
  const shown = n.how ? PLAIN.map(key => [key, n[key]]) : Object.entries(n).filter(([key]) => !TOLD.has(key));
  const known = shown.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return known.map(([key, value]) => `${key} ${number(value)}`);
}

function sampledText(n) {
  if (!state.shade || !n.pieces || !n.logprobs) return el("pre", {}, n.text);
  return el("pre", {}, ...n.pieces.map((piece, i) => {
    const logprob = n.logprobs[i], known = typeof logprob === "number";
    const title = known ? `log-prob ${number(logprob)}, probability ${number(Math.exp(logprob))}` : "";
    const token = el("span", { title }, piece);
    if (known) token.style.background = `color-mix(in srgb, #e0562c ${Math.min(70, -logprob * 28)}%, transparent)`;
    return token;
  }));
}

function observedText(text, evidence) {
  const pre = el("pre", { class: "seen" }), cuts = [];
  text = text.trim();
  for (const e of evidence || []) {
    for (let at = e ? text.indexOf(e) : -1; at >= 0; at = text.indexOf(e, at + e.length)) cuts.push([at, at + e.length]);
  }
  cuts.sort((a, b) => a[0] - b[0]);
  let done = 0;
  for (const [from, to] of cuts) if (from >= done) {
    pre.append(text.slice(done, from), el("mark", { title: "gold evidence" }, text.slice(from, to)));
    done = to;
  }
  pre.append(text.slice(done));
  return pre;
}

function turnOf(n, k, item, at) {
  const facts = factsOf(n).map(fact => el("span", {}, fact));
  const anchor = button("#", () => pick(at, state.paths[at], n.id), { title: "link to this turn", class: "anchor" });
  const how = n.how?.length ? el("div", { class: "how" }, ...n.how.map(line => el("p", {}, String(line)))) : null;
  return el("section", { class: n.id === state.node ? "turn picked" : "turn", id: `turn-${at}-${n.id}` },
    el("header", {}, el("b", {}, n.label || `turn ${k + 1}`), ...facts, anchor),
    how, n.text ? sampledText(n) : null, n.observation ? observedText(n.observation, item.evidence) : null);
}

function legendOf(side, graph, item) {
  const has = key => side.nodes.some(n => n[key] !== undefined && n[key] !== null);
  const parts = [];
  if (has("advantage")) parts.push(el("span", {}, "advantage: low", el("span", { class: "swatch" }), "high"));
  if (has("entropy")) parts.push(el("span", {}, "size: entropy"));
  if (side.beside) parts.push(el("span", {}, `number: ${side.beside}`));
  if (side.nodes.some(n => n.clipped)) parts.push(el("span", {}, "dashed: past the clip window"));
  if (graph.querySelector(".count")) parts.push(el("span", {}, "×n: equal turns, a click opens them"));
  parts.push(button("SVG", () => saveSvg(graph.firstChild, item.id)));
  return el("div", { class: "legend" }, ...parts);
}

// Trajectories that read alike are one button, but for those that were opened.
function buttonsOf(side, at) {
  const made = [];
  for (const box of boxesOf(side)) if (box.ends.length) {
    const first = side.trajectories[box.ends[0]], outcome = outcomeOf(first);
    const pressed = box.ends.includes(state.paths[at]), count = box.ends.length > 1 ? ` ×${box.ends.length}` : "";
    made.push(button(el("span", { class: "dot " + COLOUR[outcome] }), () => pick(at, box.ends[0]), { "aria-pressed": pressed, title: outcome }));
    last(made).append(` ${number(first.reward)}${count}`);
  }
  return made.length > 1 ? [el("div", { class: "paths", role: "group", "aria-label": "trajectories" }, ...made)] : [];
}

function sideOf(item, at, width) {
  const side = item.sides[at], t = side.trajectories[state.paths[at]], outcome = COLOUR[outcomeOf(t)];
  const byId = new Map(side.nodes.map(n => [n.id, n])), parts = [];
  if (side.name) parts.push(el("h3", {}, side.name));
  if (side.nodes.length > t.path.length || side.nodes.some(n => n.parents.length > 1)) {
    const graph = el("div", { class: "graph" }, draw(side, at, width));
    parts.push(graph, legendOf(side, graph, item), ...buttonsOf(side, at));
  }
  parts.push(el("div", { class: "why " + outcome },
    el("p", {}, el("b", { class: outcome }, outcomeOf(t)), ` · reward ${number(t.reward)} · answer: ${t.answer || "none"}`),
    ...(t.why || []).map(line => el("p", { class: "facts" }, String(line)))));
  const turns = t.path.map(id => byId.get(id)).filter(n => n && (n.text || n.observation));
  parts.push(...turns.map((n, k) => turnOf(n, k, item, at)));
  return el("div", { class: "side" }, ...parts);
}

function render(item) {
  const scroll = item === render.item ? $("main").scrollTop : 0;
  render.item = item;
  const fact = (name, value) => value === undefined || value === null || value === "" ? null : el("span", {}, name + " ", el("b", {}, number(value)));
  const facts = el("div", { class: "facts" }, fact("gold", (item.gold || []).join(" | ")), fact("type", item.type),
    fact("hops", item.hops), fact("id", item.id), fact("", item.where), fact("step", item.step));
  const sides = el("div", { class: "sides" });
  $("main").replaceChildren(el("h2", {}, item.question), facts, sides);
  const columns = sides.clientWidth > 700 ? item.sides.length : 1;
  sides.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  const width = (sides.clientWidth - 18 * (columns - 1)) / columns - 2; // the graph's border
  sides.append(...item.sides.map((_, at) => sideOf(item, at, Math.floor(width))));
  $("main").scrollTop = scroll;
}

// ---------------------------------------------------------------- start

function tableOf(header, rows) {
  const head = el("tr", {}, ...header.map(name => el("th", {}, name)));
  return el("table", {}, head, ...rows.map(row => el("tr", {}, ...row.map(cell => el("td", {}, number(cell, 6))))));
}

function settingsOf({ runs, first, rest, about }) {
  const header = runs.length > 1 ? ["", ...runs] : [];
  return [el("p", {}, about), tableOf(header, first), el("p", {}, "all others"), tableOf(header, rest)];
}

function toggleShade() {
  state.shade = !state.shade;
  $("shade").setAttribute("aria-pressed", state.shade);
  if (shown.length) render(shown[state.at]);
}

function step(by) {
  if (shown.length) show(Math.min(shown.length - 1, Math.max(0, state.at + by)));
}

// from one button to the next: equal trajectories are one step
function stepPath(by) {
  const item = shown[state.at];
  if (!item) return;
  const at = item.sides.length - 1, ends = boxesOf(item.sides[at]).filter(box => box.ends.length).map(box => box.ends);
  const now = ends.findIndex(of => of.includes(state.paths[at]));
  pick(at, ends[Math.min(ends.length - 1, Math.max(0, now + by))][0]);
}

const KEYS = {
  j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
  l: () => stepPath(1), ArrowRight: () => stepPath(1), h: () => stepPath(-1), ArrowLeft: () => stepPath(-1),
  0: () => choose("all"), 1: () => choose("right"), 2: () => choose("wrong"), 3: () => choose("bad format"),
  "/": () => $("search").focus(), s: toggleShade, "?": () => $("help").showModal(),
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

async function start() {
  const data = await unpack($("data").textContent);
  $("title").textContent = data.title;
  $("summary").textContent = data.summary;
  $("left-out").textContent = data.left_out;
  if (data.curves) $("curves-image").src = data.curves;
  $("open-curves").hidden = !data.curves;
  $("config").append(...settingsOf(data.settings));
  $("open-table").hidden = !data.table;
  if (data.table) $("table").append(tableOf(data.table.header, data.table.rows));
  for (const name of ["curves", "config", "table", "help"]) {
    $("open-" + name).addEventListener("click", () => $(name).showModal());
    $(name).addEventListener("click", event => event.target === $(name) && $(name).close());
  }
  add(data.items);
  $("shade").hidden = !items.some(item => item.sides.some(side => side.nodes.some(n => n.pieces)));
  $("shade").addEventListener("click", toggleShade);
  $("search").addEventListener("input", () => { state.text = $("search").value.trim().toLowerCase(); filter(); });
  for (const key of Object.keys(CHOICES)) $(key).addEventListener("change", () => filter());
  $("load").addEventListener("change", () => load([...$("load").files]));
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", follow);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width && shown.length) render(shown[state.at]); width = innerWidth; });
  fillFilters();
  filter(items[telling(items)]);
  follow();
}

start();
