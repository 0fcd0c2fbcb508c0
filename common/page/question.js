// ---------------------------------------------------------------- a question, turn by turn

const TOLD = new Set(["id", "parents", "text", "observation", "label", "sampled", "how", "clipped", "ids",
  "observation_ids", "logprobs", "pieces"]); // (pieces: of earlier runs)
const PLAIN = ["role", "problem", "stopped by", "tokens", "entropy"]; // where `how` tells the others

function factsOf(n) {
  const shown = n.how ? PLAIN.map(key => [key, n[key]]) : Object.entries(n).filter(([key]) => !TOLD.has(key));
  const known = shown.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return known.map(([key, value]) => `${key} ${number(value)}`);
}

// What was observed is one page after the other, each with a head or a number; its title is where it begins.
const PAGES = /(?=\b(?:Page|Doc) \d+ ?[(:])|^(?=\[\d+\] )/m, HEAD = 18;

// A sentence is evidence on its own page alone: others may have the same words.
function observedText(text, evidence) {
  const pre = el("pre", { class: "seen" }), cuts = [];
  let start = 0;
  for (const page of text.trim().split(PAGES)) {
    for (const [title, sentence] of (evidence || []).filter(Array.isArray)) {
      const at = sentence ? page.indexOf(sentence) : -1, titled = page.indexOf(title);
      if (at >= 0 && titled >= 0 && titled < HEAD) cuts.push([start + at, start + at + sentence.length]);
    }
    start += page.length;
  }
  cuts.sort((a, b) => a[0] - b[0]);
  text = text.trim();
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
  const side = item.sides[at], key = side.beside?.[0];
  const alike = boxesOf(side).find(box => box.nodes.includes(n))?.nodes || [];
  const values = alike.map(m => m[key]).filter(value => typeof value === "number");
  if (new Set(values.map(value => number(value))).size > 1) {
    lines.push(el("p", {}, `one of ${values.length} equal turns; their mean is ${number(mean(values), 2)}`));
  }
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
  if (side.beside) parts.push(el("span", {}, `number: ${side.beside[1]}`));
  if (side.nodes.some(n => n.clipped)) parts.push(el("span", {}, "dashed: past the clip window"));
  if (graph.querySelector(".count")) parts.push(el("span", {}, "×n: n equal turns as one, with their mean; a click opens them"));
  for (const outcome of new Set(side.trajectories.map(outcomeOf))) parts.push(el("span", { class: COLOUR[outcome] }, outcome));
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
  return el("div", { class: "paths", role: "group", "aria-label": "trajectories" }, "rewards:", ...made);
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
  if (side.prompt) {
    const prompt = el("details", { class: "turn" }, el("summary", {}, "prompt: what the policy was told"),
      el("pre", {}, side.prompt));
    prompt.open = state.told;
    prompt.firstChild.addEventListener("click", () => state.told = !prompt.open);  // (it opens behind this)
    parts.push(prompt);
  }
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
  $("main").replaceChildren(el("h2", {}, item.plainly || item.question), facts, sides);
  if (item.plainly) facts.before(el("p", { class: "facts" }, `asked as: ${item.question}`));
  const columns = sides.clientWidth > 700 ? item.sides.length : 1;
  sides.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  const width = (sides.clientWidth - 18 * (columns - 1)) / columns - 2; // the graph's border
  sides.append(...item.sides.map((_, at) => sideOf(item, at, Math.floor(width))));
  if (sides.querySelector("mark")) facts.append(el("span", {}, el("mark", {}, "marked"), " gold evidence"));
  $("main").scrollTop = scroll;
}
