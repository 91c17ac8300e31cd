"use strict";
// Draws the charts. Values show under the pointer, or step by step with the arrow keys. Dragging
// zooms all charts to these steps; a double click or Escape shows all steps again. A switch makes
// the vertical axis logarithmic where all values are above 0.
const { several, marked, charts } = JSON.parse(document.getElementById("numbers").textContent);
const parent = document.querySelector(".charts");
const [first, last] = extent(charts.flatMap(({ series }) => series.flatMap(({ x }) => [x[0], x.at(-1)])));
const whole = [first < 0.05 * last ? 0 : first, last > first ? last : first + 1];
let view = whole;
const redraws = [];

// The lowest and the highest value.
function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

// Where a value lies in a range, from 0 to 1. Halves avoid overflow.
function part(value, [low, high]) {
  return Math.max(-1e3, Math.min(1e3, (value / 2 - low / 2) / (high / 2 - low / 2)));
}

function nearest(list, step) {
  return list.reduce((best, x, index) => (Math.abs(x - step) < Math.abs(list[best] - step) ? index : best), 0);
}

function short(value, digits) {
  const size = Math.abs(value);
  if (size >= 1e15 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(3)).toExponential();
  const [unit, letter] = [[1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([least]) => size >= least && size < 1e15) ?? [1, ""];
  return Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(digits)) + letter;
}

function text(value, percent) {
  if (value === null) return "–";
  return percent ? (value * 100).toFixed(2) + " %" : String(Number(value.toPrecision(4)));
}

function add(parent, name, className, content = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = content;
  return parent.appendChild(element);
}

// The smallest of 1, 2 and 5 times a power of ten that divides a range into at most five parts.
function tickStep([low, high]) {
  const rough = Math.max(high / 5 - low / 5, 1e-300), power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999999);
}

// Round numbers in a range.
function ticks([low, high]) {
  const step = tickStep([low, high]), all = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) all.push(Number((at * step).toPrecision(12)));
  return all;
}

// 1, 2 and 5 times the powers of ten between two logarithms; powers alone where these are many, and
// round numbers where these are few.
function logTicks([low, high]) {
  const factors = high - low > 3 ? [1] : [1, 2, 5], all = [];
  for (let power = Math.floor(low); power <= high; power++) for (const factor of factors) all.push(power + Math.log10(factor));
  const seen = all.filter((at) => at >= low - 1e-9 && at <= high + 1e-9);
  if (seen.length < 3) return ticks([10 ** low, 10 ** high]).map(Math.log10);
  return seen.filter((_, index) => index % Math.ceil(seen.length / 7) === 0);
}

// A range with round ends around these values; from 0 if the curve keeps most of the height.
function around([low, high], percent) {
  const isPart = percent && low >= 0 && high <= 1;
  if (low > 0 && low < 0.5 * high) low = 0;
  // Nearly equal values: at least 1 % of their size, so that labels stay short.
  const least = low === 0 && high === 0 ? 2 : Math.max(Math.abs(low), Math.abs(high)) / 100;
  const more = Math.max(0, least / 2 - (high / 2 - low / 2)), step = tickStep([low - more, high + more]);
  const round = [Math.floor((low - more) / step) * step, Math.ceil((high + more) / step) * step];
  if (isPart) return [Math.max(0, round[0]), Math.min(1, round[1])];
  return round.every(Number.isFinite) ? round : [low, high];
}

function zoom(steps) {
  view = steps;
  for (const redraw of redraws) redraw();
}

for (const [index, { title, unit, percent, series }] of charts.entries()) {
  const figure = add(parent, "figure", "chart"), caption = add(figure, "figcaption", ""), frame = add(figure, "div", "frame");
  const [ys, plot, xs] = ["ys", "plot", "xs"].map((name) => add(frame, "div", name));
  figure.id = "chart-" + index;
  add(caption, "h3", "", title);
  add(caption, "span", "unit", unit);
  const legend = add(caption, "ul", "legend");
  if (series.length > 1) for (const { name, color } of series) add(legend, "li", "s" + color, name);
  const paths = series.map(({ color }) => `<path class="line s${color}"/><path class="dots s${color}"/>`).join("");
  plot.innerHTML = `<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true"><path class="grid"/><path class="mark"/>${paths}</svg>`;
  const [grid, marks, ...curves] = plot.querySelectorAll("path");
  const cursor = add(plot, "div", "cursor"), band = add(plot, "div", "band"), tip = add(plot, "div", "tip");
  const dots = series.map(({ color }) => add(plot, "div", "dot s" + color));
  const every = several ? [...new Set(series.flatMap(({ x }) => x))].sort((a, b) => a - b) : series[0].x;
  let steps = every, at = null, from = null, heights = [0, 1], isLog = false;
  tip.setAttribute("role", "status");
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", title + " by step; the arrow keys show values");
  plot.tabIndex = 0;

  // A value on the axis: itself, or its logarithm.
  const height = (value) => (isLog ? Math.log10(value) : value);

  function draw() {
    steps = every.filter((step) => step >= view[0] && step <= view[1]);
    const seen = extent(series.flatMap(({ x, y }) => y.filter((value, place) => value !== null && x[place] >= view[0] && x[place] <= view[1]).map(height)));
    const room = (seen[1] - seen[0]) * 0.05 || 0.1;
    if (seen[0] <= seen[1]) heights = isLog ? [seen[0] - room, seen[1] + room] : around(seen, percent);
    ys.replaceChildren();
    xs.replaceChildren();
    const rows = (isLog ? logTicks : ticks)(heights), left = (step) => part(step, view) * 1000, top = (value) => 1000 - part(value, heights) * 1000;
    for (const value of rows) {
      const number = isLog ? 10 ** value : value;
      add(ys, "span", "", percent ? Number((number * 100).toPrecision(6)) + "%" : short(number, 6)).style.bottom = part(value, heights) * 100 + "%";
    }
    for (const step of ticks(view)) add(xs, "span", "", step < 1e5 ? step.toLocaleString("en") : short(step, 6)).style.left = part(step, view) * 100 + "%";
    add(xs, "i", "", "step");
    grid.setAttribute("d", rows.map((value) => `M0 ${top(value)}h1000`).join(""));
    marks.setAttribute("d", marked.map(([step]) => `M${left(step)} 0V1000`).join(""));
    for (const [number, { x, y, dots }] of series.entries()) {
      const at = (place) => left(x[place]).toFixed(1) + " " + top(height(y[place])).toFixed(1);
      const points = (write) => y.map((value, place) => (value === null ? "" : write(place))).join("");
      curves[2 * number].setAttribute("d", points((place) => (place > 0 && y[place - 1] !== null ? "L" : "M") + at(place)));
      if (dots) curves[2 * number + 1].setAttribute("d", points((place) => "M" + at(place) + "h0"));
    }
    show(null);
  }
  redraws.push(draw);

  if (!percent && series.every(({ y }) => y.every((value) => value === null || value > 0))) {
    const button = add(caption, "button", "log", "log");
    button.type = "button";
    button.title = "logarithmic axis";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      isLog = !isLog;
      button.setAttribute("aria-pressed", String(isLog));
      draw();
    });
  }

  function show(index) {
    at = index;
    cursor.hidden = tip.hidden = index === null;
    for (const dot of dots) dot.hidden = true;
    if (index === null || steps.length === 0) return;
    const step = steps[index], left = part(step, view);
    tip.replaceChildren();
    add(tip, "b", "", "step " + step.toLocaleString("en"));
    for (const [number, { name, color, x, y }] of series.entries()) {
      const place = nearest(x, step), row = add(tip, "span", "s" + color), dot = dots[number];
      add(row, "i", "", (name || title) + (x[place] === step ? "" : ", step " + x[place].toLocaleString("en")));
      add(row, "em", "", text(y[place], percent));
      dot.hidden = y[place] === null || x[place] < view[0] || x[place] > view[1];
      dot.style.left = part(x[place], view) * 100 + "%";
      dot.style.bottom = part(height(y[place]), heights) * 100 + "%";
    }
    cursor.style.left = left * 100 + "%";
    // Beside the line, on the side with more room.
    const room = plot.clientWidth - tip.offsetWidth, beside = left * plot.clientWidth + (left < 0.5 ? 12 : -tip.offsetWidth - 12);
    tip.style.left = Math.max(0, Math.min(room, beside)) + "px";
  }

  // Where the pointer is, from 0 to 1, and a step there.
  function place(event) {
    const box = plot.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  }
  const stepAt = (part) => view[0] + part * (view[1] - view[0]);
  function point(event) {
    const here = place(event);
    show(nearest(steps, stepAt(here)));
    band.hidden = from === null;
    band.style.left = Math.min(from, here) * 100 + "%";
    band.style.width = Math.abs(here - from) * 100 + "%";
  }
  plot.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) from = place(event);
    point(event);
  });
  plot.addEventListener("pointermove", point);
  addEventListener("pointerup", (event) => {
    const [begin, end] = [from, place(event)].sort((a, b) => a - b), ends = [stepAt(begin), stepAt(end)];
    const wasDragged = from !== null && (end - begin) * plot.clientWidth > 8;
    from = null;
    band.hidden = true;
    if (wasDragged && steps.filter((step) => step >= ends[0] && step <= ends[1]).length > 1) zoom(ends);
  });
  plot.addEventListener("dblclick", () => zoom(whole));
  plot.addEventListener("pointerleave", () => from === null && show(null));
  plot.addEventListener("blur", () => show(null));
  plot.addEventListener("keydown", (event) => {
    const last = steps.length - 1, stride = event.shiftKey ? 10 : 1;
    const next = {
      ArrowRight: Math.min(last, at === null ? 0 : at + stride),
      ArrowLeft: Math.max(0, at === null ? last : at - stride),
      Home: 0,
      End: last,
      Escape: null,
    }[event.key];
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (event.key === "Escape" && at === null) zoom(whole);
    show(next);
  });
  band.hidden = true;
  draw();
}
if (charts.length > 0) {
  const help = "Drag over a chart to zoom, double-click to see all steps; with keys, the arrows and Escape.";
  parent.before(add(parent, "p", "note", help));
  const marks = add(parent.parentElement, "ul", "legend marks");
  for (const [, text] of marked) add(marks, "li", "mark", text);
  parent.after(marks);
}

// A table that is wider than the screen fades out at the side where more of it is.
for (const table of document.querySelectorAll(".scroll")) {
  const fade = () => table.classList.toggle("more", table.scrollLeft + table.clientWidth < table.scrollWidth - 1);
  table.addEventListener("scroll", fade);
  addEventListener("resize", fade);
  fade();
}
// The charts have moved what the address names.
if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView({ behavior: "instant" });
