// ---------------------------------------------------------------- curves
//
// {panels: {title: {key: label}}, runs: {name: rows of metrics.jsonl}}: a small picture per panel. Of one run a
// key is a colour; of several a run is one, and a key a dash. A click leads to what was sampled at that step.

const SIZE = { width: 320, height: 150, left: 42, right: 310, top: 8, bottom: 130 };
const MANY = 60; // steps; of more the line is a mean over the steps around, and the data is thin behind it
const DASHES = ["", "5 3", "1.5 3", "7 3 1.5 3"];
const SHARES = ["answers", "format", "groups without spread"]; // from 0 to 1

function linesOf(keys, runs) {
  const several = Object.keys(runs).length > 1, lines = [];
  Object.entries(runs).forEach(([run, rows], i) => Object.entries(keys).forEach(([key, label], k) => {
    const there = rows.filter(row => typeof row[key] === "number"), ends = ["_low", "_high"].map(end => key + end);
    const points = there.map(row => [row.step, row[key]]);
    const bars = there.filter(row => ends.every(end => typeof row[end] === "number"));
    const line = { points, bars: bars.map(row => [row.step, ...ends.map(end => row[end])]), dots: key.startsWith("eval/"), name: label, colour: `var(--line${k % 7})`, dash: "" };
    if (several) {
      line.name = Object.keys(keys).length > 1 ? `${run}: ${label}` : run;
      line.colour = `var(--line${i % 7})`;
      line.dash = DASHES[k % DASHES.length];
    }
    if (points.length) lines.push(line);
  }));
  return lines;
}

// Round numbers from low to high, about so many; of steps whole ones.
function ticks(low, high, count, least = 0) {
  const apart = (high - low) / count, power = 10 ** Math.floor(Math.log10(apart));
  const by = Math.max(least, power * [1, 2, 5, 10].find(factor => factor * power >= .999 * apart));
  const found = [];
  for (let n = Math.ceil(low / by - 1e-6); n * by <= high + 1e-6 * by; n++) found.push(n * by);
  return found.map(tick => Number(tick.toPrecision(6)));
}

function smoothed(points) {
  const half = Math.floor(points.length / MANY);
  const around = i => points.slice(Math.max(0, i - half), i + half + 1).map(point => point[1]);
  return points.map(([step], i) => [step, mean(around(i))]);
}

function panelOf(title, keys, runs) {
  const lines = linesOf(keys, runs), all = lines.flatMap(line => line.points);
  const steps = [...new Set(all.map(point => point[0]))].sort((a, b) => a - b);
  const values = [...all.map(point => point[1]), ...lines.flatMap(line => line.bars.flatMap(bar => bar.slice(1)))];
  const first = steps[0], end = Math.max(last(steps), first + 1);
  let low = Math.min(...values), high = Math.max(...values);
  if (low >= 0 && !title.includes("ratio")) low = 0;
  if (SHARES.includes(title)) high = Math.max(1, high);
  if (low === high) high = low + 1;
  const { width, height, left, right, top, bottom } = SIZE;
  const x = step => left + (right - left) * (step - first) / (end - first);
  const y = value => bottom - (bottom - top) * (value - low) / (high - low);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const put = (tag, attributes, ...text) => picture.append(svg(tag, attributes, ...text));
  for (const value of ticks(low, high, 4)) {
    put("path", { d: `M${left},${y(value)}H${right}`, class: "grid" });
    put("text", { x: left - 5, y: y(value) + 3, "text-anchor": "end" }, String(value));
  }
  for (const step of ticks(first, end, 5, 1)) {
    put("text", { x: x(step), y: height - 5, "text-anchor": "middle" }, String(step));
  }
  put("text", { x: left - 10, y: height - 5, "text-anchor": "end" }, "step");
  for (const line of lines) {
    const many = line.points.length > MANY && !line.dots, style = `stroke: ${line.colour}`;
    const draw = (points, more) => put("polyline", { ...more, style, "stroke-dasharray": line.dash,
      points: points.map(([step, value]) => `${x(step)},${y(value)}`).join(" ") });
    if (many) draw(line.points, { opacity: .3 });
    draw(many ? smoothed(line.points) : line.points);
    if (!line.dots) continue;
    for (const [step, from, to] of line.bars) put("path", { d: `M${x(step)},${y(from)}V${y(to)}`, style });
    for (const [step, value] of line.points) put("circle", { cx: x(step), cy: y(value), r: 3, style });
  }
  const told = pointed(picture, steps, x, lines);
  const legend = lines.map(line => el("span", { style: `color: ${line.colour}` }, line.name));
  if (legend.length < 2) legend.pop();
  return el("figure", {}, el("figcaption", {}, el("b", {}, title), ...legend), picture, told);
}

// What the pointer is on, in words; a click goes there.
function pointed(picture, steps, x, lines) {
  const cursor = svg("path", { class: "cursor" }), told = el("small", {}, "\u00a0");
  picture.append(cursor);
  const stepAt = event => {
    const box = picture.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * SIZE.width;
    return steps.reduce((best, step) => Math.abs(x(step) - at) < Math.abs(x(best) - at) ? step : best);
  };
  picture.addEventListener("pointermove", event => {
    const step = stepAt(event), here = [];
    for (const line of lines) {
      const point = line.points.find(point => point[0] === step);
      if (point) here.push(`${line.name} ${number(point[1])}`);
    }
    cursor.setAttribute("d", `M${x(step)},${SIZE.top}V${SIZE.bottom}`);
    told.textContent = `step ${step}: ${here.join(", ")}`;
  });
  picture.addEventListener("click", event => toStep(stepAt(event)));
  return told;
}

// The samples of a step, or of the nearest one that the page holds.
function toStep(step) {
  const sampled = items.filter(item => item.where === "training" && typeof item.step === "number");
  if (!sampled.length) return;
  const off = item => Math.abs(item.step - step);
  const nearest = sampled.reduce((best, item) => off(item) < off(best) ? item : best);
  $("curves").close();
  if (!shown.includes(nearest)) clear();
  go(shown.indexOf(nearest));
}
