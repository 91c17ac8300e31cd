"""The gates of gates.toml: what the machine code of kernels must be like. Each must fail on the kernels of version 0.7, whose figures
are in gates-0.7.json: a gate that passes whatever the kernel is says nothing."""

import json
import pathlib
import re
import tomllib

TABLE = pathlib.Path(__file__).parent / "gates.toml"
BEFORE = pathlib.Path(__file__).parent / "gates-0.7.json"
# Loops by what they do.
SELECT = {
    "tensor": lambda loop: loop["tensor"],
    "exponential": lambda loop: loop["exponentials"] >= 8 and loop["read"],
    "reading": lambda loop: loop["read"],
    "streaming": lambda loop: loop["read"] >= 64,
    "all": lambda loop: True,
}
READS, WRITES = ("LDG", "LDGSTS"), ("STG",)


def narrowest(loop, names):
    return min((int(name.split(".")[1]) for name in loop["memory"] if name.split(".")[0] in names), default=None)


def count(loop, name):
    return sum(number for what, number in loop["memory"].items() if what.split(".")[0] == name)


# Figures of one loop; None where it has none. G is the gate.
OF_LOOP = {
    "instructions_per_tensor": lambda loop, g: loop["with_inner"] / loop["tensor"] if loop["tensor"] else None,
    "longest_without_tensor": lambda loop, g: loop["longest_without_tensor"],
    "instructions_per_element": lambda loop, g: loop["instructions"] / (loop["read"] / g["element_bytes"]) if loop["read"] else None,
    "load_bits": lambda loop, g: narrowest(loop, READS),
    "store_bits": lambda loop, g: narrowest(loop, WRITES),
    "share_of_128_bit_loads": lambda loop, g: 16 * loop["memory"].get("LDG.128", 0) / max(1, loop["read"]),
    "ldsm": lambda loop, g: count(loop, "LDSM"),
    "ldgsts": lambda loop, g: count(loop, "LDGSTS"),
    "copies": lambda loop, g: loop["copies"],
    "groups": lambda loop, g: loop.get("groups", 0),
    "barriers": lambda loop, g: loop["barriers"],
    "bytes_in_flight": lambda loop, g: loop["in_flight"],
}


def of_kernel(kernel, loops, gate, figure):
    """The values of a figure: of each loop, or one of the kernel."""
    if figure in OF_LOOP:
        return [value for loop in loops if (value := OF_LOOP[figure](loop, gate)) is not None]
    if figure == "widest_load_bits":
        return [max((narrowest(loop, READS) or 0 for loop in loops), default=0)]
    if figure == "instructions_per_element_of_all_loops":
        return [sum(OF_LOOP["instructions_per_element"](loop, gate) or 0 for loop in loops)]
    return [kernel.get(figure, 0)]  # registers, warps, tensor, spills, held


def failures(gate, kernels):
    """Why the kernels that the gate is for do not pass it."""
    mine = {name: kernel for name, kernel in kernels.items() if re.fullmatch(gate["kernels"], name)}
    if not mine:
        yield f"no kernel is called {gate['kernels']}"
    for name, kernel in mine.items():
        loops = [it for it in kernel["loops"] if SELECT[gate.get("loops", "all")](it) and re.search(gate.get("only", ""), it["source"])]
        if gate.get("cheapest"):
            best = {it["at"]: it for it in sorted(loops, key=lambda it: -it["with_inner"])}
            loops = list(best.values())
        if not loops:
            yield f"{name} has no loop of those that the gate is for"
        for words, is_kept in (("most", float.__le__), ("least", float.__ge__)):
            for figure, limit in gate.get(words, {}).items():
                wrong = [value for value in of_kernel(kernel, loops, gate, figure) if not is_kept(float(value), float(limit))]
                if wrong:
                    yield f"{name}: {figure} at {words} {limit}, got " + ", ".join(f"{value:.4g}" for value in wrong)


def judge(figures):
    """How many gates pass, and what is wrong, for all files in {architecture: {file: {kernel: figures}}}."""
    passed, wrong = 0, []
    before = json.loads(BEFORE.read_text())
    for gate in tomllib.loads(TABLE.read_text()).get("gate", []):
        for words in ("most", "least"):
            for figure, limit in gate.get(words, {}).items():
                old = {**gate, "most": {}, "least": {}, words: {figure: limit}, **gate.get("in_0_7", {})}
                if not list(failures(old, before)):
                    wrong.append(f"{TABLE.name}: gate {gate['aim']!r} lets {figure} of the kernels of 0.7 pass")
        for architecture, files in figures.items():
            names = [gate["file"]] if "file" in gate else files
            kernels = {name: kernel for file in names for name, kernel in files.get(file, {}).items()}
            is_meant = any(re.fullmatch(gate["kernels"], name) for name in kernels) if "file" not in gate else kernels
            if architecture not in gate.get("for", ["sm_80", "sm_90", "sm_100"]) or not is_meant:
                continue
            found = [f"gate {gate['aim']!r}, {architecture}: {why}" for why in failures(gate, kernels)]
            wrong += found
            passed += not found
    return passed, wrong
