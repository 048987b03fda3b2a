"""The grammar of benchdnn's graph driver: words become settings, settings become cases, a case rewrites a file.

    --reset --in-shapes=0:1x14x14x128 --op-attrs=0:data_format:NXC*dst_shape:1x28x28x32 --dt=f32,bf16 --case=FILE

Options before a `--case` apply to it, and those at the end of a command line to all of it. Commas make alternatives,
and the alternatives of all options are multiplied; an empty one means «as in the file».
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..graph.compiled import resolve
from ..graph.kinds import DataType, FpMathMode, PropertyType, find, is_ours
from ..graph.logical import LogicalTensor
from ..graph.ops import Op, check
from ..graph.reader import Document, read_file
from ..spec.check import meant
from ..spec.problem import Ints, dense_strides, settle
from ..spec.table import DTYPES, SAME_RULES

MODES = {
    "L": "list the cases",
    "I": "compile them",
    "R": "run them",
    "C": "compare the results with the right ones",
    "B": "run them twice and compare the bits",
    "P": "time them",
    "F": "time them quickly",
}
Map = Mapping[int, str]


@dataclass(frozen=True)
class Option:
    """One option of the driver. `multiple` ones take alternatives."""

    name: str
    form: str
    text: str
    multiple: bool = False


OPTIONS = {
    o.name: o
    for o in (
        Option("case", "FILE", "run the graph in a file, with the options so far"),
        Option("in-shapes", "ID:SHAPE[*STRIDES][+...]", "other shapes: 0:1x14x14x128, 0:8x3x5x5*acdb, 0:*acdb", True),
        Option("op-attrs", "ID:NAME:VALUE[*NAME:VALUE][+...]", "other attributes: 0:strides:2x2*groups:4", True),
        Option("dt", "TYPE or ID:TYPE[+...]", "another element type for all tensors, or for some", True),
        Option("mb", "N", "another batch size; 0 keeps it", True),
        Option("expected-n-partitions", "N", "how many partitions there must be; 0 for any number", True),
        Option("attr-fpmath", "MODE[:true|false]", "another mode of floating-point arithmetic", True),
        Option("op-kind", "ID:KIND[+...]", "another operation; for binary and eltwise operations only", True),
        Option("tensor-property", "ID:PROPERTY[+...]", "another property of tensors", True),
        Option("mode", "LETTERS", ", ".join(f"{k}: {v}" for k, v in MODES.items())),
        Option("batch", "FILE", "read words from a file; # begins a comment"),
        Option("engine", "KIND", "cpu"),
        Option("same-rule", "RULE", "the rule of SAME padding: " + ", ".join(SAME_RULES)),
        Option("strict", "", "refuse what oneDNN refuses"),
        Option("reset", "", "forget the options so far, except mode and engine"),
    )
}
_IGNORED = """
    allow-enum-tags-only attr-scratchpad canonical cold-cache cpu-isa-hints ctx-exe ctx-init execution-mode fast-ref
    fix-times-per-prb global-impl impl max-ms-per-prb mem-check memory-kind mode-modifier num-streams perf-template
    repeats-per-prb skip-impl start stream-kind summary test-start verbose
"""
IGNORED = frozenset(_IGNORED.split())
"""Words of benchdnn that are understood and have no effect here."""


class UsageError(Exception):
    """Words that mean nothing; the exit code is 2."""


@dataclass(frozen=True)
class Settings:
    """What the words so far have set: for each option its alternatives."""

    in_shapes: tuple[Map, ...] = ({},)
    op_attrs: tuple[Map, ...] = ({},)
    dt: tuple[Any, ...] = ("",)  # a type for all, or a map
    mb: tuple[int, ...] = (0,)
    partitions: tuple[int | None, ...] = (None,)
    fpmath: tuple[str, ...] = ("",)
    op_kind: tuple[Map, ...] = ({},)
    tensor_property: tuple[Map, ...] = ({},)
    mode: str = "C"
    strict: bool = False
    same_rule: str = "gradient"

    def cases(self, path: Path, name: str, listed: bool = False) -> Iterator[Case]:
        """One case for every combination, in benchdnn's order."""
        for shapes, attrs, count, fpmath, kinds, dt, mb, properties in product(
            self.in_shapes,
            self.op_attrs,
            self.partitions,
            self.fpmath,
            self.op_kind,
            self.dt,
            self.mb,
            self.tensor_property,
        ):
            yield Case(
                path,
                name,
                shapes,
                attrs,
                dt,
                mb,
                count,
                fpmath,
                kinds,
                properties,
                self.mode,
                self.strict,
                self.same_rule,
                listed,
            )


@dataclass(frozen=True)
class Case:
    """A file and what to change in it."""

    path: Path
    name: str
    in_shapes: Map = field(default_factory=dict)
    op_attrs: Map = field(default_factory=dict)
    dt: Any = ""
    mb: int = 0
    partitions: int | None = None  # one for a single operation, else any number
    fpmath: str = ""
    op_kind: Map = field(default_factory=dict)
    tensor_property: Map = field(default_factory=dict)
    mode: str = "C"
    strict: bool = False
    same_rule: str = "gradient"
    listed: bool = field(default=False, compare=False)  # in a batch file; else it was named on the command line

    @property
    def line(self) -> str:
        """The words that repeat this case."""
        words = [f"--mode={self.mode}"] if self.mode != "C" else []
        if self.dt:
            words.append(f"--dt={self.dt if isinstance(self.dt, str) else _joined(self.dt)}")
        for name, value in (("in-shapes", self.in_shapes), ("op-attrs", self.op_attrs), ("op-kind", self.op_kind)):
            if value:
                words.append(f"--{name}={_joined(value)}")
        if self.tensor_property:
            words.append(f"--tensor-property={_joined(self.tensor_property)}")
        if self.mb:
            words.append(f"--mb={self.mb}")
        if self.fpmath:
            words.append(f"--attr-fpmath={self.fpmath}")
        if self.partitions is not None:
            words.append(f"--expected-n-partitions={self.partitions}")
        if self.strict:
            words.append("--strict")
        if self.same_rule != "gradient":
            words.append(f"--same-rule={self.same_rule}")
        return shlex.join(["convgrad", "run", *words, f"--case={self.name}"])

    @property
    def rewrites(self) -> bool:
        """Whether shapes or types change, so that outputs must be inferred anew."""
        return bool(self.in_shapes or self.op_attrs or self.mb)


def _joined(values: Map) -> str:
    return "+".join(f"{key}:{value}" for key, value in values.items())


# ---- words


def parse(words: Iterable[str], folders: tuple[Path, ...] = (Path(),)) -> list[Case]:
    """The cases of a command line."""
    reader = _Reader(folders)
    with_values = [name for name, option in OPTIONS.items() if option.form]
    reader.read(hoisted(words, with_values, ("case", "batch")))
    return reader.cases


def hoisted(words: Iterable[str], with_values: Iterable[str], inputs: Iterable[str]) -> list[str]:
    """The words, each option in one with its value, and those after the last input moved to the front.

    In a batch file an option applies to what follows it. At the end of a command line it would apply to nothing, and
    people put it there: so it applies to all.
    """
    whole = joined(words, with_values)
    starts = tuple(f"--{name}=" for name in inputs)
    last = max((i for i, word in enumerate(whole) if not word.startswith("-") or word.startswith(starts)), default=-1)
    return whole[last + 1 :] + whole[: last + 1]


def joined(words: Iterable[str], with_values: Iterable[str]) -> list[str]:
    """The words, each of these options in one with its value: `--dt f32` becomes `--dt=f32`."""
    names = [f"--{name}" for name in with_values]
    whole: list[str] = []
    waiting = iter(words)
    for word in waiting:
        value = next(waiting, None) if word in names else None
        whole.append(word if value is None else f"{word}={value}")
    return whole


class _Reader:
    """Settings as they change from word to word, and the cases so far."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self.settings = Settings()
        self.cases: list[Case] = []
        self.folders = folders
        self.open: list[Path] = []  # batch files that are being read

    def read(self, words: Iterable[str]) -> None:
        """Take words one by one."""
        for word in words:
            if not word.startswith("-"):
                self.case(word)
                continue
            name, equals, value = word.removeprefix("--").partition("=")
            if word.startswith("-v") and not word.startswith("--"):
                continue
            if name in ("reset", "strict", "graph"):
                if name == "reset":
                    self.settings = Settings(mode=self.settings.mode)
                elif name == "strict":
                    self.settings = replace(self.settings, strict=True)
                continue
            if name in IGNORED:
                continue
            if name not in OPTIONS or not word.startswith("--"):
                hint = meant(name, OPTIONS) or f"there are {', '.join('--' + o for o in OPTIONS)}"
                raise UsageError(f"{word!r} is no option; {hint}")
            if not equals:
                raise UsageError(f"--{name} needs a value: --{name}={OPTIONS[name].form}")
            try:
                self.take(name, value)
            except ValueError as error:
                raise UsageError(f"--{name}={value}: {error}; the form is --{name}={OPTIONS[name].form}") from None

    def take(self, name: str, value: str) -> None:
        """Take one option."""
        settings = self.settings
        if name == "case":
            self.case(value)
        elif name == "batch":
            self.batch(value)
        elif name == "mode":
            wrong = set(value.upper()) - set(MODES)
            if wrong or not value:
                raise ValueError(f"{''.join(sorted(wrong))!r} is no mode; there are {', '.join(MODES)}")
            self.settings = replace(settings, mode=value.upper())
        elif name == "engine":
            if value.partition(":")[0] != "cpu":
                raise ValueError("graphs compute on cpu")
        elif name == "dt":
            self.settings = replace(settings, dt=_types(value, settings.dt))
        elif name == "mb":
            self.settings = replace(settings, mb=_each(value, _count) or (0,))
        elif name == "expected-n-partitions":
            self.settings = replace(settings, partitions=_each(value, _count) or (None,))
        elif name == "attr-fpmath":
            self.settings = replace(settings, fpmath=_each(value, _fpmath) or ("",))
        elif name == "same-rule":
            if value not in SAME_RULES:
                raise ValueError(f"{value!r} is none of {', '.join(SAME_RULES)}")
            self.settings = replace(settings, same_rule=value)
        else:
            alternatives: dict[str, Any] = {name.replace("-", "_"): tuple(map(_map, value.split(",")))}
            self.settings = replace(settings, **alternatives)

    def case(self, name: str) -> None:
        """Add the cases of a file. One that is not there is a case too: it will fail."""
        self.cases.extend(self.settings.cases(self.locate(name), name, listed=bool(self.open)))

    def locate(self, name: str) -> Path:
        """A file by its name."""
        return located(name, self.folders, self.open)

    def batch(self, name: str) -> None:
        """Read the words of a file."""
        path, words = opened(name, self.folders, self.open)
        self.open.append(path)
        try:
            self.read(words)
        except UsageError as error:
            raise UsageError(f"{path.name}: {error}") from None
        self.open.pop()


def located(name: str, folders: Iterable[Path], batches: Sequence[Path]) -> Path:
    """A file by its name, from given folders, or from the folders above the batch files that are being read."""
    around = (folder for batch in reversed(batches) for folder in batch.parents)
    for folder in (*folders, *around):
        if (folder / name).exists():
            return folder / name
    return Path(name)


def opened(name: str, folders: Iterable[Path], batches: Sequence[Path]) -> tuple[Path, list[str]]:
    """The path and the words of a batch file."""
    if name.endswith(".json"):
        raise UsageError(f"--batch={name}: a graph file is no list of words; give its name alone to `convgrad run`")
    try:
        path = located(name, folders, batches).resolve()
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # The latter for a text, or a name, that no file can have.
        raise UsageError(f"--batch={name}: {getattr(error, 'strerror', None) or error}") from None
    if path in batches:
        raise UsageError(f"--batch={name}: the file includes itself")
    return path, words_of(text)


def words_of(text: str) -> list[str]:
    """The words of a batch file; one that begins with # makes the rest of its line a comment."""
    words = []
    for line in text.splitlines():
        for word in line.split():
            if word.startswith("#"):
                break
            words.append(word)
    return words


def _each(value: str, read: Callable[[str], Any]) -> tuple[Any, ...]:
    return tuple(read(word) for word in value.split(",") if word)


def _count(word: str) -> int:
    if not word.isdecimal() or len(word) > 18:
        raise ValueError(f"{word!r} is no count")
    return int(word)


def _fpmath(word: str) -> str:
    mode, colon, flag = word.partition(":")
    if mode not in [str(m) for m in FpMathMode]:
        raise ValueError(f"{mode!r} is no mode; there are {', '.join(map(str, FpMathMode))}")
    if colon and flag not in ("true", "false"):
        raise ValueError(f"{flag!r} is neither true nor false")
    return word


def _types(value: str, before: tuple[Any, ...]) -> tuple[Any, ...]:
    """Types for all tensors, or maps for some; one line cannot have both."""
    by_id = ":" in value
    if before != ("",) and by_id != any(isinstance(b, Mapping) for b in before):
        raise ValueError("types for all tensors and types by id cannot be mixed; put --reset between them")
    if by_id:
        maps = tuple(map(_map, value.split(",")))
        for word in (w for m in maps for w in m.values()):
            DataType.of(word, "--dt")
        return maps
    words = tuple("" if word in ("", "undef") else word for word in value.split(","))
    for word in words:
        if word and word not in DTYPES:
            raise ValueError(f"{word!r} is none of {', '.join(DTYPES)}")
    return words


def _map(text: str) -> Map:
    """ID:VALUE[+ID:VALUE], or nothing."""
    found: dict[int, str] = {}
    for entry in filter(None, text.split("+")):
        key, colon, value = entry.partition(":")
        if not colon or not value:
            raise ValueError(f"{entry!r} has no value after a colon")
        id = _count(key)
        if id in found:
            raise ValueError(f"{id} is there twice")
        found[id] = value
    return found


# ---- rewriting


@lru_cache(maxsize=64)
def document(path: Path) -> Document:
    """A file, read once for all its cases."""
    return read_file(path)


def strangers(document: Document) -> list[str]:
    """The kinds of a file's operations that are not of this family."""
    found = set()
    for op in document.ops:
        try:
            if not is_ours(op.kind):
                found.add(op.kind)
        except SpecError as error:
            error.operation = f"{document.source}: {op.name}"
            raise
    return sorted(found)


def rewrite(document: Document, case: Case) -> Document:
    """The file with the changes of a case."""
    tensors = {t.id: t for op in document.ops for t in (*op.inputs, *op.outputs)}
    made = {t.id for op in document.ops for t in op.outputs}
    taken = {t.id for op in document.ops for t in op.inputs}
    if case.op_kind:
        raise SpecError("--op-kind: only binary and eltwise operations can be exchanged", status="invalid_arguments")
    inputs = {id: t for id, t in tensors.items() if id not in made}
    outputs = made - taken | (set(document.output_ports) & made)
    for id in case.in_shapes:
        if id not in inputs and id not in outputs:
            known = ", ".join(map(str, sorted({*inputs, *outputs})))
            raise SpecError(f"--in-shapes: {id} is no input or output of the graph; there are {known}")
    changed = {id: _reshaped(t, case.in_shapes[id]) if id in case.in_shapes else t for id, t in inputs.items()}
    if case.mb:
        for id in _batched(document):
            changed[id] = _with_batch(changed[id], case.mb)
    ops = [_with_attrs(op, case.op_attrs.get(op.id, ""), case.rewrites) for op in document.ops]
    unknown = set(case.op_attrs) - {op.id for op in ops}
    if unknown:
        known = ", ".join(str(op.id) for op in ops)
        raise SpecError(f"--op-attrs: there is no operation {min(unknown)}; there are {known}")
    types = _retyped(tensors, case)
    changed = {id: types(t) for id, t in changed.items()}
    if case.rewrites:
        changed |= _inferred(ops, changed, tensors, types, case, {*inputs})
    else:
        changed |= {id: types(tensors[id]) for id in made}
    mode, _, flag = case.fpmath.partition(":")
    return document.replace(
        ops=tuple(_with_tensors(op, changed) for op in ops),
        fpmath_mode=FpMathMode(mode) if mode else document.fpmath_mode,
        apply_to_int=flag == "true" if mode else document.apply_to_int,
    )


def _retyped(tensors: Mapping[int, LogicalTensor], case: Case) -> Callable[[LogicalTensor], LogicalTensor]:
    """A function that gives a tensor its new type and property."""
    by_id = case.dt if isinstance(case.dt, Mapping) else {}
    for option, ids in (("dt", by_id), ("tensor-property", case.tensor_property)):
        for id in ids:
            if id not in tensors:
                raise SpecError(f"--{option}: there is no tensor {id}; there are {', '.join(map(str, tensors))}")

    def types(tensor: LogicalTensor) -> LogicalTensor:
        dtype = str(tensor.dtype)
        if isinstance(case.dt, str) and case.dt and dtype in DTYPES:
            dtype = case.dt
        known = case.tensor_property.get(tensor.id, str(tensor.property_type))
        return tensor.replace(dtype=by_id.get(tensor.id, dtype), property_type=PropertyType.of(known, "property"))

    return types


def _reshaped(tensor: LogicalTensor, text: str) -> LogicalTensor:
    """A tensor with the shape and strides of an --in-shapes value."""
    words, star, layout = text.partition("*")
    if not star and words.isalpha() and words != "scalar":
        words, layout = "", words  # the older grammar has no star before a tag
    if star and not layout:
        raise SpecError(f"--in-shapes: {text!r} has nothing after its *")
    if words in ("-", "scalar"):
        return tensor.replace(dims=())
    shape = _numbers(words, text) if words else tensor.get_dims()
    if not layout:
        return tensor.replace(dims=shape, layout_type="strided", strides=None)
    if layout.isalpha():
        letters = [chr(ord("a") + i) for i in range(len(shape))]
        if sorted(layout) != letters:
            raise SpecError(f"--in-shapes: {layout!r} must have each of {''.join(letters)} once, for shape {shape}")
        strides = dense_strides(shape, tuple(letters.index(c) for c in layout))
    else:
        strides = _numbers(layout, text)
    return tensor.replace(dims=shape, layout_type="strided", strides=strides)


def _numbers(text: str, whole: str) -> Ints:
    words = text.split("x")
    if not all(word.isdecimal() and len(word) < 20 for word in words):
        raise SpecError(f"--in-shapes: {whole!r} is not of the form 2x3x4, 2x3x4*acb or 2x3x4*12x1x3")
    return tuple(int(word) for word in words)


def _batched(document: Document) -> list[int]:
    """The inputs whose first axis is the batch."""
    made = {t.id for op in document.ops for t in op.outputs}
    found = []
    for op in document.ops:
        meaning = find(op.kind)
        if meaning.op.shape_source is not None:
            raise SpecError(
                f"--mb: the {meaning.op.shape_source} of {op.name} would not follow; "
                f"use --in-shapes and --op-attrs={op.id}:{meaning.op.shape_source}:...",
                status="invalid_arguments",
            )
        for arg, tensor in zip(meaning.op.inputs, op.inputs, strict=False):
            if arg.role in ("x", "y", "data") and tensor.id not in made:
                found.append(tensor.id)
    return found


def _with_batch(tensor: LogicalTensor, batch: int) -> LogicalTensor:
    shape = (batch, *tensor.get_dims()[1:])
    return tensor.replace(dims=shape, layout_type="strided", strides=_like(tensor, shape))


def _like(tensor: LogicalTensor, shape: Ints) -> Ints | None:
    """Strides for a shape, its axes in the order of a tensor's; None where that has gaps, or another rank."""
    if tensor.strides is None or tensor.shape is None or len(shape) != len(tensor.shape):
        return None
    order = tuple(sorted(range(len(shape)), key=lambda axis: (-tensor.get_strides()[axis], axis)))
    dense = dense_strides(tensor.shape, order)
    if settle(tensor.shape, dense) != settle(tensor.shape, tensor.strides):
        return None
    return dense_strides(shape, order)


def _with_attrs(op: Op, text: str, rewrites: bool) -> Op:
    """An operation with the attributes of an --op-attrs value; the last of two values for one name counts."""
    attrs = dict(op.attrs)
    if rewrites and not any(attrs.get("output_padding", (1,))):
        del attrs["output_padding"]  # Zeros say nothing, and there may be more axes now.
    for entry in filter(None, text.split("*")):
        name, colon, value = entry.partition(":")
        if not colon or not value:
            raise SpecError(f"--op-attrs: {entry!r} is not of the form NAME:VALUE")
        if value == "undef":
            attrs.pop(name, None)
            continue
        attrs[name] = _value(op, name, value)
    changed = Op(op.id, op.kind, op.inputs, op.outputs, op.name)
    return changed.set_attrs(attrs)


def _value(op: Op, name: str, text: str) -> Any:
    """An attribute's value from its text, by the type that the table gives it."""
    meaning = find(op.kind)
    renamed = meaning.dialect.attrs.get(name, name) if meaning.dialect else name
    attr = meaning.op.attr(renamed)
    if attr is None:
        return text
    words = text.split("x") if attr.type == "s64[]" else [text]
    if attr.type in ("s64", "s64[]"):
        if not all(word.removeprefix("-").isdecimal() and len(word) < 21 for word in words):
            raise SpecError(
                f"--op-attrs: {name} must be {'numbers like 2x2' if len(words) > 1 else 'a number'}, got {text!r}"
            )
        numbers = [int(word) for word in words]
        return numbers if attr.type == "s64[]" else numbers[0]
    if attr.type == "bool":
        return text in ("true", "1")
    return text


def _with_tensors(op: Op, tensors: Mapping[int, LogicalTensor]) -> Op:
    changed = Op(op.id, op.kind, [tensors[t.id] for t in op.inputs], [tensors[t.id] for t in op.outputs], op.name)
    return changed.set_attrs(op.attrs)


def _inferred(
    ops: list[Op],
    known: Mapping[int, LogicalTensor],
    before: Mapping[int, LogicalTensor],
    types: Callable[[LogicalTensor], LogicalTensor],
    case: Case,
    inputs: set[int],
) -> dict[int, LogicalTensor]:
    """Outputs, inferred anew: shapes from the inputs, the order of axes from the file, or from the first input's.

    An output that --in-shapes names has its say. Where nothing else states the shape of a gradient, the file does.
    """
    found = dict(known)
    relaid = any(known[id].strides != before[id].strides for id in inputs)
    waiting = list(ops)
    while waiting:
        ready = [op for op in waiting if all(t.id in found for t in op.inputs)]
        if not ready:
            raise SpecError("the operations wait for each other", status="invalid_graph")
        for op in ready:
            waiting.remove(op)
            for old in op.outputs:
                found[old.id] = _output(op, old, found, types, case, relaid)
    return {id: t for id, t in found.items() if id not in inputs}


def _output(
    op: Op,
    old: LogicalTensor,
    found: Mapping[int, LogicalTensor],
    types: Callable[[LogicalTensor], LogicalTensor],
    case: Case,
    relaid: bool,
) -> LogicalTensor:
    given = [found[t.id] for t in op.inputs]
    asked = case.in_shapes.get(old.id, "")
    if asked[:1].isdigit() or asked in ("-", "scalar"):
        return types(_reshaped(old, asked))
    open_output = types(old).replace(dims=-1, layout_type="strided")
    trial = Op(op.id, op.kind, given, [open_output], op.name).set_attrs(op.attrs)
    node = check(trial, strict=case.strict, same_rule=case.same_rule)
    source = node.row.shape_source
    stated = source is None or any(node.attrs[source])
    try:
        shape = resolve(node, node.inputs, node.output if stated else types(old), None)[0].get_dims()
    except SpecError as error:
        raise node.retell(error) from None
    like = _like(given[0] if relaid else old, shape)
    inferred = types(old).replace(dims=shape, layout_type="strided", strides=like)
    return _reshaped(inferred, asked) if asked else inferred
