"use strict";
// All that a model, a passage or a file wrote enters the page as text nodes: nothing is parsed as HTML.
//
// An item is a question: {question, gold, type, hops, evidence, where, step, sides}. A side is what was
// sampled for it: {name, nodes, trajectories, beside}. Training has one side; a test question has one before
// and one after training, or one of each run. Nodes and trajectories are those of common/page/record.py.

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

const dotOf = outcome => el("span", { class: "dot " + COLOUR[outcome] });
const outcomes = side => side.trajectories.map(outcomeOf);

// ---------------------------------------------------------------- what is shown

const state = { at: 0, paths: [0], picked: "", open: new Set(), text: "", outcome: "" };
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
    const texts = [item.id, item.question, ...(item.gold || [])];
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

// What the page left out: samples.jsonl (a group a line) or eval_<set>.json, read here and sent nowhere.
async function load(files) {
  for (const file of files) {
    try {
      const text = await file.text(), lines = text.split("\n").filter(Boolean);
      const groups = file.name.endsWith(".jsonl") ? lines.map(parsed) : parsed(text).predictions;
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
  if (items.some(differs)) kinds.push("differ");
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
  if (outcome === "differ" && !differs(item)) return false;
  if (outcome && outcome !== "differ" && !outcomes(last(item.sides)).includes(outcome)) return false;
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
  else $("main").replaceChildren(el("p", { class: "facts" }, "No question passes the filters."));
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
  const made = el("li", { role: "option", id: "item" + i }, item.question, about);
  made.addEventListener("click", () => show(i));
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

// ---------------------------------------------------------------- a tree: equal siblings are one box

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
  const boxes = new Map(), boxOf = new Map(), orders = new Map();
  for (const n of [...side.nodes].sort((a, b) => depth.get(a.id) - depth.get(b.id))) {
    const parents = [...new Set(n.parents.map(p => boxOf.get(p)).filter(Boolean))];
    const end = ends.has(n.id) ? side.trajectories[ends.get(n.id)] : null;
    const what = [parents.map(b => b.number), n.label, n.text, n.observation];
    if (end) what.push(outcomeOf(end), end.reward);
    const alike = JSON.stringify(what);
    if (!orders.has(alike)) orders.set(alike, orders.size); // opened turns stay together
    const key = state.open.has(n.id) ? alike + n.id : alike;
    if (!boxes.has(key)) {
      const made = { number: boxes.size, parents, children: [], depth: depth.get(n.id), nodes: [], ends: [] };
      made.order = orders.get(alike);
      boxes.set(key, made);
      for (const parent of parents) parent.children.push(boxes.get(key));
    }
    const box = boxes.get(key);
    box.nodes.push(n);
    boxOf.set(n.id, box);
    if (end) box.ends.push(ends.get(n.id));
  }
  for (const box of boxes.values()) box.children.sort((a, b) => a.order - b.order);
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
    box.answer = end ? String(end.answer || outcomeOf(end)) : "";
    box.count = box.nodes.length > 1 ? `×${box.nodes.length}` : "";
    box.on = box.nodes.some(n => on.has(n.id));
    box.r = 3.5 + Math.min(5, 8 * Math.sqrt(Math.max(0, mean(box.nodes.map(n => n.entropy)) ?? .1)));
    box.label = (box.nodes[0].label || "").replace(/^search: /, "");
    if (box.answer && box.label.startsWith("answer")) box.label = "";
  }
  const longest = Math.max(40, ...boxes.map(box => widthOf(box.answer + box.count)));
  const answers = Math.min(longest, .3 * width) + 30;
  const columns = Array(deepest + 1).fill(0); // each as its longest label wants, all as the pane allows
  for (const box of boxes) {
    const wanted = box.label ? Math.min(260, widthOf(box.label) + 70) : SHORT;
    if (box.depth) columns[box.depth] = Math.max(columns[box.depth], wanted);
  }
  const stretch = (width - answers - 14) / columns.reduce((sum, wanted) => sum + wanted, 1);
  const outline = stretch < .6;
  for (const box of boxes) {
    box.x = 12 + stretch * columns.slice(0, box.depth + 1).reduce((sum, wanted) => sum + wanted);
    if (box.answer && !box.label && box.depth) box.x = Math.max(...box.parents.map(p => p.x)) + SHORT;
    if (outline) box.x = 12 + 14 * box.depth;
    const room = outline ? width - box.x - box.r - 44 : answers - 16 - widthOf(box.count);
    box.lines = box.answer ? wrapped(box.answer, Math.max(40, room)) : [];
  }
  const height = box => Math.max(1, outline ? box.lines.length : (box.lines.length + 1) / 2);
  const rows = placeRows(boxes, outline, height);
  const tall = outline ? 20 : Math.max(26, Math.min(34, .44 * innerHeight / rows));
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
  const { x, y, r } = box, n = box.nodes[0];
  const group = svg("g", { class: box.on ? "on" : "", "data-depth": box.depth });
  let dot = svg("circle", { cx: x, cy: y, r });
  if (n.sampled === false) dot = svg("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 2 });
  dot.style.fill = advantageColour(mean(box.nodes.map(m => m.advantage)));
  if (box.nodes.some(m => m.clipped)) dot.classList.add("clipped");
  if (box.nodes.some(m => `turn-${at}-${m.id}` === state.picked)) dot.classList.add("picked");
  const say = (text, x, y, more = {}) => group.append(svg("text", { x, y, ...more }, text));
  let beside = number(mean(box.nodes.map(m => m[side.beside])), 2);
  if (box.answer && !box.label) beside = ""; // as of the turn before it
  const from = Math.max(...box.parents.map(p => p.x)) + 40, count = box.parents.length ? box.count : "";
  let right = x + r + 5;
  if (box.answer) {
    const style = `fill: var(--${COLOUR[outcomeOf(side.trajectories[box.ends[0]])]})`;
    const first = outline ? y + 4 : y + 4 - 6.5 * (box.lines.length - 1);
    box.lines.forEach((line, i) => say(line, right, first + 13 * i, { style }));
    right += widthOf(last(box.lines)) + 4;
  } else if (outline && box.parents.length) {
    const label = fitted(box.label, width - right - widthOf(count + beside) - 16);
    say(label, right, y + 4);
    right += widthOf(label) + 5;
  }
  if (!outline && box.parents.length) {
    say(fitted(box.label, x - r - from - 2), from, y - 5);
    say(beside, x - r - 3, y + 11, { class: "value", "text-anchor": "end" });
  } else if (!box.answer) {
    say(beside, right + widthOf(count) + 4, outline ? y + 4 : y + 11, { class: "value" });
  }
  group.append(dot, svg("title", {}, [n.label, box.count, ...factsOf(n)].filter(Boolean).join(" · ")));
  if (count || state.open.has(n.id)) {
    const beneath = outline || box.answer;
    const badge = svg("text", { x: right, y: beneath ? y + 4 : y - 4, class: "count" }, count || "−");
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
    const { label, text } = box.nodes[0];
    for (const n of side.nodes) if (n.label === label && n.text === text) state.open.delete(n.id);
  }
  render(shown[state.at]);
}

const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-weight"];

// color-mix comes out as color(srgb …), which only browsers read
function plainColour(value) {
  if (!value.startsWith("color(")) return value;
  const [r, g, b] = value.match(/[\d.]+/g).map(share => Math.round(255 * share));
  return `rgb(${r}, ${g}, ${b})`;
}

// A file of its own, with the colours that the page has now.
function saveSvg(picture, name) {
  const copy = picture.cloneNode(true), shapes = "path, circle, rect, text";
  const live = [...picture.querySelectorAll(shapes)];
  [...copy.querySelectorAll(shapes)].forEach((node, i) => {
    const style = getComputedStyle(live[i]);
    for (const key of LOOKS) node.setAttribute(key, plainColour(style.getPropertyValue(key)));
    node.removeAttribute("class");
    node.removeAttribute("style");
  });
  for (const text of copy.querySelectorAll("text")) text.setAttribute("paint-order", "stroke");
  copy.setAttribute("font-family", "system-ui, sans-serif");
  const fill = getComputedStyle(picture.parentNode).backgroundColor;
  copy.prepend(svg("rect", { width: "100%", height: "100%", fill }));
  const text = new XMLSerializer().serializeToString(copy);
  const download = name.replace(/[^\w.-]+/g, "_") + ".svg";
  el("a", { href: "data:image/svg+xml," + encodeURIComponent(text), download }).click();
}

// ---------------------------------------------------------------- a question, turn by turn

const TOLD = new Set(["id", "parents", "text", "observation", "label", "sampled", "how", "clipped", "ids",
  "observation_ids", "logprobs", "pieces"]); // (pieces: of earlier runs)
const PLAIN = ["role", "problem", "stopped by", "tokens", "entropy"]; // where `how` tells the others

function factsOf(n) {
  const shown = n.how ? PLAIN.map(key => [key, n[key]]) : Object.entries(n).filter(([key]) => !TOLD.has(key));
  const known = shown.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return known.map(([key, value]) => `${key} ${number(value)}`);
}

function observedText(text, evidence) {
  const pre = el("pre", { class: "seen" }), cuts = [];
  text = text.trim();
  for (const e of evidence || []) {
    let at = e ? text.indexOf(e) : -1;
    for (; at >= 0; at = text.indexOf(e, at + e.length)) cuts.push([at, at + e.length]);
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
  const link = { title: "link to this turn", class: "anchor" };
  const anchor = button("#", () => pick(at, state.paths[at], n.id), link);
  const lines = (n.how || []).map(line => el("p", {}, String(line)));
  const how = lines.length ? el("div", { class: "how" }, ...lines) : null;
  const id = `turn-${at}-${n.id}`;
  return el("section", { class: id === state.picked ? "turn picked" : "turn", id },
    el("header", {}, el("b", {}, n.label || `turn ${k + 1}`), ...facts, anchor),
    how, n.text ? el("pre", {}, n.text) : null, n.observation ? observedText(n.observation, item.evidence) : null);
}

function legendOf(side, graph, item) {
  const has = key => side.nodes.some(n => n[key] !== undefined && n[key] !== null);
  const parts = [];
  if (has("advantage")) parts.push(el("span", {}, "advantage: low", el("span", { class: "swatch" }), "high"));
  if (has("entropy")) parts.push(el("span", {}, "size: entropy"));
  if (side.beside) parts.push(el("span", {}, `number: ${side.beside}, of equal turns their mean`));
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
    const pressed = box.ends.includes(state.paths[at]);
    const about = { "aria-pressed": pressed, title: outcome };
    made.push(button(dotOf(outcome), () => pick(at, box.ends[0]), about));
    last(made).append(` ${number(first.reward)}`, box.ends.length > 1 ? ` ×${box.ends.length}` : "");
  }
  if (made.length < 2) return "";
  return el("div", { class: "paths", role: "group", "aria-label": "trajectories" }, ...made);
}

function sideOf(item, at, width) {
  const side = item.sides[at], t = side.trajectories[state.paths[at]], outcome = COLOUR[outcomeOf(t)];
  const byId = new Map(side.nodes.map(n => [n.id, n])), parts = [];
  if (side.name) parts.push(el("h3", {}, side.name));
  if (side.nodes.length > t.path.length || side.nodes.some(n => n.parents.length > 1)) {
    const graph = el("div", { class: "graph" }, draw(side, at, width));
    parts.push(graph, legendOf(side, graph, item), buttonsOf(side, at));
  }
  parts.push(el("div", { class: "why " + outcome },
    el("p", {}, el("b", { class: outcome }, outcomeOf(t)), ` · reward ${number(t.reward)}`,
      ` · answer: ${t.answer || "none"}`),
    ...(t.why || []).map(line => el("p", { class: "facts" }, String(line)))));
  const turns = t.path.map(id => byId.get(id)).filter(n => n && (n.text || n.observation));
  parts.push(...turns.map((n, k) => turnOf(n, k, item, at)));
  return el("div", { class: "side" }, ...parts);
}

function render(item) {
  const scroll = item === render.item ? $("main").scrollTop : 0;
  render.item = item;
  const { type, hops, id, where, step } = item;
  const gold = (item.gold || []).join(" | ");
  const known = Object.entries({ gold, type, hops: hops || "", id, in: where, step });
  const facts = el("div", { class: "facts" }, ...known.filter(([, value]) => (value ?? "") !== "").map(
    ([name, value]) => el("span", {}, name + " ", el("b", {}, number(value)))));
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
  if (shown.length) show(Math.min(shown.length - 1, Math.max(0, state.at + by)));
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
  $("search").addEventListener("input", () => {
    state.text = $("search").value.trim().toLowerCase();
    filter();
  });
  for (const key of Object.keys(CHOICES)) $(key).addEventListener("change", () => filter());
  $("load").addEventListener("change", () => load([...$("load").files]));
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", follow);
  addEventListener("resize", () => shown.length && render(shown[state.at]));
  fillFilters();
  filter(items[telling(items)]);
  follow();
}

start();
