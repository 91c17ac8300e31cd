// What the page can do beyond being read: values under the pointer or by keys, zooming along the steps, heights by powers of ten.
// The curves are there without it; it draws them again, as charts.rs does, from the numbers that the page carries.
"use strict";
(() => {
  const numbers = JSON.parse(document.getElementById("numbers").textContent);
  const whole = numbers.steps;
  let shown = whole.slice();
  const minus = (text) => (text.startsWith("-") ? "−" + text.slice(1) : text);
  const near = (list, value) => {
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle] <= value) low = middle; else high = middle;
    }
    return Math.abs(list[high] - value) < Math.abs(list[low] - value) ? high : low;
  };

  function tickStep(low, high, most) {
    const rough = Math.max(high / most - low / most, 2.3e-305);
    const power = 10 ** Math.floor(Math.log10(rough));
    return ([1, 2, 5, 10].find((round) => round * power >= rough * 0.999999) || 10) * power;
  }
  function ticks(low, high, most) {
    const step = tickStep(low, high, most), first = Math.ceil(low / step - 1e-9), found = [];
    for (let index = 0; index <= most; index++) {
      const tick = (first + index) * step;
      if (tick > high + step * 1e-9) break;
      found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
    }
    return found;
  }
  // Powers of ten; where they are few, twos and fives between them.
  function powerTicks(low, high) {
    const from = Math.floor(low), to = Math.ceil(high), by = Math.max(1, Math.ceil((to - from) / 6)), found = [];
    const factors = high - low < 2 ? [1, 2, 5] : [1];
    for (let power = from; power <= to; power += by) {
      for (const factor of factors) {
        const tick = power + Math.log10(factor);
        if (tick >= low - 1e-9 && tick <= high + 1e-9) found.push(tick);
      }
    }
    return found.length > 1 ? found : [low, high];
  }
  function tickText(form, value) {
    let unit = "";
    if (form === "percent") [value, unit] = [value * 100, "%"];
    if (form === "rate") {
      const size = Math.abs(value);
      for (const [least, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
        if (size >= least) { [value, unit] = [value / least, name]; break; }
      }
    }
    const size = Math.abs(value);
    const text = size !== 0 && (size < 1e-4 || size >= 1e6)
      ? value.toExponential(2).replace(/\.?0*e\+?/, "e")
      : String(Number(value.toFixed(6)));
    return minus(text) + unit;
  }
  const grouped = (value) => Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ",");
  function figure(form, value) {
    if (value === null) return "no number";
    if (form === "percent") return (value * 100).toFixed(2) + " %";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-4 || size >= 1e15) return minus(value.toExponential(3).replace("e+", "e"));
    if (size >= 1000) return (value < 0 ? "−" : "") + grouped(size);
    return minus(value.toFixed(Math.min(9, Math.max(0, 3 - Math.floor(Math.log10(size))))));
  }

  const make = (name, parent, className) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    parent.append(made);
    return made;
  };
  const views = numbers.charts.map((chart) => new View(chart));
  const redraw = () => views.forEach((view) => view.draw());
  function zoom(low, high) {
    const least = Math.max((whole[1] - whole[0]) / 1e4, 1e-9);
    if (high - low < least) return;
    shown = [Math.max(whole[0], low), Math.min(whole[1], high)];
    redraw();
  }
  function unzoom() {
    shown = whole.slice();
    redraw();
  }

  function View(chart) {
    const figureOf = document.getElementById("chart-" + chart.id);
    const plot = figureOf.querySelector(".plot"), svg = plot.querySelector("svg");
    const heights = figureOf.querySelector(".ys"), steps = figureOf.querySelector(".xs");
    const caption = figureOf.querySelector("figcaption"), log = caption.querySelector(".log");
    const cursor = make("div", plot, "cursor"), chosen = make("div", plot, "chosen"), tip = make("div", plot, "tip");
    // Said by screen readers as it changes; an image's own label stays.
    tip.setAttribute("role", "status");
    const reset = make("button", caption, "");
    reset.type = "button";
    reset.textContent = "whole run";
    reset.addEventListener("click", unzoom);
    if (log && !chart.series.some((series) => series.y.some((y) => y !== null && y > 0))) log.remove();
    else if (log) log.hidden = false;
    plot.classList.add("live");
    plot.tabIndex = 0;
    let spots = [], at = null, isLog = false, low = 0, high = 1;

    const across = (x) => (x - shown[0]) / (shown[1] - shown[0]);
    const value = (y) => (y === null || (isLog && y <= 0) ? null : isLog ? Math.log10(y) : y);
    // Halves, for the whole may be more than there are numbers.
    const up = (y) => (y / 2 - low / 2) / (high / 2 - low / 2);
    const bounded = (part) => Math.min(2, Math.max(-1, part));
    const place = (x, y) => (bounded(across(x)) * 1000).toFixed(1) + " " + (1000 - bounded(up(y)) * 1000).toFixed(1);

    function range() {
      if (chart.kind === "stack") { [low, high] = [0, 1]; return; }
      let [least, most] = [Infinity, -Infinity];
      for (const series of chart.series) {
        series.x.forEach((x, index) => {
          const y = value(series.y[index]);
          if (y === null || x < shown[0] || x > shown[1]) return;
          least = Math.min(least, y);
          most = Math.max(most, y);
        });
      }
      if (least > most) { [low, high] = [0, 1]; return; }
      if (!isLog && least > 0 && (chart.zero || least < 0.5 * most)) least = 0;
      const room = isLog ? 1 : Math.max(Math.abs(least), Math.abs(most)) / 100 || 2;
      const more = Math.max(0, room / 2 - (most / 2 - least / 2));
      if (!isLog || most === least) [least, most] = [least - more, most + more];
      if (isLog) { [low, high] = [least - 0.04 * (most - least), most + 0.04 * (most - least)]; return; }
      const step = tickStep(least, most, 5);
      const ends = [Math.floor(least / step) * step, Math.ceil(most / step) * step];
      [low, high] = ends.every(Number.isFinite) ? ends : [least, most];
      if (chart.form === "percent" && least >= 0 && most <= 1) [low, high] = [Math.max(low, 0), Math.min(high, 1)];
    }

    function path(className, d) {
      if (!d) return;
      const made = document.createElementNS(svg.namespaceURI, "path");
      made.setAttribute("class", className);
      made.setAttribute("d", d);
      svg.append(made);
    }
    function labels(parent, list, side, where, text) {
      parent.querySelectorAll("span").forEach((old) => old.remove());
      for (const tick of list) {
        const label = make("span", parent);
        label.style[side] = (where(tick) * 100).toFixed(2) + "%";
        label.textContent = text(tick);
      }
    }

    this.draw = () => {
      range();
      svg.replaceChildren();
      const list = isLog ? powerTicks(low, high) : ticks(low, high, 6);
      labels(heights, list, "bottom", up, (tick) => tickText(chart.form, isLog ? Number((10 ** tick).toPrecision(2)) : tick));
      path("grid", list.map((tick) => "M0 " + (1000 - up(tick) * 1000).toFixed(1) + "h1000").join(""));
      const along = ticks(shown[0], shown[1], 5), apart = along.length > 1 ? along[1] - along[0] : 1;
      labels(steps, along, "left", across, (tick) => (apart >= 1000 ? tickText("rate", tick) : apart < 1 ? tickText("plain", tick) : grouped(tick)));
      const inside = (step) => step >= shown[0] && step <= shown[1];
      path("saved", numbers.checkpoints.filter(inside).map((step) => "M" + (across(step) * 1000).toFixed(1) + " 970V1000").join(""));
      path("resume", numbers.resumes.filter(inside).map((step) => "M" + (across(step) * 1000).toFixed(1) + " 0V1000").join(""));
      if (chart.kind === "stack") stack(); else chart.series.forEach(curve);
      reset.hidden = shown[0] === whole[0] && shown[1] === whole[1];
      show(at);
    };
    function stack() {
      let floor = chart.series[0].x.map(() => 0);
      for (const series of chart.series) {
        const top = series.y.map((y, index) => floor[index] + (y || 0));
        const edge = (list) => [place(whole[0], list[0]), ...series.x.map((x, index) => place(x, list[index]))];
        path("area s" + series.colour, "M" + [...edge(top), ...edge(floor).reverse()].join("L") + "z");
        floor = top;
      }
    }
    function curve(series) {
      let d = "", isDown = false;
      const dots = [];
      series.x.forEach((x, index) => {
        const y = value(series.y[index]);
        if (y !== null) {
          d += (isDown ? "L" : "M") + place(x, y);
          dots.push("M" + place(x, y) + "h0");
        }
        isDown = y !== null;
      });
      path("line s" + series.colour, d);
      if (series.dots || series.x.length === 1) path("dots s" + series.colour, dots.join(""));
    }

    // The values of all series nearest to a step.
    function show(step) {
      at = step;
      spots.forEach((spot) => spot.remove());
      spots = [];
      const isShown = step !== null && step >= shown[0] && step <= shown[1];
      cursor.hidden = tip.hidden = !isShown;
      if (!isShown) return;
      tip.replaceChildren();
      cursor.style.left = across(step) * 100 + "%";
      make("b", tip).textContent = "step " + grouped(step);
      for (const series of chart.series) {
        const index = near(series.x, step), row = make("span", tip, "s" + series.colour);
        const name = make("i", row), told = make("em", row);
        const distance = series.dots && series.x[index] !== step ? ", step " + grouped(series.x[index]) : "";
        name.textContent = series.name + distance;
        told.textContent = figure(chart.form, series.y[index]) + (series.ms[index] !== undefined ? " · " + figure("plain", series.ms[index]) + " ms" : "");
        const y = value(series.y[index]);
        if (chart.kind !== "stack" && y !== null && series.x[index] >= shown[0] && series.x[index] <= shown[1]) {
          const spot = make("div", plot, "spot s" + series.colour);
          spot.style.left = across(series.x[index]) * 100 + "%";
          spot.style.top = (1 - up(y)) * 100 + "%";
          spots.push(spot);
        }
      }
      // Beside the line, on the side with more room.
      const width = plot.clientWidth, x = across(step) * width, own = tip.offsetWidth;
      tip.style.left = Math.max(0, Math.min(width - own, x < width / 2 ? x + 12 : x - own - 12)) + "px";
    }
    const first = chart.series[0].x;
    const stepAt = (event) => {
      const box = plot.getBoundingClientRect();
      const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      return shown[0] + part * (shown[1] - shown[0]);
    };
    let from = null;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      show(first[near(first, stepAt(event))]);
      if (event.pointerType === "mouse") {
        from = stepAt(event);
        plot.setPointerCapture(event.pointerId);
      }
    });
    plot.addEventListener("pointermove", (event) => {
      const step = stepAt(event);
      show(first[near(first, step)]);
      chosen.hidden = from === null;
      if (from !== null) {
        const ends = [across(from), across(step)].sort((a, b) => a - b);
        chosen.style.left = ends[0] * 100 + "%";
        chosen.style.width = (ends[1] - ends[0]) * 100 + "%";
      }
    });
    const finish = (event) => {
      const start = from;
      from = null;
      chosen.hidden = true;
      if (start === null || event.type === "pointercancel") return;
      const ends = [start, stepAt(event)].sort((a, b) => a - b);
      if (across(ends[1]) - across(ends[0]) > 0.01) zoom(ends[0], ends[1]);
    };
    plot.addEventListener("pointerup", finish);
    plot.addEventListener("pointercancel", finish);
    plot.addEventListener("pointerleave", () => { if (from === null) show(null); });
    plot.addEventListener("dblclick", unzoom);
    plot.addEventListener("blur", () => show(null));
    plot.addEventListener("keydown", (event) => {
      const index = at === null ? -1 : near(first, at), last = first.length - 1, width = shown[1] - shown[0];
      const middle = at === null ? shown[0] + width / 2 : at;
      const keys = {
        ArrowRight: () => show(first[Math.min(last, index + (event.shiftKey ? 10 : 1))]),
        ArrowLeft: () => show(first[Math.max(0, index < 0 ? last : index - (event.shiftKey ? 10 : 1))]),
        Home: () => show(first[0]),
        End: () => show(first[last]),
        "+": () => zoom(middle - width / 4, middle + width / 4),
        "-": () => zoom(middle - width, middle + width),
        Escape: () => { show(null); unzoom(); },
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    if (log) {
      log.addEventListener("click", () => {
        isLog = !isLog;
        log.setAttribute("aria-pressed", String(isLog));
        this.draw();
      });
    }
    chosen.hidden = true;
    reset.hidden = true;
    show(null);
  }
})();
