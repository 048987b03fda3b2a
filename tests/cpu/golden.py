"""What code the engine writes, kept as hashes in golden.txt, so that a change of it is never an accident.

    python tests/cpu/golden.py --check                      the sample that is in the suite, in seconds
    python tests/cpu/golden.py --check --all                every problem on every machine, in about a minute
    python tests/cpu/golden.py --show 'depthwise' 'avx2'    the code that is hashed, to compare two trees
    python tests/cpu/golden.py --renew                      take all as it is now; the commit says why it has changed

A problem has a line for each machine, and in it for 1, 2, 3 and 8 threads the hash of the code, where it is another
one than before, the bytes of workspace and the threads that work. Names do not count: see `normalised`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import cases  # noqa: E402
from convgrad.backend import Refusal  # noqa: E402
from convgrad.cpu import kernel  # noqa: E402
from convgrad.cpu.plan.records import Plan  # noqa: E402
from convgrad.spec.problem import Problem  # noqa: E402
from cpu.machines import INTEL  # noqa: E402
from cpu.machines import MACHINES as GENERAL  # noqa: E402
from cpu.named import DECLINED, FEW_CHANNELS, LAYERS, NAMED, SPLIT, TILED  # noqa: E402
from cpu.problems import DTYPE_NAMES, however_small, numbered  # noqa: E402

MACHINES = GENERAL | INTEL
FILE = Path(__file__).with_name("golden.txt")
TEAMS = (1, 2, 3, 8)
DRAWN = range(40000, 40300)
PARTS = 96  # of all cases, by chance
SAMPLE = 0, 48, 24, 72  # those that are in the suite; the first of them for a developer in a hurry

Case = tuple[str, str]
"""A problem's title and a machine."""
Difference = tuple[Case, str, str]
"""What differs where: the code, the workspace, the threads or the reason; and the first of it in words."""


@dataclass(frozen=True)
class Subject:
    """A problem, and the machines that code is written for. One that was drawn is planned as it is for a caller."""

    problem: Problem
    machines: tuple[str, ...]
    drawn: bool = False

    def plan(self, machine: str, team: int) -> Plan:
        """The plan; of problems with a name as if they were large, so that all threads have work."""
        with nullcontext() if self.drawn else however_small():
            return kernel.make_plan(self.problem, MACHINES[machine], team)


def named() -> dict[str, Subject]:
    """Every problem with a name that the engine is asked for."""
    every = tuple(GENERAL)
    texts = {title: (text, every) for title, text in NAMED.items()}
    texts |= {text: (text, every) for text in DECLINED}
    texts |= {text: (text, (one_of(every, text),)) for text in FEW_CHANNELS}
    for dtype in DTYPE_NAMES:
        for title, p in cases.problems(dtype).items():
            # Kinds of machine differ most in f32; for the other types, two machines are enough.
            some = every if dtype == "f32" else ("halves", one_of(every, f"{title} {dtype}"))
            texts[f"case, {title} {dtype}"] = (str(p), tuple(dict.fromkeys(some)))
    for (title, sizes), wanted, kind in product(LAYERS.items(), "xwy", ("f32", "f32 nxc", "bf16 nxc")):
        dtype, nxc = kind[:4].strip(), kind.endswith("nxc")
        text = f"{wanted} {dtype} {sizes}{' x@nxc y@nxc w@xio' * nxc}"
        texts[f"layer, {title}: {wanted} {kind}"] = (text, ("avx512", "halves", one_of(every[3:], text)))
    texts |= {title: (text, tuple(INTEL)) for title, text in TILED.items()}
    texts |= {title: (text, ("tiles, emulated",)) for title, text in SPLIT.items() if title.endswith("six")}
    found = {title: Subject(Problem.parse(text), machines) for title, (text, machines) in texts.items()}
    return {title: s for title, s in found.items() if all(s.problem.size(role) for role in ("x", "w", "y"))}


def drawn() -> dict[str, Subject]:
    """Random problems. They are read back from the file, since what is drawn may be drawn otherwise one day."""
    return {f"drawn {seed}": draw(numbered(seed), f"drawn {seed}") for seed in DRAWN}


def draw(problem: Problem, title: str) -> Subject:
    """A random problem on a machine that its title decides."""
    return Subject(problem, (one_of(tuple(GENERAL), title),), drawn=True)


def one_of(machines: Sequence[str], text: str) -> str:
    """A machine, always the same for a text."""
    return machines[crc32(text.encode()) % len(machines)]


# Code.

LABEL = re.compile(r"^([\w.$-]+):", re.MULTILINE)
LOCAL = re.compile(r'(%(?:[\w.$-]+|"[^"]*"))')
GLOBAL = re.compile(r'(@(?:[\w.$-]+|"[^"]*"))')
METADATA = re.compile(r"(!\d+)")
ATTRIBUTES = re.compile(r"(#\d+)")
COMMENT = re.compile(r'^((?:[^";]|"[^"]*")*);.*$', re.MULTILINE)
BLANK = re.compile(r"^[ \t]+|[ \t]+$|\n\s*(?=\n)", re.MULTILINE)
DECLARED = re.compile(r"^declare [^@]*(@[\w.$-]+)", re.MULTILINE)


def normalised(text: str) -> str:
    """The code without the names that its author chose: values, blocks, functions, constants and metadata are numbered
    as they appear, those in a function anew. What LLVM and the system provide keeps its name. No comments, no indents.
    """
    if ";" in text:
        text = COMMENT.sub(r"\1", text)
    text = BLANK.sub("", text).strip("\n")
    # A block is called as it is where one jumps to it.
    text = "\n}".join(_number(LABEL.sub(r"%\1:", part), LOCAL, "%") for part in text.split("\n}"))
    text = _number(text, GLOBAL, "@", keep=DECLARED.findall(text))
    return _number(_number(text, METADATA, "!"), ATTRIBUTES, "#")


def _number(text: str, name: re.Pattern[str], mark: str, keep: Sequence[str] = ()) -> str:
    parts = name.split(text)
    kept = dict.fromkeys(keep)
    found = [n for n in dict.fromkeys(parts[1::2]) if n not in kept]
    numbers = {**{n: n for n in kept}, **{n: f"{mark}{i}" for i, n in enumerate(found)}}
    parts[1::2] = map(numbers.__getitem__, parts[1::2])
    return "".join(parts)


def result(subject: Subject, machine: str) -> str:
    """The line of a problem for a machine."""
    entries: list[str] = []
    hashes: dict[str, str] = {}  # Code for several numbers of threads is mostly the same.
    last = ""
    for team in TEAMS:
        plan = subject.plan(machine, team)
        if isinstance(plan, Refusal):
            entries.append(f"declined: {plan.reason}")
            continue
        text = kernel.write(plan)
        if text not in hashes:
            hashes[text] = sha256(normalised(text).encode()).hexdigest()[:12]
        shown = "" if hashes[text] == last else f"{hashes[text]} "
        last = hashes[text]
        entries.append(f"{shown}{plan.workspace}/{plan.threads}")
    return entries[0] if len(set(entries)) == 1 and "declined" in entries[0] else "; ".join(entries)


# The file.


def read() -> tuple[dict[str, Subject], dict[Case, str]]:
    """The problems in the file, and the lines of their cases."""
    subjects: dict[str, Subject] = {}
    lines: dict[Case, str] = {}
    title = ""
    for line in FILE.read_text().splitlines():
        if not line.startswith(" "):
            title, _, text = line.partition(" = ")
            p = Problem.parse(text or title)
            subjects[title] = draw(p, title) if title.startswith("drawn ") else Subject(p, ())
            continue
        machine, _, found = line.strip().partition(": ")
        lines[title, machine] = found
    return subjects, lines


def renew() -> int:
    """Write the file anew, with so many cases."""
    lines: list[str] = []
    subjects = named() | drawn()
    for title, subject in subjects.items():
        text = str(subject.problem)
        lines.append(title if title == text else f"{title} = {text}")
        lines += [f"  {machine}: {result(subject, machine)}" for machine in subject.machines]
    FILE.write_text("".join(f"{line}\n" for line in lines), encoding="ascii", newline="\n")
    return len(lines) - len(subjects)


def check(parts: Collection[int]) -> tuple[int, list[Difference]]:
    """How many cases were looked at, those of some of `PARTS` parts, and how they differ from the file."""
    kept, lines = read()
    now = named() | {title: subject for title, subject in kept.items() if subject.drawn}
    wanted = {(title, machine): subject for title, subject in now.items() for machine in subject.machines}
    found: list[Difference] = [
        *((case, "not in the file", "a new problem or machine") for case in wanted if case not in lines),
        *((case, "in the file only", "its problem or machine is gone") for case in lines if case not in wanted),
    ]
    looked_at = 0
    for case, subject in wanted.items():
        title, machine = case
        if case not in lines or crc32(" ".join(case).encode()) % PARTS not in parts:
            continue
        looked_at += 1
        if subject.problem != kept[title].problem:
            found.append((case, "problem", f"{kept[title].problem} is now {subject.problem}"))
            continue
        line = result(subject, machine)
        if line != lines[case]:
            found += [(case, what, how) for what, how in differences(lines[case], line)]
    return looked_at, found


def differences(before: str, after: str) -> Iterator[tuple[str, str]]:
    """What differs between two lines: each kind once, and the first number of threads where it does in words."""
    seen = set()
    for team, *both in zip(TEAMS, entries(before), entries(after), strict=True):
        if any(len(entry) == 1 for entry in both):
            kinds: Sequence[str] = ("reason",)
            both = [(entry[0] if len(entry) == 1 else "planned",) for entry in both]
        else:
            kinds = ("code", "workspace", "threads")
        for what, old, new in zip(kinds, *both, strict=True):
            if old != new and what not in seen:
                seen.add(what)
                yield what, f"{what} {old} is now {new} (on {team} threads)"


def entries(line: str) -> list[tuple[str, ...]]:
    """A line's code, workspace and threads, or its reason, for each number of threads."""
    found: list[tuple[str, ...]] = []
    code = ""
    for entry in [line] * len(TEAMS) if line.startswith("declined") else line.split("; "):
        if entry.startswith("declined"):
            found.append((entry,))
            continue
        *other, sizes = entry.split()
        code = other[0] if other else code
        found.append((code, *sizes.split("/")))
    return found


# The command.


def report(looked_at: int, found: Sequence[Difference], most: int = 20) -> str:
    """What has changed, where, and what to do."""
    changed = {case for case, _, _ in found}
    if not changed:
        return f"{looked_at} cases, each as {FILE.name} has it"
    lines = [f"{len(changed)} cases differ from {FILE.name}, of {looked_at} looked at:"]
    kinds = {what: [case for case, kind, _ in found if kind == what] for what in dict.fromkeys(d[1] for d in found)}
    for what, those in kinds.items():
        machines = ", ".join(f"{name} {count}" for name, count in Counter(m for _, m in those).items())
        lines.append(f"  {what}: {len(those)} cases, {len({title for title, _ in those})} problems ({machines})")
    lines += [f"{title!r} on {machine!r}: {how}" for (title, machine), _, how in found[:most]]
    if len(found) > most:
        lines.append(f"and {len(found) - most} more")
    title, machine = found[0][0]
    show = f"python tests/cpu/golden.py --show {title!r} {machine!r}"
    return "\n".join(
        [
            *lines,
            f"See it: {show} in this tree and in the one before, and compare the two.",
            "If it is meant: python tests/cpu/golden.py --renew, and say in the commit why the code changes.",
        ]
    )


def show(title: str, machine: str, team: int) -> str:
    """The normalised code of a case, after its workspace and threads."""
    known = named() | {name: subject for name, subject in read()[0].items() if subject.drawn}
    if title not in known:
        raise SystemExit(f"there is no problem {title!r} in {FILE.name}; its lines without an indent begin with names")
    if machine not in MACHINES:
        raise SystemExit(f"there is no machine {machine!r}; there are {', '.join(MACHINES)}")
    plan = known[title].plan(machine, team)
    if isinstance(plan, Refusal):
        return f"declined: {plan.reason}"
    return f"; workspace {plan.workspace}, threads {plan.threads}\n{normalised(kernel.write(plan))}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare with the file; 1 if anything differs")
    action.add_argument("--renew", action="store_true", help="write the file anew")
    action.add_argument("--show", nargs=2, metavar=("NAME", "MACHINE"), help="print the normalised code of one case")
    parser.add_argument("--all", action="store_true", help="check all cases, not the sample that is in the suite")
    parser.add_argument("--threads", type=int, default=2, help="the threads to show code for (2)")
    parser.add_argument("--most", type=int, default=20, help="differences to list one by one (20)")
    given = parser.parse_args(arguments)
    if given.show:
        print(show(*given.show, given.threads))
        return 0
    if given.renew:
        print(f"{FILE.name}: {renew()} cases")
        return 0
    looked_at, found = check(range(PARTS) if given.all else SAMPLE)
    print(report(looked_at, found, given.most))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
