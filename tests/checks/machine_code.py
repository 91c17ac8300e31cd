"""What the loops of GPU kernels do, from the machine code that nvdisasm prints.

A loop's figures are those of its cheapest path from head to back edge that does the most work (tensor instructions, then bytes of
global memory): the path of a tile that needs no mask, or of a row that is read in packs. Loops inside it are counted on their own.
"""

import re
import struct

FUNCTION = re.compile(r"^\.text\.(\S+):")
SECTION = re.compile(r"^\s*\.section")
LABEL = re.compile(r"^(\.L_x_\d+):")
PLACE = re.compile(r'^\s*//## File "[^"]*?([^/"]+)", line (\d+)')
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
LABELS = re.compile(r"\.L_x_\d+")
BRANCHES = ("BRA", "JMP", "BRX", "JMX", "CALL")
REGISTER = re.compile(r"(?<![\w.])R(\d+)")
# Bits that a lane moves. What names no width moves 32.
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "16": 16, "64": 64, "128": 128}
GLOBAL_READS, GLOBAL_WRITES = ("LDG", "LDGSTS"), ("STG",)
SPILLS = ("LDL", "STL")
# What orders accesses: a letter each for barriers of the block, fences and atomics.
ORDERING = {"BAR": "B", "MEMBAR": "M", "ATOM": "A", "ATOMG": "A"}
TENSOR = ("HMMA", "WGMMA", "HGMMA", "UTCHMMA")
# Of HGMMA.64xNx16 D, A, …: the columns of the product, and the first registers of it and of rows that are in registers.
GROUP = re.compile(r"HGMMA\.64x(\d+)x")
ROWS = re.compile(r"R\d+, R(\d+), ")
# What begins with a register that it reads.
READERS = ("ST", "RED", "ATOM", "BRA", "ISETP", "FSETP", "LDGSTS", "R2UR")
# Memory instructions whose counts are printed.
MEMORY = (*GLOBAL_READS, *GLOBAL_WRITES, "LDS", "LDSM", "STS", "RED", "ATOMG", *SPILLS)


class Instruction:
    def __init__(self, match, line):
        self.guard, self.opcode, self.operands, self.line = match[2], match[3], match[4], line
        self.name, *self.suffixes = self.opcode.split(".")
        if self.name == "LD":  # an address whose kind of memory the compiler does not know
            self.name = "LDG"
        elif self.name == "ST":
            self.name = "STG"

    def bits(self):
        return next((WIDTHS[suffix] for suffix in self.suffixes if suffix in WIDTHS), 32)

    def registers(self):
        """The first register, of what is loaded, and all that occur after it."""
        found = [int(number) for number in REGISTER.findall(self.operands)]
        return (found[0], found[1:]) if found else (None, [])

    def loaded(self):
        """The registers that a load writes."""
        first, _ = self.registers()
        return set() if first is None else set(range(first, first + max(1, self.bits() // 32)))

    def tensor(self):
        """How many products of 16 × 8 × 16 it makes for its warp."""
        group = GROUP.match(self.opcode)
        return int(group[1]) // 8 if group else int(self.name in TENSOR)

    def written(self):
        """The registers that it writes."""
        first, _ = self.registers()
        if first is None or self.name.startswith(READERS):
            return range(0)
        group = GROUP.match(self.opcode)
        count = int(group[1]) // 2 if group else 4 if self.opcode.endswith("M88.4") else 2 if "WIDE" in self.suffixes else max(1, self.bits() // 32)
        return range(first, first + count)

    def used(self):
        """Registers that it reads. The wide ones of a store or of HMMA are known by their first."""
        found = [int(number) for number in REGISTER.findall(self.operands)]
        return set(found if self.name.startswith(READERS) else found[1:])


class Kernel:
    """The instructions of one function, its basic blocks, and which follows which."""

    def __init__(self, name):
        self.name, self.instructions, self.labels = name, [], {}

    def targets(self, instruction):
        """Where a branch may go: an indirect one has a list. A call of a label in the same function is a branch, too."""
        return {self.labels[label] for label in LABELS.findall(instruction.operands) if label in self.labels}

    def blocks(self):
        ends = (*BRANCHES, "EXIT", "RET", "BREAK")
        starts = {0} | {at for at in self.labels.values() if at < len(self.instructions)}
        starts |= {at + 1 for at, it in enumerate(self.instructions) if it.name in ends and at + 1 < len(self.instructions)}
        starts = sorted(starts)
        self.ranges = [range(a, b) for a, b in zip(starts, [*starts[1:], len(self.instructions)])]
        number = {block.start: index for index, block in enumerate(self.ranges)}
        self.follow = []
        for index, block in enumerate(self.ranges):
            last, after = self.instructions[block[-1]], set()
            # `BRA P0, label` and `BRA.DIV` depend on something, too.
            always = last.guard is None and not (last.name == "BRA" and (last.suffixes or "," in last.operands))
            if last.name in BRANCHES:
                after |= {number[target] for target in self.targets(last) if target in number}
            if not (always and last.name in ("BRA", "JMP", "JMX", "BRX", "EXIT", "RET")) and index + 1 < len(self.ranges):
                after.add(index + 1)
            self.follow.append(after)

    def loops(self):
        """{head: the blocks of its natural loop}, by the edges that lead back to a block that dominates their start."""
        count, order, seen = len(self.ranges), [], set()
        stack = [(0, iter(sorted(self.follow[0])))]
        seen.add(0)
        while stack:
            block, rest = stack[-1]
            step = next((it for it in rest if it not in seen), None)
            if step is None:
                order.append(stack.pop()[0])
            else:
                seen.add(step)
                stack.append((step, iter(sorted(self.follow[step]))))
        order.reverse()
        place = {block: index for index, block in enumerate(order)}
        before = [[] for _ in range(count)]
        for block in order:
            for after in self.follow[block]:
                before[after].append(block)
        above, changed = {0: 0}, True
        while changed:
            changed = False
            for block in order[1:]:
                known = [it for it in before[block] if it in above]
                new = known[0]
                for other in known[1:]:
                    while new != other:
                        if place[new] > place[other]:
                            new = above[new]
                        else:
                            other = above[other]
                if above.get(block) != new:
                    above[block], changed = new, True
        found = {}
        for block in order:
            for head in self.follow[block]:
                it = block
                while it != head and it != 0:
                    it = above[it]
                if it == head:
                    body, rest = found.setdefault(head, {head}), [block]
                    while rest:
                        if (it := rest.pop()) not in body:
                            body.add(it)
                            rest += before[it]
        self.order = order
        return found

    def path(self, head, body, inner):
        """The instructions of the cheapest path with the most work: through the blocks of a loop that are in no inner one, and with inner
        loops once, on their way from head to end."""
        nested = set().union(*(blocks for blocks in inner.values())) if inner else set()
        best = {head: ((0, 0, 0), None)}
        ends = []
        for block in self.order:
            if block not in body or block not in best:
                continue
            score = best[block][0]
            if block not in nested:
                of = [self.instructions[at] for at in self.ranges[block]]
                moved = sum(it.bits() for it in of if it.name in (*GLOBAL_READS, *GLOBAL_WRITES))
                score = (score[0] + sum(it.tensor() for it in of), score[1] + moved, score[2] - len(of))
            for after in self.follow[block]:
                if after == head:
                    ends.append((score, block))
                elif after in body and self.place(after) > self.place(block) and (after not in best or score > best[after][0]):
                    best[after] = (score, block)
        _, block = max(ends, default=((0, 0, 0), head))
        blocks = []
        while block is not None:
            blocks.append(block)
            block = best[block][1]
        whole = [(block in nested, self.instructions[at]) for block in reversed(blocks) for at in self.ranges[block]]
        return [it for is_nested, it in whole if not is_nested], [it for _, it in whole]

    def line_of(self, head, body):
        """Where the loop stands in the source: file and line of the branch back to its head."""
        backs = [self.instructions[self.ranges[block][-1]].line for block in body if head in self.follow[block]]
        return min((line for line in backs if line), default=("", 0))

    def place(self, block):
        if not hasattr(self, "places"):
            self.places = {it: index for index, it in enumerate(self.order)}
        return self.places[block]


def parse(text):
    """The functions of a disassembly with line numbers (nvdisasm -c -g), by name."""
    kernels, kernel, line, labels = {}, None, None, []
    for row in text.splitlines():
        if match := INSTRUCTION.match(row):
            if kernel is not None:
                for label in labels:
                    kernel.labels[label] = len(kernel.instructions)
                labels = []
                kernel.instructions.append(Instruction(match, line))
        elif match := LABEL.match(row):
            labels.append(match[1])
        elif match := PLACE.match(row):
            line = (match[1], int(match[2]))
        elif match := FUNCTION.match(row):
            kernel, line, labels = kernels.setdefault(match[1], Kernel(match[1])), None, []
        elif SECTION.match(row):
            kernel = None
    return kernels


def in_flight(path):
    """The most bytes of a lane's global loads that are under way at once, in two rounds of a loop; a load ends at the first use of
    what it brings, and those that started before it with it. Copies to shared memory end at their wait."""
    waiting, most, now = [], 0, 0
    for it in [*path, *path]:
        used = it.used()
        ended = max((index for index, (registers, _) in enumerate(waiting) if registers & used), default=-1)
        if it.name == "LDGDEPBAR" or it.opcode.startswith("DEPBAR"):
            ended = max(ended, *(index for index, (registers, _) in enumerate(waiting) if not registers), -1) if it.name == "DEPBAR" else ended
        waiting = waiting[ended + 1 :]
        if it.name in GLOBAL_READS:
            waiting.append((it.loaded() if it.name == "LDG" else set(), it.bits() // 8))
        now = sum(size for _, size in waiting)
        most = max(most, now)
    return most


def copies(path):
    """How many stores to shared memory store what a global load of the same round brought."""
    held, found = set(), 0
    for it in path:
        if it.name == "STS":
            found += bool(it.used() & held)
        elif it.name == "LDG":
            held |= it.loaded()
        else:
            held.discard(it.registers()[0])
    return found


def longest_without_tensor(path):
    """The most instructions between two of tensor cores, over several rounds of a loop; None without tensor instructions."""
    at = [index for index, it in enumerate(path) if it.name in TENSOR]
    return max(after - before - 1 for before, after in zip(at, [*at[1:], at[0] + len(path)])) if at else None


def mixed(kernel):
    """Rows that HGMMA reads from registers which instructions of different kinds have written, as if weights of the softmax could be rows
    of queries. NVIDIA's compilers from 12.1 to 13.0 made such code of correct PTX: they gave the weights the registers of rows that the
    next round of the loop still needed."""
    before, found, waiting = [{} for _ in kernel.ranges], set(), set(range(len(kernel.ranges)))
    while waiting:
        block = waiting.pop()
        writers = dict(before[block])
        for it in (kernel.instructions[at] for at in kernel.ranges[block]):
            if rows := it.name == "HGMMA" and ROWS.match(it.operands):
                found |= {it.operands for register in range(int(rows[1]), int(rows[1]) + 4) if len(writers.get(register, ())) > 1}
            for register in it.written():
                writers[register] = frozenset({it.name} | (writers.get(register, frozenset()) if it.guard else frozenset()))
        for after in kernel.follow[block]:
            joined = {register: names | before[after].get(register, frozenset()) for register, names in writers.items()}
            if joined != {register: before[after].get(register) for register in writers}:
                before[after].update(joined)
                waiting.add(after)
    return sorted(found)


OVERWRITTEN = """
.text.kernel:
    /*0000*/ LDSM.16.M88.4 R4, [R0] ;
.L_x_1:
    /*0010*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24 ;
    /*0020*/ F2FP.BF16.F32.PACK_AB R4, R8, R9 ;
    /*0030*/ @P0 BRA `(.L_x_1) ;
    /*0040*/ EXIT ;
"""


def check_mixed():
    """Whether `mixed` finds what it is for, and only that."""
    for text, count in ((OVERWRITTEN, 1), (OVERWRITTEN.replace("R4, R8", "R12, R8"), 0)):
        kernel = parse(text)["kernel"]
        kernel.blocks()
        assert len(mixed(kernel)) == count, f"{mixed(kernel)}, expected {count} of {text}"


def figures_of_loop(path, whole):
    counts = {}
    for it in path:
        if it.name in MEMORY:
            name = f"{it.name}.{it.bits()}" if it.name != "LDSM" else "LDSM"
            counts[name] = counts.get(name, 0) + 1
    size = lambda names: sum(it.bits() // 8 for it in path if it.name in names)
    return {
        "instructions": len(path), "all_instructions": whole, "tensor": sum(it.tensor() for it in path), "memory": counts,
        "read": size(GLOBAL_READS), "written": size(GLOBAL_WRITES), "in_flight": in_flight(path),
        "barriers": sum(it.name == "BAR" for it in path), "exponentials": sum(it.opcode.startswith("MUFU.EX2") for it in path),
        "copies": copies(path), "groups": sum(it.name == "HGMMA" for it in path),
    }


def analyse(kernel, texts):
    """The figures of each loop of a kernel, in the order of the code. `texts` are the lines of the source files, by name."""
    kernel.blocks()
    found = kernel.loops()
    loops, inner_of = [], {}
    for head, body in sorted(found.items(), key=lambda it: len(it[1])):
        inner = {other: blocks for other, blocks in found.items() if other != head and other in body}
        path, with_inner = kernel.path(head, body, inner)
        own = body.difference(*inner.values())
        figures = figures_of_loop(path, sum(len(kernel.ranges[block]) for block in own))
        file, line = kernel.line_of(head, body)
        figures["at"] = f"{file}:{line}"
        figures["source"] = "".join(texts.get(file, [])[line - 1 : line]).strip()
        figures["longest_without_tensor"] = longest_without_tensor(with_inner)
        figures["depth"] = sum(head in blocks for other, blocks in found.items() if other != head)
        # Loops inside run at least once a round.
        inner_of[head] = figures["instructions"] + sum(inner_of[other] for other in inner if not any(other in inner[it] for it in inner if it != other))
        figures["with_inner"] = inner_of[head]
        loops.append((head, figures))
    loops.sort(key=lambda it: it[0])
    tensor = sum(it.tensor() for it in kernel.instructions)
    held = sum(it.name == "HGMMA" and ROWS.match(it.operands) is not None for it in kernel.instructions)
    # Accesses that the host sees, or that see the host's, while the kernel runs.
    of_host = sum({"STRONG", "SYS"} <= set(it.suffixes) for it in kernel.instructions)
    order = "".join(ORDERING.get(it.name, "") for it in kernel.instructions)
    return {"instructions": len(kernel.instructions), "tensor": tensor, "order": order, "mixed": mixed(kernel), "held": held, "of_host": of_host, "loops": [figures for _, figures in loops]}


def threads_of(image):
    """The launch bound of each kernel of an ELF image, from its section .nv.info.KERNEL."""
    (headers,) = struct.unpack_from("<Q", image, 40)
    _, count, names = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQ", image, headers + index * 64) for index in range(count)]
    found = {}
    for name, _, _, _, start, length in sections:
        name = image[sections[names][4] + name :].split(b"\0", 1)[0].decode()
        at, end = start, start + length
        while name.startswith(".nv.info.") and at < end:
            kind, attribute, size = struct.unpack_from("<BBH", image, at)
            if (kind, attribute) == (4, 5):  # a sized value: the most threads
                x, y, z = struct.unpack_from("<III", image, at + 4)
                found[name.removeprefix(".nv.info.")] = x * y * z
            at += 4 + (size if kind == 4 else 0)
    return found
