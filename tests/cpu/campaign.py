"""Random problems by the engine, in a process of its own, so that a fault is a failure with a name.

python tests/cpu/campaign.py --count 5000                          all machines, from seed 0
python tests/cpu/campaign.py --target avx2 --start 70 --count 1
python tests/cpu/campaign.py --target avx2 'w f32 n1 g1 cx3 cy5 x9 w3 y9 s1 d1 p1'
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parents[1]
TEAMS = ((1, 2, 3), (1, 2, 3), (1, 2, 3), (3, 1, 5), (2, 9, 17))  # more than 4 threads are planned for anew

INVENTED = "invented"  # the name of no machine in particular: each problem gets one of its own

Item = int | str
"""A problem to check: the seed that it is drawn from, or its text."""


def seed_of(text: str) -> int:
    """A text stands for its own seed, always the same: machines, teams and gaps are chosen by it."""
    return crc32(text.encode())


def teams(seed: int) -> tuple[int, ...]:
    """The numbers of threads that a problem is computed on."""
    return TEAMS[seed % len(TEAMS)]


def run(items: Sequence[tuple[str, Item]]) -> tuple[list[str], list[str]]:
    """Check problems, each for a machine: those that the engine declined, and the failures, with seed and problem."""
    failures: list[str] = []
    declined: list[str] = []
    while items and len(failures) < 10:
        code, output, errors = _work(items)
        lines = output.splitlines()
        declined += [line.removeprefix("declined ") for line in lines if line.startswith("declined")]
        failures += [line.removeprefix("failed ") for line in lines if line.startswith("failed")]
        if code == 0:
            break
        # It died of the problem that it had announced last; the others are left to a new process.
        announced = [line.removeprefix("problem ") for line in lines if line.startswith("problem")]
        died = "never ended" if code is None else f"died of {_signal(-code)}" if code < 0 else f"left with {code}"
        failures.append(f"{announced[-1] if announced else items[0]}: {died}\n{errors[-2000:]}")
        items = items[len(announced) :] if announced else []
    return declined, failures


def _work(items: Sequence[tuple[str, Item]]) -> tuple[int | None, str, str]:
    """Check problems in a new process: its exit code (None if it took too long), output and errors."""
    import convgrad

    paths = [str(Path(convgrad.__file__).parents[1]), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "cpu.campaign", "--work"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as worker:
        try:
            output, errors = worker.communicate(json.dumps(list(items)), timeout=60 + 5 * len(items))
        except subprocess.TimeoutExpired:
            worker.kill()
            return None, *worker.communicate()
        return worker.returncode, output, errors


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def work(items: Sequence[tuple[str, Item]]) -> None:
    """Check problems in this process: one line before each, and one more for each that fails or is declined."""
    from convgrad.spec.problem import Problem

    from .problems import check, invented, numbered, targets

    machines = targets()
    failures = 0
    for target, item in items:
        if failures == 10:
            break
        p, seed = (Problem.parse(item), seed_of(item)) if isinstance(item, str) else (numbered(item), item)
        print(f"problem {seed} {target}: {p}", flush=True)
        try:
            machine = invented(seed) if target == INVENTED else machines[target]
            reason = check(p, machine, teams(seed), seed, gaps=seed % 4 == 3)
        except Exception as error:
            failures += 1
            print(f"failed {seed} {target}: {p}: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            if reason:
                print(f"declined {seed} {target}: {p}: {reason}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", help="texts of problems, instead of seeds")
    parser.add_argument("--target", help="one machine only: of targets() in problems.py, or 'invented'")
    parser.add_argument("--start", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--count", type=int, default=500, help="problems for each machine (500)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.work:
        work(json.load(sys.stdin))
        return 0
    sys.path.insert(0, str(ROOT))
    from cpu.problems import USERS_CODE, targets

    os.environ[USERS_CODE] = "1"
    os.environ["CONVGRAD_CACHE"] = "off"  # thousands of kernels that nobody needs again
    failed = 0
    for i, name in enumerate([given.target] if given.target else [*targets(), INVENTED]):
        first = given.start + i * given.count  # each machine gets problems of its own
        items = given.problems or range(first, first + given.count)
        declined, failures = run([(name, item) for item in items])
        failed += len(failures)
        print("".join(f"{failure}\n" for failure in failures), end="")
        print(f"{name}: {len(items)} problems, {len(declined)} declined, {len(failures)} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
