"""Runs the examples, and compares what the placement tour prints with README.md and docs/."""

import glob
import os
import re
import subprocess
import sys

from steps import Failure, command, plural, read

ON_GPUS = {"custom_layer": 1, "two_devices": 2}
ON_RANKS = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", 3]


def names():
    """In the order of examples/Cargo.toml, so that a new example runs without a change here."""
    return re.findall(r'^\[\[example\]\]\n(?:[^\[]*\n)?name *= *"([^"]+)"', read("examples/Cargo.toml"), re.MULTILINE)


def run(programs, examples, folder, is_verbose, tours_on=(1, 2, 4)):
    # Launchers that start and end at the same time may remove each other's session folder.
    os.environ.update(OMPI_MCA_orte_tmpdir_base=folder, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    if not is_verbose:
        # In a build without optimization, whose steps are slow.
        said(is_verbose, "examples/kill-ranks", f"{folder}/kill-ranks", env={**os.environ, "STEPS": "300"})
    for example in examples:
        program = f"{programs}/examples/{example}"
        if example == "placement":
            tours(program, is_verbose, tours_on)
            continue
        # Runs are not overwritten: these begin in a new folder.
        words = {"my_train": f"--model mine,depth=3 --steps 20 --out {folder}/mine", "own_model": f"{folder}/spirals",
                 "nanogpt": f"--model nanogpt,blocks=2,width=32,context=32 --data tests/golden/text.txt --steps 10 --batch-size 8 --out {folder}/nanogpt",
                 "resnet": f"--model resnet,blocks=1,channels=8 --data glyphs,rows=64 --steps 2 --batch-size 8 --out {folder}/resnet"}
        said(is_verbose, program, *words.get(example, "").split())
        if example in ON_GPUS:
            said(is_verbose, *simulated(ON_GPUS[example]), program)
        if example == "send_receive":
            said(is_verbose, *ON_RANKS, program)
            said(is_verbose, *simulated(3), *ON_RANKS, program)


def simulated(devices):
    return ["launch/with-simulated-gpus", devices] if devices else []


def said(is_verbose, *words, **options):
    """Runs a command, and prints its last line, or all of it where it failed or was asked for by name."""
    try:
        text = command(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options).stdout
    except subprocess.CalledProcessError as error:
        print(error.stdout)
        raise
    print(text if is_verbose else text.strip().rsplit("\n", 1)[-1])
    return text


def tours(program, is_verbose, devices_of):
    """The placement tour without GPUs and on simulated ones; docs/placement.md shows lines of both."""
    text, skipped = tour(program, 0, is_verbose)
    # What is skipped, and so what docs/placement.md shows, depends on the GPUs there are.
    if skipped == 13:
        readme_is_real("placement", text)
    if skipped:
        print(f"skipped: {plural(skipped, 'situation')} that need CUDA devices")
    for devices in devices_of:
        text, skipped = tour(program, devices, is_verbose)
        if devices != 1 and skipped:
            raise Failure(f"{skipped} of the tour were not shown on {devices} simulated GPUs")
    readme_is_real("placement-simulated", text)
    said(is_verbose, *simulated(2), program, env={**os.environ, "SIMCUDA_NO_PEER": "1"})


def tour(program, devices, is_verbose):
    """What the tour says, and how many situations it skipped: `situations: 22, shown: 20, skipped: 2`."""
    text = said(is_verbose, *simulated(devices), program)
    closing = re.findall(r"^situations: .*skipped: (\d+)", text, re.MULTILINE)
    if not closing:
        raise Failure("the tour ended without its closing line: situations: …, shown: …, skipped: …")
    return text, int(closing[-1])


def readme_is_real(label, text):
    """Every line of the blocks ```text LABEL in README.md and docs/ must be one that the tour printed."""
    pages = "\n".join(read(page) for page in ["README.md", *sorted(glob.glob("docs/*.md"))])
    shown = "\n".join(re.findall(rf"^```text {label}\n(.*?)^```", pages, re.MULTILINE | re.DOTALL)).splitlines()
    if not shown:
        raise Failure(f'README.md and docs/ have no block called "{label}"')
    printed = set(text.splitlines())
    unreal = [line for line in shown if line not in printed]
    if unreal:
        print("\n".join(unreal), file=sys.stderr)
        raise Failure(f'README.md or docs/ show under "{label}" what the tour does not print')
