"use strict";
// Shows the values of a chart under the pointer, or step by step with the arrow keys.
const { low, high, charts } = JSON.parse(document.getElementById("numbers").textContent);

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

for (const { id, percent, bottom, top, series } of charts) {
  const plot = document.querySelector("#chart-" + id + " .plot");
  const cursor = add(plot, "div", "cursor"), tip = add(plot, "div", "tip");
  const dots = series.map(({ color }) => add(plot, "div", "dot s" + color));
  const steps = series[0].x;
  let at = null;
  tip.setAttribute("role", "status");
  plot.tabIndex = 0;

  function show(index) {
    at = index;
    cursor.hidden = tip.hidden = index === null;
    for (const dot of dots) dot.hidden = true;
    if (index === null) return;
    const step = steps[index], x = ((step - low) / (high - low)) * plot.clientWidth;
    tip.replaceChildren();
    add(tip, "b", "", "step " + step.toLocaleString("en"));
    series.forEach(({ name, color, x: own, y }, index) => {
      const place = nearest(own, step), row = add(tip, "span", "s" + color), dot = dots[index];
      add(row, "i", "", name + (own[place] === step ? "" : ", step " + own[place].toLocaleString("en")));
      add(row, "em", "", text(y[place], percent));
      dot.hidden = y[place] === null;
      dot.style.left = across(own[place], low, high);
      dot.style.bottom = across(y[place], bottom, top);
    });
    cursor.style.left = across(step, low, high);
    // Beside the line, on the side with more room.
    const width = tip.offsetWidth, left = x < plot.clientWidth / 2 ? x + 12 : x - width - 12;
    tip.style.left = Math.max(0, Math.min(plot.clientWidth - width, left)) + "px";
  }
  function point(event) {
    const box = plot.getBoundingClientRect();
    show(nearest(steps, low + ((event.clientX - box.left) / box.width) * (high - low)));
  }
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerleave", () => show(null));
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
    show(next);
  });
  show(null);
}

// A table that is wider than the screen fades out at the side where more of it is.
for (const table of document.querySelectorAll(".scroll")) {
  const fade = () => table.classList.toggle("more", table.scrollLeft + table.clientWidth < table.scrollWidth - 1);
  table.addEventListener("scroll", fade);
  addEventListener("resize", fade);
  fade();
}
