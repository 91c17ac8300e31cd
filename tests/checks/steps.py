"""Steps that run side by side, each in a process of its own with a log, and the table of what they took."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback


class Steps:
    def __init__(self, jobs_max):
        self.jobs_max = jobs_max
        self.scratch = tempfile.TemporaryDirectory()
        self.running = {}  # process: (title, log, start)
        self.table = []  # (seconds, seconds of CPU, title)
        self.failed = []
        self.skipped = []
        self.began = time.monotonic()
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            signal.signal(number, lambda *_, code=code: sys.exit(code))

    def folder(self):
        return self.scratch.name

    def beside(self, title, does, *arguments, env=None):
        """Runs a function, or a command where `does` is a list, beside others."""
        while len(self.running) >= self.jobs_max:
            self._wait_for_one()
        log = os.path.join(self.folder(), f"{len(self.table) + len(self.running)}-{len(os.listdir(self.folder()))}.log")
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            self._run(log, does, arguments, env or {})
        self.running[process] = (title, log, time.monotonic())

    def step(self, title, does, *arguments, env=None):
        """Runs it while nothing else runs."""
        self.wait_for_all()
        self.beside(title, does, *arguments, env=env)
        self.wait_for_all()

    def need(self, title, does, *arguments):
        """The same, and everything ends where it fails."""
        self.step(title, does, *arguments)
        if self.failed:
            self.fail()

    def wait_for_all(self):
        while self.running:
            self._wait_for_one()

    def stop(self):
        for process in self.running:
            try:
                os.killpg(process, signal.SIGTERM)
            except ProcessLookupError:
                pass

    def fail(self):
        print(file=sys.stderr)
        for title in self.failed:
            print(f"launch/test: FAILED: {title}", file=sys.stderr)
        sys.exit(1)

    def count(self, what):
        """The sum of `12 passed` or `3 ignored` over all test results in the logs."""
        results = re.compile(rf"^test result: .*?(\d+) {what}", re.MULTILINE)
        logs = (read(os.path.join(self.folder(), name)) for name in os.listdir(self.folder()) if name.endswith(".log"))
        return sum(int(number) for log in logs for number in results.findall(log))

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
            os.environ.update(env)
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
        title, log, start = self.running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        code = code if code >= 0 else 128 - code
        seconds, text = int(time.monotonic() - start), read(log)
        self.table.append((seconds, int(usage.ru_utime + usage.ru_stime), title))
        print(f"\n==> {title}\n{text}", end="")
        if code == 0:
            print(f"    passed in {seconds} s", flush=True)
        else:
            print(f"    FAILED: exit status {code}, after {seconds} s", flush=True)
            self.failed.append(f"{title} (exit status {code}, after {seconds} s)")
        # Outside checks that could not run, ignored tests; not GPU tests that found no GPU.
        reasons = re.findall(r"^ *skipped: (.*)$", text, re.MULTILINE)
        self.skipped += [reason for reason in reasons if "CUDA device" not in reason]


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
