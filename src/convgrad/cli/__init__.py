"""The command `convgrad`: run graph files, check and time problems, show operations, explain plans.

Exit codes: 0 all passed, 1 some failed or were refused, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .driver import Case
    from .tasks import Entry, Settings
    from .words import Options

MISSING = "the command needs rich and msgspec: pip install rich msgspec"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        import msgspec  # noqa: F401
        import rich  # noqa: F401
    except ImportError:
        print(f"convgrad: {MISSING}", file=sys.stderr)
        return 2
    from ..errors import ConvgradError
    from ..spec.check import meant
    from .words import UsageError

    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help", "--version"):
        _parser().parse_args(words or ["--help"])
    if words[0] not in COMMANDS:
        hint = meant(words[0], COMMANDS) or f"there are {', '.join(COMMANDS)}"
        _complain("convgrad", f"there is no command {words[0]!r}; {hint}", "convgrad --help")
        return 2
    command, rest = words[0], [word for word in words[1:] if word != "--"]
    try:
        if "-h" in rest or "--help" in rest:
            print(_help(command), end="")
            return 0
        return COMMANDS[command](rest)
    except UsageError as error:
        _complain(f"convgrad {command}", str(error), f"convgrad {command} --help")
        return 2
    except ConvgradError as error:
        _complain(f"convgrad {command}", str(error))
        return 2
    except BrokenPipeError:
        # The reader of our output, such as `head`, has gone; nothing more can be said.
        sys.stderr.close()
        return 1


def _complain(who: str, what: str, see: str = "") -> None:
    """Say what is wrong, folded between words on a terminal."""
    text = f"{who}: {what}"
    if see:
        text += f" See `{see}`." if text.endswith("?") else f"; see `{see}`"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text, file=sys.stderr)


def _run(words: list[str]) -> int:
    from .driver import parse
    from .report import Report
    from .run import about, columns, run_case
    from .words import UsageError, split

    options = _own("run")
    own, rest = split(words, options)
    cases = parse(rest, options)
    if not cases:
        raise UsageError("no file: name one, or give --case=FILE or --batch=FILE")
    _readable(cases)
    intro, outro = about(cases)
    report = Report("json" in own, int(own.get("verbose", 0)), columns(cases), intro, outro)
    return report.each(cases, run_case)


def _check(words: list[str]) -> int:
    from .check import check_entry, columns
    from .report import Report
    from .tasks import Settings, parse
    from .words import UsageError, split

    options = _own("check")
    own, rest = split(words, options)
    chosen = own.get("engine", "cpu").partition(":")[0]
    if chosen not in ("cpu", "reference"):
        raise UsageError(f"--engine={chosen}: there are cpu and reference")
    entries = parse(rest, Settings(), options)
    if not entries:
        raise UsageError("no problem: give a descriptor, such as ic16oc16_ih7kh3ph1, or --batch=FILE")
    entries = _meaningful(entries, Settings())
    report = Report("json" in own, int(own.get("verbose", 0)), columns(entries))
    return report.each(entries, lambda entry: check_entry(entry, chosen))


def _bench(words: list[str]) -> int:
    from ..bench import timing
    from .bench import PEERS, Bench, bench_entry, bench_graph, columns, notes
    from .driver import parse as parse_graph
    from .report import Report, console
    from .tasks import Entry, Settings, parse
    from .words import UsageError, each, split

    options = _own("bench")
    own, rest = split(words, options)
    try:
        budget = float(own.get("budget", "2"))
    except ValueError:
        raise UsageError(f"--budget={own['budget']}: needs a number of seconds") from None
    if not 0 < budget < 1e6:
        raise UsageError(f"--budget={own['budget']}: needs a positive number of seconds")
    files = [word for word in rest if word.endswith(".json") and not word.startswith("-")]
    graphs = parse_graph(files)
    problems = parse([word for word in rest if word not in files], Settings(), options)
    if not graphs and not problems:
        raise UsageError("nothing to time: give a descriptor, --batch=FILE or a graph file")
    _readable(graphs)
    if not problems:
        _unchanged(files, rest)
    problems = _meaningful(problems, Settings()) if problems else []
    named = [name for name in each(own.get("peers", "")) if name != "none"]
    screen = console(stderr=True)
    missing: Mapping[str, str | None] = {}
    if named or "peers" not in own:
        # PyTorch alone takes seconds to load.
        with screen.status("loading the other libraries") if screen.is_terminal else nullcontext():
            missing = {name: peer.available() for name, peer in PEERS.items()}
    for name in named:
        if name not in missing:
            raise UsageError(f"--peers={name}: {' and '.join(PEERS)} are known")
        if missing[name]:
            raise UsageError(f"--peers={name}: {missing[name]}")
    chosen = tuple(named if "peers" in own else [name for name, reason in missing.items() if not reason])
    bench = Bench(chosen, timing.Pace(budget=budget))
    entries: list[Any] = [*graphs, *problems]
    intro = f"Every result is compared with the right one, then timed for {budget:g} s"
    intro += f", shared with {' and '.join(chosen)}" if chosen else ""
    intro += ". The comparison, and measuring the machine once, take their own time."
    report = Report("json" in own, int(own.get("verbose", 0)), columns(entries, bench), intro)
    others = timing.OtherWork()
    code = report.each(entries, lambda e: bench_entry(e, bench) if isinstance(e, Entry) else bench_graph(e, bench))
    for note in notes(report.outcomes, others):
        report.note(note)
    return code


def _readable(cases: Sequence[Case]) -> None:
    """Refuse files of the command line that cannot be read. In a batch, such a file is one case among others."""
    from ..errors import SpecError
    from ..spec.descriptors import Descriptor
    from .rewrite import document
    from .words import UsageError

    for case in cases:
        if case.listed:
            continue
        try:
            document(case.path)
        except SpecError as error:
            if "not JSON" in str(error) and not case.name.endswith(".json"):
                what = f"{case.name} is not a graph file; descriptors are for `convgrad check --batch={case.name}`"
                raise UsageError(what) from None
            with suppress(SpecError):
                if not case.path.exists() and Descriptor.parse(case.name):
                    what = f"there is no file {case.name}; a descriptor is for `convgrad check`"
                    raise UsageError(what) from None
            raise


def _unchanged(names: Sequence[str], rest: Sequence[str]) -> None:
    """Refuse options that would change a descriptor where there is none."""
    from ..spec.check import listed
    from .tasks import FIELDS
    from .words import UsageError

    options = {word.partition("=")[0] for word in rest if word.startswith("--")}
    wrong = [f"--{name}" for name in FIELDS if f"--{name}" in options]
    if wrong:
        verb = "applies" if len(wrong) == 1 else "apply"
        raise UsageError(f"{listed(wrong)} {verb} to descriptors; {names[0]} names its own")


def _meaningful(entries: Sequence[Entry], start: Settings) -> list[Entry]:
    """The entries that --match finds. `start` is what the command begins with.

    Words of the command line that are no problem are refused. In a batch, such a word is one case among others.
    """
    from ..errors import SpecError
    from ..spec.check import listed
    from .tasks import joined
    from .words import UsageError

    for place, entry in enumerate(entries):
        if entry.where:
            continue
        if entry.is_line and (changed := entry.settings.changes(start)):
            verb = "applies" if len(changed) == 1 else "apply"
            raise UsageError(f"{listed(changed)} {verb} to descriptors; the line {entry.text!r} names its own")
        try:
            entry.read()
        except SpecError as error:
            if entry.text.endswith(".json"):
                raise UsageError(f"{entry.text} is a graph file, not a problem; use `convgrad run`") from None
            if Path(entry.text).exists():
                raise UsageError(f"{entry.text} is a file, not a problem; use --batch={entry.text}") from None
            whole = joined([other.text for other in entries], place)
            hint = f"; a descriptor has no spaces: {whole}" if whole else ""
            raise UsageError(f"{error}{hint}") from None
    found = [entry for entry in entries if entry.matches]
    if not found:
        raise UsageError(f"--match={entries[0].settings.match} finds none of {len(entries)} problems")
    return found


def _ops(words: list[str]) -> int:
    from rich.console import Console

    from ..errors import SpecError
    from ..graph.kinds import find
    from ..spec.table import ALL_OPS
    from .ops import listing, schema, show
    from .words import option_of, split

    options = _own("ops")
    own, names = split(words, options)
    for name in names:
        if name.startswith("-"):
            option_of(name, options)
    try:
        meanings = [find(name) for name in names]
    except SpecError as error:
        error.message += "; `convgrad ops` lists those of this family"
        raise
    if "json" in own:
        rows = [meaning.op for meaning in meanings] or ALL_OPS.values()
        print(json.dumps([schema(row) for row in rows], indent=2))
        return 0
    screen = Console(highlight=False, width=min(shutil.get_terminal_size().columns, 120))
    if not meanings:
        listing(screen)
    for meaning in meanings:
        show(meaning, screen)
    return 0


def _explain(words: list[str]) -> int:
    from ..backend import Device
    from ..graph.reader import read_file
    from .explain import as_json, explained, on, told
    from .tasks import Settings, parse
    from .words import UsageError, split

    options = _own("explain")
    own, rest = split(words, options)
    files = [word for word in rest if word.endswith(".json") and not word.startswith("-")]
    start = Settings(directions=())
    entries = parse([word for word in rest if word not in files], start, options)
    if not entries and not files:
        raise UsageError("nothing to explain: give a descriptor, a problem line or a graph file")
    if entries:
        entries = _meaningful(entries, start)
    else:
        _unchanged(files, rest)
    found = explained(entries, [read_file(file).graph() for file in files])
    if "device" in own:
        found = on(Device.parse(own["device"]), found)
    width = min(shutil.get_terminal_size().columns, 120)
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    lines = as_json(found) if "json" in own else told(found, width=width, plain=plain, verbose="verbose" in own)
    for line in lines:
        print(line)
    return 0


def _own(command: str) -> Options:
    """The options of a command beside those of the grammar that its words have."""
    from .words import Option, by_name

    own = {
        "check": [Option("engine", "NAME", "cpu, or reference (NumPy)")],
        "bench": [
            Option("peers", "NAMES", "other libraries: torch, onednn (all that are installed), or none (--peers=none)"),
            Option("budget", "SECONDS", "seconds for one problem (2)"),
        ],
        "explain": [
            Option("verbose", "", "every field of the plan, too"),
            Option("device", "NAME", "where it would be computed: cpu, or cuda"),
        ],
    }
    return by_name(Option("json", "", "lines of JSON instead of tables"), *own.get(command, []))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "check": _check,
    "bench": _bench,
    "ops": _ops,
    "explain": _explain,
}

_ABOUT = {
    "run": "run graph files of oneDNN, by the rules of benchdnn's graph driver",
    "check": "compute problems on integers and compare the results to the bit",
    "bench": "time problems beside the machine's limits and other libraries",
    "ops": "show the operations: tensors, attributes, types",
    "explain": "show a layer's sizes, padding and cost, and how it is computed",
}

_PROBLEM = """a descriptor of benchdnn, oneDNN's test program, or a line in
which convgrad itself names problems. In ic16oc16_ih7kh3ph1, 16 channels go in
and 16 come out, and image, kernel and padding are 7x7, 3x3 and 1; docs/cli.md
lists all keys."""

_WHAT = {
    "run": "WHAT is a graph file, such as examples/layer.json.",
    "check": f"WHAT is {_PROBLEM}",
    "bench": f"WHAT is a graph file, or {_PROBLEM}",
    "ops": "NAME is that of an operation, such as Convolution; without it, all are listed.",
    "explain": f"WHAT is a graph file, or {_PROBLEM}",
}

_EXAMPLES = {
    "run": """
  convgrad run examples/layer.json
  convgrad run --mode=P examples/layer.json
  convgrad run --dt=f32,bf16 --in-shapes=0:4x28x28x64 \\
    --case=examples/convolution.json
  convgrad run --in-shapes=0:1x128x14x14 --op-attrs=0:dst_shape:1x64x28x28 \\
    --case=examples/convolution_backward_data.json
  convgrad run --batch=examples/graphs
""",
    "check": """
  convgrad check ic16oc16_ih7kh3ph1
  convgrad check --dir=BWD_D,BWD_W --dt=f32,bf16 --tag=nxc mb8ic64ih56oc64kh3ph1
  convgrad check --deconv g2mb256oc96oh27ic256ih27kh5ph2
  convgrad check 'x f32 n2 g1 cx16 cy32 x28x28 w3x3 y14x14 s2x2 d1x1 p1x1'
  convgrad check --batch=examples/shapes_resnet50 --match=res4
""",
    "bench": """
  convgrad bench mb8ic64ih56oc64oh56kh3ph1
  convgrad bench --dir=BWD_D --tag=nxc --peers=none ic16oc16ih7kh3ph1
  convgrad bench --peers=none --match=res4 --batch=examples/shapes_resnet50
  convgrad bench --json examples/layer.json
""",
    "ops": """
  convgrad ops
  convgrad ops ConvTransposeBackwardData
  convgrad ops --json
""",
    "explain": """
  convgrad explain ic16oc16_ih7kh3sh2dh1
  convgrad explain --dir=BWD_W --dt=bf16 --tag=nxc mb8ic64ih56oc64kh3sh2ph1
  convgrad explain --verbose 'x f32 n2 g1 cx16 cy32 x28 w3 y14 s2 d1 p1'
  convgrad explain examples/conv_transpose.json
""",
}


def _parser() -> argparse.ArgumentParser:
    from .. import __version__

    commands = "\n".join(f"  {name:<8} {text}" for name, text in _ABOUT.items())
    parser = argparse.ArgumentParser(
        "convgrad",
        description="Convolution, transposed convolution and their gradients,\nexactly as oneDNN Graph defines them.",
        epilog=f"commands:\n{commands}\n\n`convgrad COMMAND --help` has examples. Exit codes: 0 all passed, 1 some\n"
        "failed or were refused, 2 wrong usage, 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"convgrad {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    return parser


def _folded(text: str) -> str:
    """A paragraph in lines that fit a terminal of the usual width."""
    return textwrap.fill(" ".join(text.split()), 78, break_long_words=False, break_on_hyphens=False)


def _help(command: str) -> str:
    """The help of a command, from the rows of its options."""
    from . import driver, tasks

    examples = _EXAMPLES[command].rstrip()
    if "examples/" in examples:
        examples += "\n\nThe folder examples/ is in convgrad's repository: run these lines at its root."

    parser = argparse.ArgumentParser(
        f"convgrad {command}",
        usage=f"convgrad {command} [OPTIONS] {'[NAME]' if command == 'ops' else 'WHAT ...'}",
        description=f"{_ABOUT[command][0].upper()}{_ABOUT[command][1:]}.\n\n{_folded(_WHAT[command])}",
        epilog=f"examples:{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    grammar = {"run": driver.OPTIONS, "ops": {}}.get(command, tasks.OPTIONS)
    for option in (*_own(command).values(), *grammar.values()):
        form = {"metavar": option.form} if option.form else {"action": "store_true"}
        text = option.text + ("; commas for alternatives" if option.multiple else "")
        names = ["-v"] if option.name == "verbose" else []
        parser.add_argument(*names, f"--{option.name}", help=text.replace("%", "%%"), **form)  # type: ignore[arg-type]
    if command in ("run", "check", "bench"):
        parser.add_argument("-v1", action="store_true", help="show every case")
    return parser.format_help()
