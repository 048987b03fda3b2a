"""Every rule of the table, broken on purpose, for every operation that can break it.

A mutator takes a valid call and gives back calls that break its rule, each with the argument at fault.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import convgrad
from convgrad import ConvgradError, SpecError
from convgrad.spec import ALL_OPS, BIAS_OPS, OPS, RULES, Description, Op, bind
from convgrad.spec.dialects import DIALECTS, find
from convgrad.spec.table import MAX_NDIMS, REQUIRED


@dataclass(frozen=True)
class Call:
    """A call of an operation, its inputs by role."""

    op: Op
    inputs: dict[str, Any]
    attributes: dict[str, Any]
    out: Any = None
    extra: tuple[Any, ...] = ()
    kind: str = ""
    argument: str = field(default="", compare=False)  # what a broken rule must blame, in the table's words

    def at_fault(self, argument: str) -> Call:
        return replace(self, argument=argument)

    def with_inputs(self, **inputs: Any) -> Call:
        return replace(self, inputs=self.inputs | inputs)

    def without(self, *roles: str) -> Call:
        return replace(self, inputs={r: v for r, v in self.inputs.items() if r not in roles})

    def with_attributes(self, **attributes: Any) -> Call:
        return replace(self, attributes=self.attributes | attributes)

    def name(self, role: str) -> str:
        return self.op.arg(role).name

    @property
    def tensors(self) -> list[str]:
        """The roles of the inputs that are tensors."""
        return [a.role for a in self.op.inputs if a.role != "shape" and a.role in self.inputs]

    @property
    def data(self) -> list[str]:
        return [role for role in self.tensors if role in ("x", "y", "data")]

    @property
    def of_a_bias(self) -> bool:
        return self.op.kind in BIAS_OPS


SIZES = {"x": (2, 4, 7, 6), "w": (6, 2, 3, 2), "y": (2, 6, 4, 5)}
SIZES |= {"data": (2, 4, 7, 6), "sum": (2, 4, 7, 6), "bias": (4,)}  # of the operations of a bias alone


def valid(op: Op) -> Call:
    """A call with nothing wrong: two groups, two axes that differ in everything."""
    rng = np.random.default_rng(0)
    inputs: dict[str, Any] = {}
    for arg in op.inputs:
        if arg.role in SIZES and (arg.role != "bias" or op.kind in BIAS_OPS):
            inputs[arg.role] = rng.integers(-3, 4, SIZES[arg.role]).astype(np.float32)
        elif arg.role == "shape":
            inputs["shape"] = SIZES[op.wanted]
        else:
            inputs["bias"] = np.zeros(SIZES[op.wanted][1], np.float32)
    if op.kind in BIAS_OPS:
        return Call(op, inputs, {"data_format": "NCX"})
    attributes = {
        "strides": (2, 1),
        "pads_begin": (1, 0),
        "pads_end": (1, 1),
        "dilations": (1, 2),
        "groups": 2,
        "data_format": "NCX",
        "weights_format": "IOX" if op.transposed else "OIX",
    }
    return Call(op, inputs, attributes)


Mutator = Callable[[Call], Iterator[Call]]
MUTATORS: dict[str, Mutator] = {}


def breaks(rule: str) -> Callable[[Mutator], Mutator]:
    def register(mutator: Mutator) -> Mutator:
        MUTATORS[rule] = mutator
        return mutator

    return register


@breaks("known_operation")
def _(call: Call) -> Iterator[Call]:
    for kind in (call.op.kind + "s", call.op.kind.lower(), "", "Conv2d", None, 3, ["Convolution"]):
        yield replace(call, kind=kind, argument=repr(kind))


@breaks("input_count")
def _(call: Call) -> Iterator[Call]:
    yield replace(call, inputs={}, argument="the operation")
    first = call.op.inputs[0].role
    if call.op.required_inputs > 1:
        yield replace(call, inputs={first: call.inputs[first]}, argument="the operation")
    yield replace(call, extra=(np.zeros(1, np.float32),), argument="the operation")


@breaks("input_array")
def _(call: Call) -> Iterator[Call]:
    for role in call.tensors:
        masked = np.ma.masked_array(call.inputs[role], True)
        for value in ("a string", 1.0, [1.0, 2.0], object(), torch.zeros(3, 3, 3).to_sparse(), masked):
            yield call.with_inputs(**{role: value}).at_fault(call.name(role))
    yield replace(call, out="a string", argument="out")


def _beside_others(call: Call) -> Call:
    """The call with an array beside the one at fault: PyTorch's tensors alone may be watched by autograd or a trace."""
    alone = len(call.tensors) == 1
    return replace(call, out=np.zeros(SIZES[call.op.wanted], np.float32)) if alone else call


@breaks("input_device")
def _(call: Call) -> Iterator[Call]:
    for role in call.tensors:
        tensor = torch.zeros(call.inputs[role].shape, device="meta")
        yield _beside_others(call).with_inputs(**{role: tensor}).at_fault(call.name(role))


@breaks("input_traced")
def _(call: Call) -> Iterator[Call]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fakes = {role: torch.zeros(call.inputs[role].shape) for role in call.tensors}
    for role in call.tensors:
        yield _beside_others(call).with_inputs(**{role: fakes[role]}).at_fault(call.name(role))


@breaks("input_grad")
def _(call: Call) -> Iterator[Call]:
    for role in call.tensors:
        tensor = torch.from_numpy(call.inputs[role]).requires_grad_()
        for value in (tensor, tensor * 1, torch.nn.Parameter(tensor.detach())):
            yield _beside_others(call).with_inputs(**{role: value}).at_fault(call.name(role))
    yield replace(call, out=torch.zeros(SIZES[call.op.wanted], requires_grad=True), argument="out")


@breaks("byte_order")
def _(call: Call) -> Iterator[Call]:
    for role in call.tensors:
        array = call.inputs[role]
        yield call.with_inputs(**{role: array.astype(array.dtype.newbyteorder())}).at_fault(call.name(role))


@breaks("input_dtype")
def _(call: Call) -> Iterator[Call]:
    for dtype in (np.int32, np.complex64, bool, np.longdouble, "U1", object):
        for role in call.tensors:
            yield call.with_inputs(**{role: np.zeros(call.inputs[role].shape, dtype)}).at_fault(call.name(role))


@breaks("same_dtype")
def _(call: Call) -> Iterator[Call]:
    for role in call.tensors[1:]:
        for dtype in (np.float16, np.float64, "bfloat16"):
            yield call.with_inputs(**{role: call.inputs[role].astype(dtype)}).at_fault(call.name(role))


@breaks("output_dtype")
def _(call: Call) -> Iterator[Call]:
    for name in ("bf16", "f16", "f64"):
        yield call.with_attributes(out_dtype=name).at_fault("out_dtype")
    yield replace(call, out=np.zeros(SIZES[call.op.wanted], np.float16), argument="out")
    narrow = replace(call, inputs={r: _cast(v, np.float16) for r, v in call.inputs.items()})
    yield narrow.with_attributes(out_dtype="bf16").at_fault("out_dtype")
    out = np.zeros(SIZES[call.op.wanted], np.float16)
    yield replace(narrow.with_attributes(out_dtype="f32"), out=out, argument="out")


def _cast(value: Any, dtype: Any) -> Any:
    return value.astype(dtype) if isinstance(value, np.ndarray) else value


@breaks("shape_values")
def _(call: Call) -> Iterator[Call]:
    if "shape" in call.inputs:
        for value in ([1.5, 2, 3, 4], "2467", 7, [[1, 2], [3]], object(), np.array([2.0, 4, 7, 6]), ["2", "4"], {}):
            yield call.with_inputs(shape=value).at_fault(call.name("shape"))


@breaks("required_attribute")
def _(call: Call) -> Iterator[Call]:
    for attr in call.op.attrs:
        if attr.default is REQUIRED:
            left = {k: v for k, v in call.attributes.items() if k != attr.name}
            yield replace(call, attributes=left, argument=attr.name)
            yield call.with_attributes(**{attr.name: None}).at_fault(attr.name)


@breaks("attribute_type")
def _(call: Call) -> Iterator[Call]:
    wrong = {
        "s64[]": ["2", object(), 1.5, (1, 2.5), (1, None), {}, True, (True, False), (2**63, 1), np.ones((2, 2))],
        "s64": ["2", 1.5, object(), (2,), True, 2**63, -(2**63) - 1],
        "string": [1, object(), ("NCX",), b"NCX"],
        "bool": [1, "yes", (True,)],
    }
    for attr in call.op.attrs:
        for value in wrong[attr.type]:
            yield call.with_attributes(**{attr.name: value}).at_fault(attr.name)


@breaks("attribute_choice")
def _(call: Call) -> Iterator[Call]:
    for attr in call.op.attrs:
        if attr.type == "string":
            for value in ("nonsense", "NHWC", "", *([] if attr.any_case else [next(iter(attr.choices)).swapcase()])):
                yield call.with_attributes(**{attr.name: value}).at_fault(attr.name)
    if not call.op.transposed and not call.of_a_bias:
        yield call.with_attributes(weights_format="IOX").at_fault("weights_format")


@breaks("attribute_minimum")
def _(call: Call) -> Iterator[Call]:
    for attr in call.op.attrs:
        if attr.minimum is not None:
            low = attr.minimum - 1
            forms: list[Any] = [low] if attr.type == "s64" or attr.per == "axis" else []
            if attr.type == "s64[]":
                forms += [(low, 1), (1, low)] if attr.per == "axis" else [(low, 1, 1, 1), (1, 1, 1, low)]
            for value in forms:
                yield call.with_attributes(**{attr.name: value}).at_fault(attr.name)


@breaks("known_attribute")
def _(call: Call) -> Iterator[Call]:
    for name in ("padding", "stride", "dst_shapes", "data_layout", "kernel_size", "input", "nonsense"):
        yield call.with_attributes(**{name: 1}).at_fault(name)
    foreign = {a.name for op in OPS.values() for a in op.attrs} - {a.name for a in call.op.attrs}
    for name in foreign:
        yield call.with_attributes(**{name: (1, 1)}).at_fault(name)


@breaks("data_rank")
def _(call: Call) -> Iterator[Call]:
    first = call.data[0]
    for shape in () if call.of_a_bias else ((2, 4), (4,), (), (2, 4, 1, 1, 1, 1)):
        yield call.with_inputs(**{first: np.zeros(shape, np.float32)}).at_fault(call.name(first))


@breaks("bias_rank")
def _(call: Call) -> Iterator[Call]:
    first = call.data[0]
    for shape in ((4,), ()) if call.of_a_bias else ():
        yield call.with_inputs(**{first: np.zeros(shape, np.float32)}).at_fault(call.name(first))


@breaks("same_rank")
def _(call: Call) -> Iterator[Call]:
    if call.of_a_bias:
        return
    for role in call.tensors[1:]:
        if role != "bias":
            flat = call.inputs[role][..., 0]
            yield call.with_inputs(**{role: flat}).at_fault(call.name(role))
            yield call.with_inputs(**{role: flat[..., 0, 0, 0]}).at_fault(call.name(role))
    yield replace(call, out=np.zeros((2, 4, 7), np.float32), argument="out")


@breaks("axis_values")
def _(call: Call) -> Iterator[Call]:
    for attr in call.op.attrs:
        if attr.per == "axis":
            for value in ((1,), (1, 1, 1), *([()] if not attr.name.startswith("pads") else [])):
                yield call.with_attributes(**{attr.name: value}).at_fault(attr.name)
    if call.op.attr("output_padding"):
        value = (0, 0, 1) + (0,) * (MAX_NDIMS - 3)
        yield call.with_attributes(output_padding=value).at_fault("output_padding")


@breaks("groups_divide")
def _(call: Call) -> Iterator[Call]:
    if call.of_a_bias:
        return
    yield call.with_attributes(groups=5).at_fault("groups")
    yield call.with_attributes(groups=2**62).at_fault("groups")
    if call.op.wanted != "w":
        # Data that divides, weights that do not.
        shape = {"x": (5, 2, 3, 2), "y": (5, 2, 3, 2)}[call.op.wanted]
        if call.data == ["x"]:
            yield call.with_inputs(w=np.zeros(shape, np.float32)).at_fault("groups")


@breaks("same_batch")
def _(call: Call) -> Iterator[Call]:
    if len(call.data) == 2:
        second = call.data[1]
        yield call.with_inputs(**{second: call.inputs[second][:1]}).at_fault(call.name(second))
    if call.op.wanted == "x" and "shape" in call.inputs:
        yield call.with_inputs(shape=(3, 4, 7, 6)).at_fault(call.name("shape"))
        yield call.without("shape").with_attributes(dst_shape=(1, 4, 7, 6)).at_fault(call.name("shape"))
        out = np.zeros((3, 4, 7, 6), np.float32)
        yield replace(call.without("shape"), out=out, argument="out")


@breaks("channels")
def _(call: Call) -> Iterator[Call]:
    if call.op.wanted == "x" and "shape" in call.inputs:
        yield call.with_inputs(shape=(2, 6, 7, 6)).at_fault(call.name("shape"))
        yield call.without("shape").with_attributes(dst_shape=(2, 2, 7, 6)).at_fault(call.name("shape"))


@breaks("weights_channels")
def _(call: Call) -> Iterator[Call]:
    if call.of_a_bias:
        return
    for shape in ((8, 3, 3, 2), (4, 1, 3, 2)):
        if "w" in call.inputs:
            yield call.with_inputs(w=np.zeros(shape, np.float32)).at_fault(call.name("w"))
        else:
            yield call.with_inputs(shape=shape).at_fault(call.name("shape"))
            yield call.without("shape").with_attributes(weights_shape=shape).at_fault(call.name("shape"))
            yield replace(call.without("shape"), out=np.zeros(shape, np.float32), argument="out")


@breaks("weights_empty")
def _(call: Call) -> Iterator[Call]:
    if call.of_a_bias:
        return
    shape = (6, 2, 0, 2)
    if "w" in call.inputs:
        yield call.with_inputs(w=np.zeros(shape, np.float32)).at_fault(call.name("w"))
        # Sums over no channels at all.
        inputs = {"w": np.zeros((6, 0, 3, 2), np.float32), "x": np.zeros((2, 0, 7, 6), np.float32)}
        if call.op.wanted == "x":
            inputs = {"w": np.zeros((0, 2, 3, 2), np.float32), "y": np.zeros((2, 0, 4, 5), np.float32)}
        yield replace(call, inputs=call.inputs | inputs, argument=call.name("w"))
    else:
        yield call.with_inputs(shape=shape).at_fault(call.name("shape"))


@breaks("bias_length")
def _(call: Call) -> Iterator[Call]:
    if "bias" in call.inputs:
        length = SIZES[call.op.wanted][1]
        for shape in ((length + 1,), (1,), (), (length, 1), (0,)):
            yield call.with_inputs(bias=np.zeros(shape, np.float32)).at_fault("bias")


@breaks("kernel_fits")
def _(call: Call) -> Iterator[Call]:
    if call.of_a_bias:
        return
    if "x" in call.inputs:
        yield call.with_inputs(x=np.zeros((2, 4, 0, 6), np.float32)).at_fault(call.name("x"))
        yield call.with_inputs(x=np.zeros((2, 4, 7, 1), np.float32)).at_fault(call.name("x"))
    elif "shape" in call.inputs:
        yield call.with_inputs(shape=(2, 4, 7, 1)).at_fault(call.name("shape"))
    else:
        yield call.with_inputs(y=np.zeros((2, 6, 4, 0), np.float32)).at_fault(call.name("x"))


@breaks("spatial_sizes")
def _(call: Call) -> Iterator[Call]:
    if len(call.data) == 2:
        for name, shape in (("y", (2, 6, 5, 5)), ("y", (2, 6, 4, 4)), ("x", (2, 4, 9, 6)), ("x", (2, 4, 7, 5))):
            yield call.with_inputs(**{name: np.zeros(shape, np.float32)}).at_fault(call.name("y"))
    elif "shape" in call.inputs and call.op.wanted == "x":
        for shape in ((2, 4, 9, 6), (2, 4, 7, 7)):
            yield call.with_inputs(shape=shape).at_fault(call.name("y"))
    if "x" in call.data and call.op.attr("output_padding"):
        # The forward operation would have come to one row more.
        yield call.with_attributes(output_padding=(1, 0)).at_fault(call.name("x"))


@breaks("output_size")
def _(call: Call) -> Iterator[Call]:
    if call.op.wanted == "x":
        yield call.without("shape").with_attributes(pads_end=(1, 8)).at_fault("padding")
        yield call.without("shape").with_attributes(pads_begin=2**62, pads_end=2**62).at_fault("padding")


@breaks("output_padding_stride")
def _(call: Call) -> Iterator[Call]:
    if call.op.wanted == "x" and call.op.transposed:
        for value in ((2, 0), (0, 1), 1, 2**62):
            yield call.with_attributes(output_padding=value).at_fault("output_padding")


@breaks("shape_given")
def _(call: Call) -> Iterator[Call]:
    if call.op.wanted == "w":
        yield call.without("shape").at_fault(call.name("shape"))
        zeros = {call.name("shape"): (0,) * MAX_NDIMS}  # how oneDNN writes an unset list
        yield call.without("shape").with_attributes(**zeros).at_fault(call.name("shape"))


@breaks("shape_rank")
def _(call: Call) -> Iterator[Call]:
    if "shape" in call.inputs:
        for shape in ((2, 4, 7), (2, 4, 7, 6, 1), (), (1,) * MAX_NDIMS):
            yield call.with_inputs(shape=shape).at_fault(call.name("shape"))
        attribute = {call.name("shape"): (2, 4, 7)}
        yield call.without("shape").with_attributes(**attribute).at_fault(call.name("shape"))


@breaks("shape_sign")
def _(call: Call) -> Iterator[Call]:
    if "shape" in call.inputs:
        shape = SIZES[call.op.wanted]
        yield call.with_inputs(shape=(*shape[:-1], -1)).at_fault(call.name("shape"))
        yield call.with_inputs(shape=(-(2**31), *shape[1:])).at_fault(call.name("shape"))


@breaks("shapes_agree")
def _(call: Call) -> Iterator[Call]:
    shape = SIZES[call.op.wanted]
    for wrong in {(*shape[:-1], shape[-1] + 1), (shape[0] + 2, *shape[1:]), tuple(reversed(shape))} - {shape}:
        yield replace(call, out=np.zeros(wrong, np.float32), argument="out")


@breaks("out_writable")
def _(call: Call) -> Iterator[Call]:
    out = np.zeros(SIZES[call.op.wanted], np.float32)
    out.flags.writeable = False
    yield replace(call, out=out, argument="out")


@breaks("out_overlap")
def _(call: Call) -> Iterator[Call]:
    shape = SIZES[call.op.wanted]
    if len(shape) == 1:
        yield replace(call, out=np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, (0,)), argument="out")
        return
    one = np.zeros((*shape[:-1], 1), np.float32)
    yield replace(call, out=np.lib.stride_tricks.as_strided(one, shape, (*one.strides[:-1], 0)), argument="out")
    line = np.zeros(1000, np.float32)
    for strides in ((4, 8, 16, 32), (400, 40, 8, 8), (400, 4, 4, 4)):
        yield replace(call, out=np.lib.stride_tricks.as_strided(line, shape, strides), argument="out")
    yield replace(call, out=torch.zeros(*shape[:-1], 1).expand(shape), argument="out")


@breaks("accumulate_out")
def _(call: Call) -> Iterator[Call]:
    yield call.with_attributes(accumulate=True).at_fault("accumulate")


@breaks("addressable")
def _(call: Call) -> Iterator[Call]:
    if call.of_a_bias:
        return
    huge, name = 2**60, call.op.output.name
    if call.op.wanted == "y":
        yield call.with_attributes(strides=1, pads_begin=huge, pads_end=huge).at_fault(name)
    elif call.op.wanted == "x":
        wide = call.without("shape").with_attributes(strides=huge)
        yield wide.at_fault(name)
    else:
        # y stays 4 x 5: the kernel grows by as much as the padding.
        shape = (6, 2, 3 + huge, 2)
        wide = call.with_inputs(shape=shape).with_attributes(pads_end=(1 + huge, 1))
        yield wide.at_fault(name)


def _calls(rule: str, name: str) -> list[Call]:
    row = find(name).op
    call = valid(row)
    if name in DIALECTS and row.transposed:
        call = call.with_attributes(weights_format="IOX")
    return list(MUTATORS[rule](call))


def _make(call: Call, name: str) -> Any:
    """Make a call by an operation's name, new or old, in the words of that name."""
    meaning = find(name)
    words = meaning.dialect.words if meaning.dialect else {}
    inputs = [call.inputs.get(a.role) for a in call.op.inputs]
    while inputs and inputs[-1] is None:
        inputs.pop()
    attributes = {words.get(k, k): v for k, v in call.attributes.items()}
    kind = name if call.kind == "" and call.argument != repr("") else call.kind
    return convgrad.apply(kind, *inputs, *call.extra, out=call.out, **attributes)


NAMES = [*ALL_OPS, *DIALECTS]
STRICT = {"strict"}  # only a strict graph breaks it; tested there
APPLIES = [(rule, name) for rule in MUTATORS for name in NAMES if rule in RULES and _calls(rule, name)]


def test_every_rule_is_broken_somewhere():
    assert set(MUTATORS) == set(RULES) - STRICT
    assert {rule for rule, _ in APPLIES} == set(MUTATORS)


@pytest.mark.parametrize("name", NAMES)
def test_the_call_before_it_is_broken(name):
    call = valid(find(name).op)
    assert _make(call, name).shape == SIZES[call.op.wanted]


@pytest.mark.parametrize(("rule", "name"), APPLIES, ids=lambda v: v)
def test_rule(rule, name):
    words = DIALECTS[name].words if name in DIALECTS else {}
    for call in _calls(rule, name):
        if name == "ConvolutionBackpropFilters" and isinstance(call.inputs.get("y"), list):
            continue  # the oldest spelling has the shape second, and this looks like one
        with pytest.raises(SpecError) as caught:
            _make(call, name)
        error = caught.value
        assert error.rule == rule, error
        assert error.status == RULES[rule].status
        assert error.argument == words.get(call.argument, call.argument), error
        assert error.operation == ("apply" if rule == "known_operation" else name)
        # Who, what, rule: the message starts with the operation and the argument, and has no unfilled field.
        assert str(error).startswith(f"{error.operation}: {error.argument} "), error
        assert not re.search(r"\{[a-z]", str(error))
        assert isinstance(error, ValueError)
        assert isinstance(error, ConvgradError)
        assert error.__cause__ is None
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.rule, again.status) == (str(error), rule, error.status)


def test_a_graph_asks_for_the_shape_of_diff_src():
    op = OPS["ConvolutionBackwardData"]
    call = valid(op)
    inputs = [Description("f32", SIZES["y"]), Description("f32", SIZES["w"]), None]
    with pytest.raises(SpecError) as caught:
        bind(op, inputs, call.attributes)
    assert (caught.value.rule, caught.value.status) == ("shape_given", "invalid_shape")
    assert bind(op, inputs, call.attributes, infer_size=True).shape == SIZES["x"]
    out = Description("f32", SIZES["x"])
    assert bind(op, inputs, call.attributes, out=out).shape == SIZES["x"]


MESSAGES = [
    (
        dict(strides=(1, 1, 1)),
        "ConvolutionBackwardData: strides needs 2 values, one per spatial axis of diff_dst (2, 6, 4, 5), got (1, 1, 1)",
    ),
    (
        dict(data_format="NHWC"),
        "ConvolutionBackwardData: data_format must be one of NXC, NCX, got 'NHWC'; 'NHWC' is 'NXC' here",
    ),
    (
        dict(pads_begin=None),
        "ConvolutionBackwardData: pads_begin is required; it is the zeros before each spatial axis of x",
    ),
    (
        dict(pads_begin=None, pads_end=None, auto_pad="SAME_UPPER"),
        "ConvolutionBackwardData: pads_begin is required, also with auto_pad, which ignores it; "
        "pass pads_begin=0, pads_end=0",
    ),
    (
        dict(strides=None, pads_end=None, dilations=None),
        "ConvolutionBackwardData: strides is required; so are pads_end and dilations",
    ),
    (
        dict(dilation=1),
        "ConvolutionBackwardData: dilation is not an attribute of this operation; did you mean 'dilations'?",
    ),
    (
        dict(groups=3),
        "ConvolutionBackwardData: dst_shape must have 6 channels in NCX, so that it fits weights (6, 2, 3, 2) in OIX, "
        "got (2, 4, 7, 6)",
    ),
    (
        dict(pads_begin=(3, 0)),
        "ConvolutionBackwardData: diff_dst must be 5 on spatial axis 0 of NCX: (7 + 3 + 1 - 3) // 2 + 1 for "
        "diff_src (dst_shape) of 7, got 4; diff_src may be 5 or 6 there",
    ),
]


@pytest.mark.parametrize(("change", "message"), MESSAGES, ids=lambda v: "" if isinstance(v, str) else next(iter(v)))
def test_messages_as_people_read_them(change, message):
    call = valid(OPS["ConvolutionBackwardData"]).with_attributes(**change)
    with pytest.raises(SpecError) as caught:
        _make(call, "ConvolutionBackwardData")
    assert str(caught.value) == message


def test_a_misspelt_attribute_is_named_rather_than_the_one_that_is_missing():
    src, weights = np.ones((1, 4, 4, 2), np.float32), np.ones((3, 3, 2, 2), np.float32)
    with pytest.raises(convgrad.SpecError, match=r"stride is not an attribute.*did you mean 'strides'"):
        convgrad.convolution(src, weights, stride=1, pads_begin=1, pads_end=1, dilations=1)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_which_kernels_fit_is_told(stride, dilation):
    """All of them, and nothing where none does."""
    for size, kernel, pad, outputs in product((5, 9), (1, 2, 4), (0, 2), range(1, 9)):
        room = size + 2 * pad - 1
        spans = {k: (k - 1) * dilation for k in range(1, 20)}
        fits = [k for k, span in spans.items() if span <= room and (room - span) // stride + 1 == outputs]
        if kernel in fits or spans[kernel] > room:
            continue
        src, diff_dst = np.ones((1, size, 1), np.float32), np.ones((1, outputs, 1), np.float32)
        with pytest.raises(SpecError) as caught:
            convgrad.convolution_backward_weights(
                src, diff_dst, (kernel, 1, 1), strides=stride, pads_begin=pad, pads_end=pad, dilations=dilation
            )
        _, _, hint = str(caught.value).partition("; ")
        allowed = f"must be {fits[0]}" if fits else ""
        if len(fits) > 1:
            allowed = f"may be {fits[0]} {'or' if len(fits) == 2 else 'to'} {fits[-1]}"
        assert hint == (f"diff_weights {allowed} there" if fits else "")


@pytest.mark.parametrize("kind", ["ConvolutionBackwardData", "ConvolutionBackwardWeights"])
def test_nothing_is_told_of_sizes_that_padding_follows(kind):
    call = valid(OPS[kind]).with_attributes(auto_pad="SAME_UPPER")
    with pytest.raises(SpecError, match=r"must be .* on spatial axis") as caught:
        _make(call, kind)
    assert "there" not in str(caught.value)
