"use strict";
// Shows the values of a chart under the pointer, or step by step with the arrow keys. Dragging
// zooms all charts to these steps; a double click or Escape shows all steps again. A switch makes
// the vertical axis logarithmic where all values are above 0.
const { low, high, several, charts } = JSON.parse(document.getElementById("numbers").textContent);
let view = { low, high };
const redraws = [];

function nearest(list, step) {
  const closer = (best, x, index) => (Math.abs(x - step) < Math.abs(list[best] - step) ? index : best);
  return list.reduce(closer, 0);
}

function text(value, percent) {
  if (value === null) return "–";
  if (percent) return (value * 100).toFixed(2) + " %";
  return String(Number(value.toPrecision(4)));
}

function add(parent, name, className, content = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = content;
  return parent.appendChild(element);
}

// Positions are in percent of the plot, so that they hold at any size. Halves avoid overflow.
function across(value, from, to) {
  return ((value / 2 - from / 2) / (to / 2 - from / 2)) * 100 + "%";
}

function zoom(from, to) {
  view = { low: from, high: to };
  for (const redraw of redraws) redraw();
}

// Round numbers between two values, at most about six.
function ticks(from, to) {
  const rough = (to - from) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough), all = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-9; at += step) all.push(Number(at.toPrecision(12)));
  return all;
}

// 1, 2 and 5 times the powers of ten between two logarithms; powers alone where these are many, and
// round numbers where these are few.
function logTicks(from, to) {
  const factors = to - from > 3 ? [1] : [1, 2, 5], all = [];
  for (let power = Math.floor(from); power <= to; power++) for (const factor of factors) all.push(power + Math.log10(factor));
  const seen = all.filter((at) => at >= from - 1e-9 && at <= to + 1e-9);
  if (seen.length < 3) return ticks(10 ** from, 10 ** to).map(Math.log10);
  return seen.filter((_, index) => index % Math.ceil(seen.length / 7) === 0);
}

function tick(value, percent) {
  if (percent) return Number((value * 100).toPrecision(6)) + "%";
  return Math.abs(value) >= 1e5 ? Number((value / 1e3).toPrecision(6)) + "k" : String(Number(value.toPrecision(6)));
}

for (const { id, percent, bottom, top, series } of charts) {
  const plot = document.querySelector("#chart-" + id + " .plot"), frame = plot.parentElement;
  const [svg, xs, ys] = [plot.querySelector("svg"), frame.querySelector(".xs"), frame.querySelector(".ys")];
  const grid = svg.querySelector(".grid");
  const lines = series.map(({ color }) => [...svg.querySelectorAll(".line.s" + color + ", .dots.s" + color)]);
  const whole = { xs: [...xs.children], ys: [...ys.children], grid: grid.getAttribute("d") };
  const drawn = lines.map((paths) => paths.map((path) => path.getAttribute("d")));
  const cursor = add(plot, "div", "cursor"), band = add(plot, "div", "band"), tip = add(plot, "div", "tip");
  const dots = series.map(({ color }) => add(plot, "div", "dot s" + color));
  const every = several ? [...new Set(series.flatMap(({ x }) => x))].sort((a, b) => a - b) : series[0].x;
  let steps = every, at = null, from = null, heights = { bottom, top };
  tip.setAttribute("role", "status");
  plot.tabIndex = 0;

  // A value on the axis: itself, or its logarithm.
  let isLog = false, axis = { bottom, top };
  const height = (value) => (isLog ? Math.log10(value) : value);

  // The lowest and the highest value from one step to another, with room above and below.
  function range(from, to) {
    const seen = series.flatMap(({ x, y }) => y.filter((value, index) => value !== null && x[index] >= from && x[index] <= to).map(height));
    if (seen.length === 0) return axis;
    const least = Math.min(...seen), most = Math.max(...seen), room = (most - least) * 0.05 || (axis.top - axis.bottom) * 0.05;
    return { bottom: least - room, top: most + room };
  }
  function redraw() {
    const isWhole = view.low === low && view.high === high;
    steps = every.filter((step) => step >= view.low && step <= view.high);
    heights = isWhole ? axis : range(view.low, view.high);
    const x = (value) => ((value - low) / (high - low)) * 1000, y = (value) => 1000 - ((value - axis.bottom) / (axis.top - axis.bottom)) * 1000;
    const [left, above, below] = [x(view.low), y(heights.top), y(heights.bottom)];
    svg.setAttribute("viewBox", isWhole ? "0 0 1000 1000" : [left, above, x(view.high) - left, below - above].join(" "));
    const rows = (isLog ? logTicks : ticks)(heights.bottom, heights.top), columns = ticks(view.low, view.high);
    const isDrawn = isWhole && !isLog;
    grid.setAttribute("d", isDrawn ? whole.grid : rows.map((value) => "M0 " + y(value) + "h1000").join(""));
    xs.replaceChildren(...whole.xs);
    ys.replaceChildren(...whole.ys);
    if (!isDrawn) {
      ys.replaceChildren();
      for (const value of rows) add(ys, "span", "", tick(isLog ? 10 ** value : value, percent)).style.bottom = across(value, heights.bottom, heights.top);
    }
    if (!isWhole) {
      xs.replaceChildren(whole.xs.at(-1));
      for (const value of columns) add(xs, "span", "", tick(value, false)).style.left = across(value, view.low, view.high);
    }
    show(null);
  }
  if (!percent && series.every(({ y }) => y.every((value) => value === null || value > 0))) {
    const button = add(frame.parentElement.querySelector("figcaption"), "button", "log", "log");
    button.type = "button";
    button.title = "logarithmic axis";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      isLog = !isLog;
      button.setAttribute("aria-pressed", String(isLog));
      axis = { bottom, top };
      if (isLog) axis = range(low, high);
      series.forEach(({ x, y }, index) => {
        const at = (place) => [((x[place] - low) / (high - low)) * 1000, 1000 - ((height(y[place]) - axis.bottom) / (axis.top - axis.bottom)) * 1000];
        const points = (draw) => y.map((value, place) => (value === null ? "" : draw(place, at(place).join(" ")))).join("");
        const line = points((place, point) => (place > 0 && y[place - 1] !== null ? "L" : "M") + point), dots = points((_, point) => "M" + point + "h0");
        lines[index].forEach((path, kind) => path.setAttribute("d", !isLog ? drawn[index][kind] : path.classList.contains("dots") ? dots : line));
      });
      redraw();
    });
  }
  redraws.push(redraw);

  function show(index) {
    at = index;
    cursor.hidden = tip.hidden = index === null;
    for (const dot of dots) dot.hidden = true;
    if (index === null || steps.length === 0) return;
    const step = steps[index], x = ((step - view.low) / (view.high - view.low)) * plot.clientWidth;
    tip.replaceChildren();
    add(tip, "b", "", "step " + step.toLocaleString("en"));
    series.forEach(({ name, color, x: own, y }, index) => {
      const place = nearest(own, step), row = add(tip, "span", "s" + color), dot = dots[index];
      add(row, "i", "", name + (own[place] === step ? "" : ", step " + own[place].toLocaleString("en")));
      add(row, "em", "", text(y[place], percent));
      dot.hidden = y[place] === null || own[place] < view.low || own[place] > view.high;
      dot.style.left = across(own[place], view.low, view.high);
      dot.style.bottom = across(height(y[place]), heights.bottom, heights.top);
    });
    cursor.style.left = across(step, view.low, view.high);
    // Beside the line, on the side with more room.
    const width = tip.offsetWidth, left = x < plot.clientWidth / 2 ? x + 12 : x - width - 12;
    tip.style.left = Math.max(0, Math.min(plot.clientWidth - width, left)) + "px";
  }
  // Where the pointer is, from 0 to 1.
  function part(event) {
    const box = plot.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  }
  function stepAt(part) {
    return view.low + part * (view.high - view.low);
  }
  function point(event) {
    const here = part(event);
    show(nearest(steps, stepAt(here)));
    band.hidden = from === null;
    if (from === null) return;
    band.style.left = Math.min(from, here) * 100 + "%";
    band.style.width = Math.abs(here - from) * 100 + "%";
  }
  plot.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) from = part(event);
    point(event);
  });
  plot.addEventListener("pointermove", point);
  addEventListener("pointerup", (event) => {
    const [begin, end] = [from, part(event)].sort((a, b) => a - b);
    const wasDragged = from !== null && (end - begin) * plot.clientWidth > 8;
    from = null;
    band.hidden = true;
    const [first, last] = [stepAt(begin), stepAt(end)];
    if (wasDragged && steps.filter((step) => step >= first && step <= last).length > 1) zoom(first, last);
  });
  plot.addEventListener("dblclick", () => zoom(low, high));
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
    if (event.key === "Escape" && at === null) zoom(low, high);
    show(next);
  });
  band.hidden = true;
  show(null);
}
const curves = document.querySelector(".charts");
if (curves) {
  const help = "Drag over a chart to zoom, double-click to see all steps; with keys, the arrows and Escape.";
  curves.before(add(curves, "p", "note", help));
}

// A table that is wider than the screen fades out at the side where more of it is.
for (const table of document.querySelectorAll(".scroll")) {
  const fade = () => table.classList.toggle("more", table.scrollLeft + table.clientWidth < table.scrollWidth - 1);
  table.addEventListener("scroll", fade);
  addEventListener("resize", fade);
  fade();
}
