"""Steps that run side by side, each in a process of its own with a log, and the table of what they took."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback


# Of a step that failed, how many lines are printed.
LAST_LINES = 60


class Steps:
    def __init__(self, jobs_max, keeps_logs):
        """Logs are kept until the next run that keeps them; where they are not, all that steps print is shown."""
        self.jobs_max, self.keeps_logs = jobs_max, keeps_logs
        self.scratch = tempfile.TemporaryDirectory()
        self.logs = os.path.join(self.scratch.name, "checks")
        if keeps_logs:
            self.logs = os.path.abspath(os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "checks"))
            shutil.rmtree(self.logs, ignore_errors=True)
        os.makedirs(self.logs)
        self.running = {}  # process: (title, log, start, its command if it is one, whether it mostly waits)
        self.table = []  # (seconds, seconds of CPU, title)
        self.failed = []
        self.skipped = {}  # reason: what was skipped for it
        self.counts = {"passed": 0, "failed": 0}
        self.began = time.monotonic()
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            signal.signal(number, lambda *_, code=code: sys.exit(code))

    def folder(self):
        return self.scratch.name

    def beside(self, title, does, *arguments, env=None, waits=False):
        """Runs a function, or a command where `does` is a list, beside others. What mostly `waits` takes nobody's turn."""
        while not waits and sum(not it[-1] for it in self.running.values()) >= self.jobs_max:
            self._wait_for_one()
        log = os.path.join(self.logs, re.sub(r"[^a-zA-Z0-9.]+", "-", title).strip("-") + ".log")
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            self._run(log, does, arguments, env or {})
        alone = shlex.join(map(str, does)) if isinstance(does, list) else ""
        self.running[process] = (title, log, time.monotonic(), alone, waits)

    def step(self, title, does, *arguments, env=None):
        """Runs it while nothing else runs."""
        self.wait_for_all()
        self.beside(title, does, *arguments, env=env)
        self.wait_for_all()

    def need(self, title, does, *arguments):
        """Runs it beside what runs, and waits for it alone; everything ends if it fails."""
        self.beside(title, does, *arguments, waits=True)
        self.wait_for(title)
        if any(failed.startswith(f"{title} (") for failed in self.failed):
            self.fail()

    def wait_for(self, title):
        while any(it[0] == title for it in self.running.values()):
            self._wait_for_one()

    def wait_for_all(self):
        while self.running:
            self._wait_for_one()

    def stop(self):
        for process in self.running:
            try:
                os.killpg(process, signal.SIGTERM)
            except ProcessLookupError:
                pass

    def skip(self, what, why):
        self.skipped.setdefault(why, []).append(what)

    def close(self, what):
        """Says what was skipped and what failed, then the counts, and exits."""
        sys.stdout.flush()
        print()
        for why, skipped in self.skipped.items():
            more = f" and {plural(len(skipped) - 1, 'other')}" if len(skipped) > 1 else ""
            print(f"launch/test: skipped: {skipped[0]}{more}: {why}")
        for title in self.failed:
            print(title if title.startswith(" ") else f"launch/test: FAILED: {title}")
        if not self.failed:
            print(f"launch/test: {what} passed in {self.seconds()} s")
        skipped = sum(map(len, self.skipped.values()))
        print(f"{self.counts['passed']} passed, {self.counts['failed']} failed, {skipped} skipped", flush=True)
        sys.exit(1 if self.failed else 0)

    def fail(self):
        self.close("")

    def seconds(self):
        return int(time.monotonic() - self.began)

    def print_table(self):
        print("\nseconds  of CPU  step (several ran at a time)")
        for seconds, cpu, title in sorted(self.table, reverse=True):
            print(f"{seconds:7d} {cpu:7d}  {title}")

    @staticmethod
    def _run(log, does, arguments, env):
        """In the process of a step. In a group, so that a failure elsewhere ends all of it."""
        status = 1
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            # Where tests write that they are skipped: tests/testing.
            os.environ.update({"DDP_TEST_SKIPPED": f"{log}.skipped", **env})
            if isinstance(does, list):
                command(*does)
            else:
                does(*arguments)
            status = 0
        except subprocess.CalledProcessError as error:
            status = error.returncode % 256 or 1
        except Failure as error:
            print(error, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _wait_for_one(self):
        process, status, usage = os.wait4(-1, 0)
        title, log, start, alone, _ = self.running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        code = code if code >= 0 else 128 - code
        seconds, text = int(time.monotonic() - start), read(log)
        self.table.append((seconds, int(usage.ru_utime + usage.ru_stime), title))
        print(f"\n==> {title}")
        lines = text.splitlines()
        if self.keeps_logs:
            lines = lines[-LAST_LINES:] if code else [line for line in lines if line.startswith("test result:")]
        print("".join(f"{line}\n" for line in lines), end="")
        self._count(title, text, log, code == 0)
        if code == 0:
            print(f"    passed in {seconds} s", flush=True)
            return
        said = f"exit status {code}, after {seconds} s" + f"; all that it printed: {log}" * self.keeps_logs
        print(f"    FAILED: {said}", flush=True)
        self.failed.append(f"{title} ({said})")
        # What the harness lists last, a name a line.
        names = [line.strip() for line in text.rpartition("\nfailures:\n")[2].split("\n\n")[0].splitlines() if re.fullmatch(r"    [\w:]+", line)]
        # A script says itself what runs a claim of it.
        commands = re.findall(r"^ *alone: (.*)", text, re.MULTILINE) or [f"launch/test {name}" for name in names]
        self.failed += [f"    alone: {it}" for it in commands or [alone] if it]

    def _count(self, title, text, log, has_passed):
        """Counts a step's tests, or the step where it has none, and what of it was skipped."""
        results = re.findall(r"^test result: .*?(\d+) passed; (\d+) failed", text, re.MULTILINE)
        lines = read(f"{log}.skipped").splitlines() if os.path.exists(f"{log}.skipped") else []
        skips = sorted({tuple(line.split("\t", 2)) for line in lines})
        # A test may be skipped for several reasons.
        tests = {skip[:2] for skip in skips}
        self.counts["passed"] += sum(int(passed) for passed, _ in results) - len(tests) if results else has_passed
        self.counts["failed"] += sum(int(failed) for _, failed in results) or (not has_passed)
        for program, test, why in skips:
            print(f"    skipped: {test}: {why}")
            # What needs another number of GPUs runs in another step, which fails if those are too few (ENOUGH in run.py).
            if "CUDA device" not in why:
                self.skip(f"{test} of {program.rsplit('-', 1)[0]}", why)
        for why in re.findall(r"^ *skipped: (.*)$", text, re.MULTILINE):
            if "CUDA device" not in why:
                what, colon, reason = why.partition(": ")
                self.skip(what, reason) if colon else self.skip(title, why)


class Failure(Exception):
    """A check that failed: its text says why."""


def command(*words, **options):
    """Runs a command; CalledProcessError if it fails."""
    sys.stdout.flush()
    return subprocess.run([str(word) for word in words], check=True, stdin=subprocess.DEVNULL, **options)


def read(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def plural(number, what):
    return f"{number} {what}" + ("" if number == 1 else "s")
