#!/usr/bin/env python3
"""Looks at report pages in headless Chromium, over its debugging pipe: no package is needed beside Python and the browser.

usage: check.py CHROMIUM SCREENSHOTS PAGE...

Each page is opened at desktop and phone width, light and dark, without scripts, and for print. Checked: nothing is said on the console, no request
leaves the page, nothing scrolls sideways, curves are there (without scripts their values), all text has contrast AA, values show under the pointer and by keys,
dots lie where the axes say (also after the page is zoomed), and on a phone only a large confusion matrix is wider than the screen, and shows that there is more. Exits 0 when all is well, 1 with a line for each thing that is not.
"""

import base64
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

WAIT_MAX_S = 60

# The contrast of every text with its background. Ratios are WCAG 2.2's; large text is 24 px, or
# 18.66 px in bold.
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (text) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
    const alpha = text === "transparent" ? 0 : Number((text.match(/[,/] *([0-9.]+)\\)$/) && /rgba|\\//.test(text)) ? text.match(/([0-9.]+)\\)$/)[1] : 1);
    if (alpha > 0 && alpha < 1) { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text.replace(/[0-9.]+\\)$/, "1)"); canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3), alpha]; }
    return [r, g, b, alpha];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat([1]);
  const light = (c) => { const l = c.slice(0, 3).map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * l[0] + 0.7152 * l[1] + 0.0722 * l[2]; };
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const poor = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const element = text.parentElement, style = getComputedStyle(element);
    if (!text.data.trim() || !element.getClientRects().length || /SCRIPT|STYLE/.test(element.tagName)) continue;
    if (element.closest(".skip, .zero, [hidden]")) continue;
    const ground = behind(element), ink = over(rgba(style.color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (isLarge ? 3 : 4.5)) poor.push(text.data.trim().slice(0, 30) + ": " + ratio.toFixed(2));
  }
  return poor.slice(0, 5);
})()
"""


# Numbers of axes that are not inside their chart's card, and words of tables and figures that a line break divides.
CUT = """
(() => {
  const cut = [];
  for (const label of document.querySelectorAll(".chart .xs span, .chart .ys span")) {
    const card = label.closest(".chart").getBoundingClientRect(), box = label.getBoundingClientRect();
    if (box.left < card.left || box.right > card.right) cut.push("outside of its card: " + label.textContent);
  }
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    if (!text.parentElement.closest("td, th, dt, dd") || text.parentElement.closest("details:not([open])")) continue;
    for (const word of [...text.data.matchAll(/[^\\s,=:/_-]{2,}/gu)].filter(([word]) => /^[\\p{L}\\d.]{2,14}$/u.test(word))) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) cut.push("divided: " + word[0]);
    }
  }
  return cut.slice(0, 8);
})()
"""


# A chart's visible dots, and its axes as pairs of a label's number and its position.
POSITIONS = """
((chart) => {
  const middle = (element) => { const box = element.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; };
  const number = (text) => {
    const [, digits, unit] = text.replace(/,/g, "").replace("\u2212", "-").match(/^([-+0-9.e]+)([%kMG]?)$/);
    return Number(digits) * {"": 1, "%": 0.01, k: 1e3, M: 1e6, G: 1e9}[unit];
  };
  const axis = (name, side) => [...chart.querySelectorAll(name + " span")].map((e) => [number(e.textContent), middle(e)[side]]);
  const dots = [...chart.querySelectorAll(".dot:not([hidden])")].map((dot) => [Number(dot.className.slice(-1)), ...middle(dot)]);
  return {dots, xs: axis(".xs", 0), ys: axis(".ys", 1)};
})
"""


def of_chart(numbers, chart):
    """The curves of a chart, and its steps: those of all curves where they are runs."""
    series = numbers["charts"][int(chart.removeprefix("chart-"))]["series"]
    return series, sorted({x for one in series for x in one["x"]}) if numbers["several"] else series[0]["x"]


def ends(numbers):
    """The first and the last step of the axis, as the page's script has it."""
    steps = [x for chart in numbers["charts"] for one in chart["series"] for x in one["x"]]
    first, last = min(steps), max(steps)
    return 0 if first < 0.05 * last else first, last if last > first else last + 1


def on_axis(axis, value):
    """Where a value lies between the labels of an axis, in pixels; None if there are not two labels."""
    (low, start), (high, end) = min(axis), max(axis)
    return None if low == high else start + (value / 2 - low / 2) / (high / 2 - low / 2) * (end - start)


class Browser:
    """A Chromium, and one tab of it."""

    def __init__(self, program, profile):
        (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()

        def hand_over():
            # The browser reads commands from 3 and writes answers to 4. Both move to high numbers
            # first, because one may be in the other's place.
            read, write = os.dup(to_read), os.dup(from_write)
            high = [os.dup2(read, 100), os.dup2(write, 101)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        flags = ["--headless=new", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        self.process = subprocess.Popen([program, *flags, "about:blank"], preexec_fn=hand_over, close_fds=False,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(from_write)
        self.write, self.read = os.fdopen(to_write, "wb", 0), from_read
        self.pending, self.number, self.session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.write.write(json.dumps(message).encode() + b"\0")
        answer = self.until(lambda answer: answer.get("id") == self.number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def until(self, is_it):
        end = time.monotonic() + WAIT_MAX_S
        while time.monotonic() < end:
            while b"\0" in self.pending:
                text, self.pending = self.pending.split(b"\0", 1)
                message = json.loads(text)
                if "method" in message:
                    self.events.append(message)
                if is_it(message):
                    return message
            piece = os.read(self.read, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self.pending += piece
        raise RuntimeError("the browser does not answer")

    def open(self, url):
        self.events.clear()
        self.call("Page.navigate", url=url)
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.until(lambda message: message.get("method") == "Page.loadEventFired")

    def value(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "the script failed"))
        return answer["result"].get("value")

    def size(self, width, height, is_phone, zoom=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=zoom, mobile=is_phone)

    def media(self, scheme, medium=""):
        self.call("Emulation.setEmulatedMedia", media=medium, features=[{"name": "prefers-color-scheme", "value": scheme}])

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key):
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path):
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self):
        self.process.terminate()
        self.process.wait()


class Checks:
    """What is wrong with one page."""

    def __init__(self, browser, page, screenshots):
        self.browser, self.page, self.screenshots = browser, page, screenshots
        self.name, self.url, self.problems, self.way = page.parent.name, page.resolve().as_uri(), [], ""

    def expect(self, is_so, text):
        if not is_so:
            self.problems.append(f"{self.page} ({self.way}): {text}")

    def quiet(self):
        """Nothing was said, and nothing asked for but the page itself."""
        for event in self.browser.events:
            parameters = event["params"]
            if event["method"] == "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                self.expect(url == self.url or url.startswith("data:"), f"it asks for {url[:120]}")
            elif event["method"] == "Runtime.exceptionThrown":
                self.expect(False, f"its script fails: {json.dumps(parameters['exceptionDetails'])[:300]}")
            elif event["method"] == "Log.entryAdded":
                self.expect(False, f"the console says: {parameters['entry']['text'][:300]}")
            elif event["method"] == "Runtime.consoleAPICalled":
                self.expect(False, f"it writes on the console: {json.dumps(parameters['args'])[:300]}")

    def layout(self):
        wide = self.browser.value("[document.documentElement.scrollWidth, innerWidth]")
        self.expect(wide[0] <= wide[1], f"it scrolls sideways: {wide[0]} px in {wide[1]}")
        beyond = self.browser.value(
            "[...document.querySelectorAll('h1, h2, h3, p, dd, dt, figcaption *, .xs span, .ys span, .tip')].filter(e => {"
            " const b = e.getBoundingClientRect(); return !e.closest('.scroll, .skip') && b.width && (b.right > innerWidth + 0.5 || b.left < -0.5)"
            "}).map(e => e.textContent.slice(0, 40)).slice(0, 5)")
        self.expect(not beyond, f"it is cut off at the sides: {beyond}")
        cut = self.browser.value(CUT)
        self.expect(not cut or self.name == "hostile", f"cut: {cut}")

    def curves(self):
        drawn = self.browser.value(
            "[...document.querySelectorAll('.chart')].map(c => [c.id, [...c.querySelectorAll('path.line, path.area, path.dots')]"
            ".filter(p => p.getAttribute('d')).length, c.querySelector('.plot').getBoundingClientRect().width,"
            " c.querySelectorAll('.ys span').length])")
        for chart, paths, width, ticks in drawn:
            self.expect(paths > 0 and width > 150 and ticks > 1, f"{chart}: {paths} curves, {width} px, {ticks} ticks")
        self.expect(drawn or self.browser.value("!!document.querySelector('#curves .none')"), "no charts, and no word about it")
        return [chart for chart, *_ in drawn]

    def looks(self):
        for width, height, is_phone in ((1400, 900, False), (390, 800, True)):
            for scheme in ("light", "dark"):
                self.way = f"{width} px, {scheme}"
                self.browser.size(width, height, is_phone)
                self.browser.media(scheme)
                self.browser.open(self.url)
                self.layout()
                self.curves()
                poor = self.browser.value(CONTRAST)
                self.expect(not poor, f"too little contrast: {poor}")
                self.browser.screenshot(self.screenshots / f"{self.name}-{width}-{scheme}.png")
                self.quiet()

    def narrow(self):
        self.way = "360 px, all unfolded"
        self.browser.size(360, 640, True)
        self.browser.open(self.url)
        self.browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
        self.layout()
        self.way = "print"
        self.browser.size(1280, 900, False)
        self.browser.media("light", "print")
        self.expect(self.browser.value("getComputedStyle(document.querySelector('nav')).display") == "none", "links are printed")
        self.browser.media("light")

    def tables(self):
        """At a phone's width: a matrix of ten classes fits, and a wider table says that there is more."""
        self.way = "390 px, tables"
        self.browser.size(390, 800, True)
        self.browser.open(self.url)
        for width, shown, is_marked, columns, is_marked_at_end in self.browser.value(
                "[...document.querySelectorAll('.scroll')].map(s => { const was = s.classList.contains('more'), columns = s.querySelectorAll('.heat thead th').length;"
                " s.scrollLeft = 1e6; s.dispatchEvent(new Event('scroll')); return [s.scrollWidth, s.clientWidth, was, columns, s.classList.contains('more')] })"):
            self.expect(columns > 12 or width <= shown, f"a table of {columns} columns has {width} px in {shown}")
            self.expect(is_marked == (width > shown + 1) and not is_marked_at_end, f"a table of {width} px in {shown}: marked {is_marked}, at its end {is_marked_at_end}")

    def dots(self, chart, series, step):
        """The dots of a step lie where the chart's axes say."""
        seen = self.browser.value(f"{POSITIONS}(document.querySelector('#{chart}'))")
        found = {color: (x, y) for color, x, y in seen["dots"]}
        for one in series:
            at = min(range(len(one["x"])), key=lambda index: abs(one["x"][index] - step))
            value, dot = one["y"][at], found.get(one["color"])
            self.expect((dot is None) == (value is None), f"{chart}, {one['name']} in step {step}: the value is {value}, the dot at {dot}")
            for axis, where, wanted in ((seen["xs"], 0, one["x"][at]), (seen["ys"], 1, value)) if dot and value is not None else ():
                expected = on_axis(axis, wanted)
                self.expect(expected is None or abs(dot[where] - expected) < 2, f"{chart}, {one['name']}: the dot of {wanted} is at {dot[where]} px, expected {expected} px")

    def dots_of(self, chart):
        """Right after the page is loaded, and when it is zoomed while they are shown."""
        numbers = self.browser.value("JSON.parse(document.getElementById('numbers').textContent)")
        (low, high), (series, steps) = ends(numbers), of_chart(numbers, chart)
        step = steps[len(steps) * 2 // 3]
        left, top, width, height = self.browser.value(
            f"(() => {{ const b = document.querySelector('#{chart} .plot').getBoundingClientRect(); return [b.left, b.top, b.width, b.height] }})()")
        self.browser.mouse("mouseMoved", left + min(width - 1, width * (step / 2 - low / 2) / (high / 2 - low / 2)), top + height / 2)
        self.dots(chart, series, step)
        # By keys: the page moves under the pointer when it is zoomed.
        self.browser.mouse("mouseMoved", 2, 2)
        self.browser.value(f"document.querySelector('#{chart} .plot').focus()")
        self.browser.key("End")
        for zoom in (1.5, 0.8, 1):
            self.browser.size(int(1280 / zoom), int(900 / zoom), False, zoom)
            self.dots(chart, series, steps[-1])
        self.browser.key("Escape")

    def logarithm(self, chart):
        """On a logarithmic axis the dots lie where its labels say, and a second click shows the curve as it was."""
        button = f"document.querySelector('#{chart} .log')"
        line = f"document.querySelector('#{chart} .line').getAttribute('d')"
        if not self.browser.value(f"!!{button}"):
            return
        before = self.browser.value(line)
        self.browser.value(f"{button}.click()")
        self.expect(self.browser.value(line) != before, f"{chart}: the switch for a logarithmic axis does nothing")
        self.layout()
        numbers = self.browser.value("JSON.parse(document.getElementById('numbers').textContent)")
        series, steps = of_chart(numbers, chart)
        self.browser.value(f"document.querySelector('#{chart} .plot').focus()")
        self.browser.key("End")
        seen = self.browser.value(f"{POSITIONS}(document.querySelector('#{chart}'))")
        axis = [(math.log10(value), place) for value, place in seen["ys"] if value > 0]
        for color, _, y in seen["dots"]:
            one = next(one for one in series if one["color"] == color)
            at = min(range(len(one["x"])), key=lambda index: abs(one["x"][index] - steps[-1]))
            expected = on_axis(axis, math.log10(one["y"][at])) if len(axis) > 1 else None
            self.expect(expected is None or abs(y - expected) < 2, f"{chart}, {one['name']}: on the logarithmic axis the dot is at {y} px, expected {expected} px")
        self.browser.key("Escape")
        self.browser.value(f"{button}.click()")
        self.expect(self.browser.value(line) == before, f"{chart}: the curve stays logarithmic")

    def without_scripts(self):
        self.way = "without scripts"
        self.browser.call("Emulation.setScriptExecutionDisabled", value=True)
        self.browser.open(self.url)
        self.browser.call("Emulation.setScriptExecutionDisabled", value=False)
        rows = self.browser.value("document.querySelectorAll('#curves tbody tr').length")
        self.expect(rows or self.browser.value("!!document.querySelector('#curves .none')"), "no values of the curves")
        self.quiet()

    def has_curves(self):
        return self.browser.value("!!document.querySelector('.plot')")

    def zoom(self, chart):
        """Dragging shows some steps in all charts, with dots where the axes say; a double click all again."""
        plot = f"document.querySelector('#{chart} .plot')"
        look = f"{plot}.querySelector('.line').getAttribute('d')"
        self.browser.value(f"{plot}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        left, top, width, height = self.browser.value(f"(() => {{ const b = {plot}.getBoundingClientRect(); return [b.left, b.top, b.width, b.height] }})()")
        whole, y = self.browser.value(look), top + height / 2
        self.browser.mouse("mouseMoved", left + 0.41 * width, y)
        self.browser.mouse("mousePressed", left + 0.41 * width, y, button="left", buttons=1, clickCount=1)
        self.browser.mouse("mouseMoved", left + 0.813 * width, y, button="left", buttons=1)
        self.browser.mouse("mouseReleased", left + 0.813 * width, y, button="left", clickCount=1)
        numbers = self.browser.value("JSON.parse(document.getElementById('numbers').textContent)")
        (low, high), (series, _) = ends(numbers), of_chart(numbers, chart)
        first, last = (low + part * (high - low) for part in (0.41, 0.813))
        steps = [step for step in series[0]["x"] if first <= step <= last]
        zoomed = self.browser.value(look) != whole
        self.expect(zoomed or len(steps) < 3, f"{chart}: dragging does not zoom")
        if zoomed and not numbers["several"] and len(steps) > 2:
            self.browser.value(f"{plot}.focus()")
            self.browser.key("End")
            one = [s for s in series if any(first <= x <= last for x in s["x"])][:1]
            self.dots(chart, one, max(step for step in steps))
            self.layout()
            if chart == "chart-loss":
                self.browser.screenshot(self.screenshots / f"{self.name}-zoomed.png")
            self.browser.key("Escape")
        for clicks in (1, 2):
            self.browser.mouse("mousePressed", left + 0.5 * width, y, button="left", buttons=1, clickCount=clicks)
            self.browser.mouse("mouseReleased", left + 0.5 * width, y, button="left", clickCount=clicks)
        self.expect(self.browser.value(look) == whole, f"{chart}: a double click does not show all steps")
        self.browser.mouse("mouseMoved", 2, 2)

    def live(self):
        self.browser.size(1280, 900, False)
        self.browser.media("light")
        self.way = "values"
        self.browser.open(self.url)
        for chart in self.curves():
            self.dots_of(chart)
            box = self.browser.value(
                f"(() => {{ const p = document.querySelector('#{chart} .plot'); p.scrollIntoView({{block: 'center', behavior: 'instant'}});"
                " const b = p.getBoundingClientRect(); return [b.left, b.top, b.width, b.height] })()")
            tip = f"(() => {{ const t = document.querySelector('#{chart} .tip'); return t.hidden ? '' : t.textContent }})()"
            self.browser.mouse("mouseMoved", box[0] + 0.6 * box[2], box[1] + box[3] / 2)
            told = self.browser.value(tip)
            self.expect("step" in told and any(digit in told for digit in "0123456789"), f"{chart}: nothing under the pointer: {told!r}")
            self.layout()
            self.browser.mouse("mouseMoved", 2, 2)
            self.expect(not self.browser.value(tip), f"{chart}: the value stays when the pointer is gone")
            self.browser.value(f"document.querySelector('#{chart} .plot').focus()")
            self.browser.key("Home")
            first = self.browser.value(tip)
            self.browser.key("ArrowRight")
            self.expect("step" in first, f"{chart}: no value by keys")
            several = self.browser.value(f"JSON.parse(document.getElementById('numbers').textContent).charts[{chart.removeprefix('chart-')}].series[0].x.length") > 1
            self.expect(not several or self.browser.value(tip) != first, f"{chart}: the arrow key stays at {first!r}")
            self.browser.key("Escape")
            self.zoom(chart)
            self.logarithm(chart)
        self.quiet()


def main():
    program, screenshots, *pages = sys.argv[1:]
    screenshots = pathlib.Path(screenshots)
    screenshots.mkdir(parents=True, exist_ok=True)
    problems = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            for page in map(pathlib.Path, pages):
                checks = Checks(browser, page, screenshots)
                checks.looks()
                checks.narrow()
                checks.tables()
                checks.without_scripts()
                if checks.has_curves():
                    checks.live()
                problems += checks.problems
                print(f"{page}: {'well' if not checks.problems else str(len(checks.problems)) + ' problems'}", flush=True)
        finally:
            browser.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
