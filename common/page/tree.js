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
  const tall = outline ? 20 : Math.max(28, Math.min(34, .44 * innerHeight / rows));
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
  const values = box.nodes.map(m => m[side.beside?.[0]]);
  let beside = number(mean(values), 2);
  if (new Set(values.map(value => number(value))).size > 1) beside += ` mean of ${values.length}`;
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
