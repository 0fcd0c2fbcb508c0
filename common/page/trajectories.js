"use strict";
// Everything that came from a model or a passage enters the page as text nodes; nothing is parsed as HTML.
const data = JSON.parse(document.getElementById("data").textContent), groups = data.groups;
const $ = id => document.getElementById(id);
const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) key === "class" ? node.className = value : key in node && key !== "list" ? node[key] = value : node.setAttribute(key, value);
  node.append(...children.filter(c => c !== null && c !== undefined));
  return node;
};
const svg = (tag, attributes = {}, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const number = (x, digits = 3) => typeof x === "number" ? (Number.isInteger(x) ? String(x) : x.toFixed(digits)) : x === null || x === undefined ? "" : typeof x === "object" ? JSON.stringify(x) : String(x);
const outcomeOf = t => t.problem ? "bad format" : t.correct ? "right" : "wrong";
const colour = { "right": "good", "wrong": "bad", "bad format": "warn" };
const state = { outcome: "", where: "", hops: "", type: "", text: "", shown: [], at: 0, path: 0, shade: false };
for (const g of groups) g.haystack = [g.question, ...(g.gold || []), ...g.trajectories.map(t => t.answer), ...g.nodes.flatMap(n => [n.text, n.observation])].join("\n").toLowerCase();

function fillSelect(id, label, values) {
  $(id).append(el("option", { value: "" }, label), ...values.map(v => el("option", { value: String(v) }, String(v))));
  $(id).disabled = values.length < 2;
  $(id).addEventListener("change", () => { state[id] = $(id).value; filter(); });
}
const distinct = key => [...new Set(groups.map(g => g[key]).filter(v => v !== undefined && v !== null && v !== ""))].sort((a, b) => typeof a === "number" ? a - b : String(a).localeCompare(String(b)));

function filter(keep) {
  const current = keep ? state.shown[state.at] : null;
  state.shown = groups.filter(g => (!state.outcome || g.trajectories.some(t => outcomeOf(t) === state.outcome)) && (!state.where || g.where === state.where) &&
    (!state.hops || String(g.hops) === state.hops) && (!state.type || g.type === state.type) && (!state.text || g.haystack.includes(state.text)));
  $("count").textContent = `${state.shown.length} of ${groups.length} questions, ${state.shown.reduce((n, g) => n + g.trajectories.length, 0)} trajectories`;
  $("list").replaceChildren(...state.shown.map((g, i) => {
    const tally = {};
    for (const t of g.trajectories) tally[outcomeOf(t)] = (tally[outcomeOf(t)] || 0) + 1;
    const marks = Object.entries(tally).map(([name, n]) => el("span", { class: colour[name], title: name }, el("span", { class: "dot " + colour[name] }), n > 1 || g.trajectories.length > 1 ? String(n) : name));
    const item = el("li", { role: "option", id: "item" + i }, g.question, el("small", {}, ...marks, ...[g.where, g.step ? `step ${g.step}` : "", g.hops ? `${g.hops} hop${g.hops > 1 ? "s" : ""}` : "", g.type].filter(Boolean).map(v => el("span", {}, v))));
    item.addEventListener("click", () => show(i));
    return item;
  }));
  for (const button of $("outcome").children) button.setAttribute("aria-pressed", button.value === state.outcome);
  const again = state.shown.indexOf(current);
  if (state.shown.length) show(again < 0 ? 0 : again); else $("main").replaceChildren(el("p", { class: "facts" }, "No question passes the filters."));
}

function show(i, path) {
  const old = $("item" + state.at);
  if (old) old.setAttribute("aria-selected", false);
  state.at = i;
  const g = state.shown[i], item = $("item" + i);
  item.setAttribute("aria-selected", true);
  $("list").setAttribute("aria-activedescendant", item.id);
  item.scrollIntoView({ block: "nearest" });
  const wanted = state.outcome ? g.trajectories.findIndex(t => outcomeOf(t) === state.outcome) : 0;
  state.path = path === undefined ? Math.max(0, wanted) : path;
  render(g);
}

// ---- the graph: depth from left to right; circles are turns, squares stand for what did not come from sampling (a root, a worker's report)
const advantageColour = a => a === null || a === undefined ? "var(--seen)" : a >= 0 ? `color-mix(in srgb, #2a78d6 ${Math.min(100, 12 + 60 * a)}%, var(--panel))` : `color-mix(in srgb, #e0562c ${Math.min(100, 12 - 60 * a)}%, var(--panel))`;

const short = text => text.length > 25 ? text.slice(0, 24) + "…" : text;

function draw(g) {
  const nodes = g.nodes, byId = new Map(nodes.map(n => [n.id, n])), children = new Map(nodes.map(n => [n.id, []])), depth = new Map();
  for (const n of nodes) for (const p of n.parents) if (children.has(p)) children.get(p).push(n.id);
  const deep = n => { if (!depth.has(n.id)) { depth.set(n.id, 0); depth.set(n.id, Math.max(-1, ...n.parents.filter(p => byId.has(p)).map(p => deep(byId.get(p)))) + 1); } return depth.get(n.id); };
  nodes.forEach(deep);
  const y = new Map(), placed = new Set();
  let next = 0;
  const place = id => {
    if (placed.has(id)) return;
    placed.add(id);
    const below = children.get(id).filter(c => !placed.has(c));
    below.forEach(place);
    const rows = below.map(c => y.get(c)).filter(v => v !== undefined);
    y.set(id, rows.length ? (rows[0] + rows[rows.length - 1]) / 2 : next++);
  };
  nodes.filter(n => !n.parents.some(p => byId.has(p))).forEach(n => place(n.id));
  const gap = next > 40 ? 18 : 24, wide = 190, left = 24, size = n => n.entropy === null || n.entropy === undefined ? 6 : Math.min(gap / 2 - 1, 3.5 + 11 * Math.sqrt(Math.max(0, n.entropy)));
  const X = n => left + depth.get(n.id) * wide, Y = n => 20 + y.get(n.id) * gap, on = new Set(g.trajectories[state.path].path);
  const picture = svg("svg", { width: left + (Math.max(...depth.values()) + 1) * wide, height: 30 + next * gap, role: "img", "aria-label": `${nodes.length} nodes, ${g.trajectories.length} trajectories` });
  for (const n of nodes) for (const p of n.parents) if (byId.has(p)) {
    const q = byId.get(p), middle = (X(q) + X(n)) / 2;
    picture.append(svg("path", { d: `M${X(q)},${Y(q)}C${middle},${Y(q)} ${middle},${Y(n)} ${X(n)},${Y(n)}`, class: on.has(n.id) && on.has(p) ? "on" : "" }));
  }
  for (const n of nodes) {
    const ends = g.trajectories.findIndex(t => t.path[t.path.length - 1] === n.id), r = size(n), shape = n.sampled === false
      ? svg("rect", { x: X(n) - 6, y: Y(n) - 6, width: 12, height: 12, rx: 2 }) : svg("circle", { cx: X(n), cy: Y(n), r });
    shape.setAttribute("style", `fill: ${advantageColour(n.advantage)}`);
    const label = [n.label, n.entropy !== undefined ? `entropy ${number(n.entropy)}` : "", n.advantage !== undefined ? `advantage ${number(n.advantage)}` : "", n.value !== undefined ? `value ${number(n.value)}` : ""].filter(Boolean).join(" · ");
    const node = svg("g", { class: on.has(n.id) ? "on" : "" }, shape);
    node.append(svg("title", {}, label));
    if (ends >= 0) node.append(svg("text", { x: X(n) + r + 5, y: Y(n) + 4, style: `fill: var(--${colour[outcomeOf(g.trajectories[ends])]})` }, short(g.trajectories[ends].answer || outcomeOf(g.trajectories[ends]))));
    else if (n.label) node.append(svg("text", { x: X(n) + r + 4, y: Y(n) - 5 }, short(n.label.replace(/^search: /, ""))));
    node.addEventListener("click", () => { const via = g.trajectories.findIndex(t => t.path.includes(n.id)); if (via >= 0) show(state.at, ends >= 0 ? ends : g.trajectories[state.path].path.includes(n.id) ? state.path : via); });
    picture.append(node);
  }
  return picture;
}

// ---- one trajectory, turn by turn
const shadeOf = lp => typeof lp !== "number" ? "" : `background: color-mix(in srgb, #e0562c ${Math.min(70, -lp * 28)}%, transparent)`;

function sampledText(n) {
  const pre = el("pre", {});
  if (state.shade && n.pieces && n.logprobs) n.pieces.forEach((piece, i) => {
    const token = el("span", { title: `log-prob ${number(n.logprobs[i])}, probability ${typeof n.logprobs[i] === "number" ? number(Math.exp(n.logprobs[i])) : ""}` }, piece);
    token.setAttribute("style", shadeOf(n.logprobs[i]));
    pre.append(token);
  });
  else pre.append(n.text || "");
  return pre;
}

function observedText(text, evidence) {
  const pre = el("pre", { class: "seen" }), cuts = [];
  for (const e of evidence || []) for (let at = e ? text.indexOf(e) : -1; at >= 0; at = text.indexOf(e, at + e.length)) cuts.push([at, at + e.length]);
  cuts.sort((a, b) => a[0] - b[0]);
  let last = 0;
  for (const [a, b] of cuts) if (a >= last) { pre.append(text.slice(last, a), el("mark", { title: "gold evidence" }, text.slice(a, b))); last = b; }
  pre.append(text.slice(last));
  return pre;
}

function render(g) {
  const t = g.trajectories[state.path], byId = new Map(g.nodes.map(n => [n.id, n])), known = new Set(["id", "parents", "text", "pieces", "logprobs", "observation", "label", "sampled"]);
  const fact = (name, value) => value === undefined || value === null || value === "" ? null : el("span", {}, name + " ", el("b", {}, number(value)));
  const paths = el("div", { class: "paths", role: "group", "aria-label": "trajectories" });
  if (g.trajectories.length > 1) paths.append(...g.trajectories.map((other, i) => {
    const button = el("button", { "aria-pressed": i === state.path, title: outcomeOf(other) }, el("span", { class: "dot " + colour[outcomeOf(other)] }), ` ${number(other.reward)}`);
    button.setAttribute("aria-pressed", i === state.path);
    button.addEventListener("click", () => show(state.at, i));
    return button;
  }));
  const turns = t.path.map(id => byId.get(id)).filter(n => n && (n.text || n.observation)).map((n, k) => el("section", { class: "turn" },
    el("header", {}, el("b", {}, n.label || `turn ${k + 1}`), ...Object.entries(n).filter(([key]) => !known.has(key)).map(([key, value]) => fact(key, value))),
    n.text ? sampledText(n) : null, n.observation ? observedText(n.observation, g.evidence) : null));
  const graph = g.nodes.length > t.path.length || g.nodes.some(n => n.parents.length > 1) ? [el("div", { id: "graph" }, draw(g)), el("div", { class: "legend" },
    el("span", {}, "size: entropy"), el("span", {}, "colour: advantage, low", Object.assign(el("span", { class: "swatch" }), { style: "background: linear-gradient(90deg, #e0562c, var(--panel), #2a78d6)" }), "high"),
    el("span", {}, "click a node for a trajectory through it"))] : [];
  $("main").replaceChildren(el("h2", {}, g.question),
    el("div", { class: "facts" }, fact("gold", (g.gold || []).join(" | ")), fact("type", g.type), fact("hops", g.hops), fact("id", g.id), fact("", g.where), fact("step", g.step)), ...graph, paths,
    el("div", { class: "why " + colour[outcomeOf(t)] }, el("p", {}, el("b", { class: colour[outcomeOf(t)] }, outcomeOf(t)), ` · reward ${number(t.reward)} · answer: ${t.answer || "none"}`),
      ...(t.why || []).map(line => el("p", { class: "facts" }, line))), ...turns);
  $("main").scrollTop = 0;
}

// ---- start
$("title").textContent = data.title;
$("summary").textContent = data.summary;
$("curves-image").src = data.curves || "";
$("open-curves").hidden = !data.curves;
$("config-table").append(...Object.entries(data.config).map(([key, value]) => el("tr", {}, el("td", {}, key), el("td", {}, number(value, 6)))));
for (const [value, label] of [["", "all"], ["right", "right"], ["wrong", "wrong"], ["bad format", "bad format"]]) {
  const button = el("button", { value }, label);
  button.addEventListener("click", () => { state.outcome = value; filter(true); });
  $("outcome").append(button);
}
fillSelect("where", "everywhere", distinct("where"));
fillSelect("hops", "all hops", distinct("hops"));
fillSelect("type", "all types", distinct("type"));
$("search").addEventListener("input", () => { state.text = $("search").value.trim().toLowerCase(); filter(); });
for (const name of ["curves", "config", "help"]) { $("open-" + name).addEventListener("click", () => $(name).showModal()); $(name).addEventListener("click", e => e.target === $(name) && $(name).close()); }
const toggleShade = () => { state.shade = !state.shade; $("shade").setAttribute("aria-pressed", state.shade); if (state.shown.length) render(state.shown[state.at]); };
$("shade").addEventListener("click", toggleShade);
document.addEventListener("keydown", event => {
  if (event.target === $("search")) {
    if (event.key === "Escape") { $("search").value = state.text = ""; filter(true); event.preventDefault(); }
    if (event.key === "Escape" || event.key === "Enter") $("search").blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || event.target.tagName === "SELECT") return;
  const g = state.shown[state.at], step = (n, size) => Math.min(size - 1, Math.max(0, n)), outcome = { 0: "", 1: "right", 2: "wrong", 3: "bad format" };
  if (g && (event.key === "j" || event.key === "ArrowDown")) show(step(state.at + 1, state.shown.length));
  else if (g && (event.key === "k" || event.key === "ArrowUp")) show(step(state.at - 1, state.shown.length));
  else if (g && (event.key === "l" || event.key === "ArrowRight")) show(state.at, step(state.path + 1, g.trajectories.length));
  else if (g && (event.key === "h" || event.key === "ArrowLeft")) show(state.at, step(state.path - 1, g.trajectories.length));
  else if (event.key in outcome) { state.outcome = outcome[event.key]; filter(true); }
  else if (event.key === "/") $("search").focus();
  else if (event.key === "s") toggleShade();
  else if (event.key === "c" && data.curves) $("curves").showModal();
  else if (event.key === "?") $("help").showModal();
  else return;
  event.preventDefault();
});
filter();
