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

for (const { id, percent, series } of charts) {
  const plot = document.querySelector("#chart-" + id + " .plot");
  const cursor = add(plot, "div", "cursor"), tip = add(plot, "div", "tip");
  const steps = series[0].x;
  let at = null;
  tip.setAttribute("role", "status");
  plot.tabIndex = 0;

  function show(index) {
    at = index;
    cursor.hidden = tip.hidden = index === null;
    if (index === null) return;
    const step = steps[index], x = ((step - low) / (high - low)) * plot.clientWidth;
    tip.replaceChildren();
    add(tip, "b", "", "step " + step.toLocaleString("en"));
    for (const { name, color, x: own, y } of series) {
      const place = nearest(own, step), row = add(tip, "span", "s" + color);
      add(row, "i", "", name + (own[place] === step ? "" : ", step " + own[place].toLocaleString("en")));
      add(row, "em", "", text(y[place], percent));
    }
    cursor.style.left = x + "px";
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
