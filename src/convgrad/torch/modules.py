"""PyTorch's convolution modules, computed here in both directions; and `convert`, which has a model use them.

They are PyTorch's own classes in everything but the computation: arguments, attributes, initial values, state dicts.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as stock

from ..errors import SpecError
from ..spec.check import broken
from ..spec.table import ALGORITHMS
from . import functional
from .names import hinting, nearest
from .operators import Options


def convolve(name: str, *args: Any, **options: Any) -> Tensor:
    """A function of `convgrad.torch` by its name. `torch.fx` keeps a call of it whole."""
    try:
        result: Tensor = getattr(functional, name)(*args, **options)
    except SpecError as error:
        if error.rule in ("weights_channels", "groups_divide"):
            groups = args[-2] if "transpose" in name else args[-1]
            raise _other_channels(name, args[0], args[1], groups) from None
        raise
    return result


def _other_channels(name: str, input: Tensor, weight: Tensor, groups: int) -> SpecError:
    """The error for an input that a module is not made for: its own weights are not at fault."""
    transposed, rank = "transpose" in name, weight.dim() - 2
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    what = f"must have {expected} channel{'s' if expected != 1 else ''} on axis {input.dim() - rank - 1}"
    message = f"input {what}, got {input.shape[-1 - rank]} in the shape {tuple(input.shape)}"
    kind = f"{'ConvTranspose' if transposed else 'Conv'}{rank}d"
    return SpecError(message, status="invalid_shape", rule="weights_channels", argument="input", operation=kind)


torch.fx.wrap("convolve")


class _Here(nn.Module):
    """What the modules have besides PyTorch's: the options. Those that have their default value are not stored."""

    algorithm: str = Options().algorithm
    wide_weights: bool = Options().wide_weights
    accumulate: bool = Options().accumulate

    def __init__(
        self,
        *args: Any,
        algorithm: str = "direct",
        wide_weights: bool = False,
        accumulate: bool = False,
        **kwargs: Any,
    ) -> None:
        try:
            super().__init__(*args, **kwargs)
        except TypeError as error:
            known = [*inspect.signature(STOCK[type(self)]).parameters] if type(self) in STOCK else []
            strange = [name for name in kwargs if name not in known]
            hint = nearest(strange[0], [*known, *Options._fields]) if strange and known else ""
            raise (TypeError(f"{error}; {hint}") if hint else error) from None
        _set(self, _checked(type(self).__name__, algorithm, wide_weights, accumulate))

    def extra_repr(self) -> str:
        """What PyTorch shows, and the options that are not at their default."""
        told = [f"{name}={getattr(self, name)!r}" for name in Options._fields if name in self.__dict__]
        return ", ".join([super().extra_repr(), *told])

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Options._fields}


class _Conv(_Here):
    """A convolution."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        me: Any = self
        rank, padding = len(me.kernel_size), me.padding
        if me.padding_mode != "zeros":
            input = stock.pad(input, me._reversed_padding_repeated_twice, mode=me.padding_mode)
            padding = 0
        rest = (me.stride, padding, me.dilation, me.groups)
        return convolve(f"conv{rank}d", input, weight, bias, *rest, **self._options())


class _ConvTranspose(_Here):
    """A transposed convolution."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The result; `output_size` says which of the sizes that lead to the same input is meant."""
        me: Any = self
        rank = len(me.kernel_size)
        if me.padding_mode != "zeros":
            raise ValueError(f"Only `zeros` padding mode is supported for ConvTranspose{rank}d")
        extra = me._output_padding(input, output_size, me.stride, me.padding, me.kernel_size, rank, me.dilation)
        rest = (me.stride, me.padding, extra, me.groups, me.dilation)
        return convolve(f"conv_transpose{rank}d", input, me.weight, me.bias, *rest, **self._options())


class Conv1d(_Conv, nn.Conv1d):
    """`torch.nn.Conv1d`, computed here; see `Conv2d`."""


class Conv2d(_Conv, nn.Conv2d):
    """`torch.nn.Conv2d`, computed here in both directions. It takes PyTorch's arguments, and three options by name.

    `algorithm` says how sums are taken. With `wide_weights`, weight and bias may be float32 while the input is bfloat16
    or float16, under autocast too, and their gradients are the float32 sums, not rounded. With `accumulate`,
    `backward()` adds the gradient of the weight to `weight.grad` as it is computed.
    """


class Conv3d(_Conv, nn.Conv3d):
    """`torch.nn.Conv3d`, computed here; see `Conv2d`."""


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d`, computed here; see `Conv2d`."""


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d`, computed here; see `Conv2d`."""


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d`, computed here; see `Conv2d`."""


class LazyConv1d(_Conv, nn.LazyConv1d):  # type: ignore[misc]
    """`torch.nn.LazyConv1d`, which becomes a `Conv1d` of this module."""

    cls_to_become = Conv1d


class LazyConv2d(_Conv, nn.LazyConv2d):  # type: ignore[misc]
    """`torch.nn.LazyConv2d`, which becomes a `Conv2d` of this module."""

    cls_to_become = Conv2d


class LazyConv3d(_Conv, nn.LazyConv3d):  # type: ignore[misc]
    """`torch.nn.LazyConv3d`, which becomes a `Conv3d` of this module."""

    cls_to_become = Conv3d


class LazyConvTranspose1d(_ConvTranspose, nn.LazyConvTranspose1d):  # type: ignore[misc]
    """`torch.nn.LazyConvTranspose1d`, which becomes a `ConvTranspose1d` of this module."""

    cls_to_become = ConvTranspose1d


class LazyConvTranspose2d(_ConvTranspose, nn.LazyConvTranspose2d):  # type: ignore[misc]
    """`torch.nn.LazyConvTranspose2d`, which becomes a `ConvTranspose2d` of this module."""

    cls_to_become = ConvTranspose2d


class LazyConvTranspose3d(_ConvTranspose, nn.LazyConvTranspose3d):  # type: ignore[misc]
    """`torch.nn.LazyConvTranspose3d`, which becomes a `ConvTranspose3d` of this module."""

    cls_to_become = ConvTranspose3d


_OURS: tuple[type[nn.Module], ...] = (
    *(Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d),
    *(LazyConv1d, LazyConv2d, LazyConv3d, LazyConvTranspose1d, LazyConvTranspose2d, LazyConvTranspose3d),
)
OURS: dict[type[nn.Module], type[nn.Module]] = {getattr(nn, ours.__name__): ours for ours in _OURS}
"""PyTorch's classes, and those that take their place."""

STOCK: dict[type[nn.Module], type[nn.Module]] = {ours: theirs for theirs, ours in OURS.items()}


@hinting
def convert(
    model: nn.Module,
    *,
    algorithm: str = "direct",
    wide_weights: bool = False,
    accumulate: bool = False,
    back: bool = False,
) -> nn.Module:
    """Have the convolution modules of a model computed here, in place, with these options; returns the model.

    The modules stay the same objects, with their parameters, hooks, parametrizations and flags: only their class
    changes, to that of this package which has the same name. Classes derived from PyTorch's are left alone: they may
    compute something else. With `back`, the modules get PyTorch's classes again. To convert again changes options.
    """
    options = _checked("convert", algorithm, wide_weights, accumulate)
    if back and options != Options():
        error = broken("attribute_choice", "back", "back=True with options", expected="False where there are options")
        error.operation = "convert"
        raise error
    if not isinstance(model, nn.Module):
        error = broken("attribute_type", "model", f"a {type(model).__name__}", expected="a torch.nn.Module")
        error.operation = "convert"
        raise error
    for module in model.modules():
        if _swap(module, STOCK if back else OURS) or (not back and _plain_class(module) in STOCK):
            _set(module, options)
    return model


def _swap(module: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> bool:
    """Give a module the class that takes the place of its own; False if there is none.

    PyTorch derives a class of their own for modules with parametrizations: that is derived anew.
    """
    plain, mine = _plain_class(module), type(module)
    if plain not in classes:
        return False
    new = classes[plain]
    if mine is not plain:
        members = {k: v for k, v in vars(mine).items() if k not in ("__dict__", "__weakref__", "__doc__")}
        new = type(f"Parametrized{new.__name__}", (new,), members)
    module.__class__ = new
    return True


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module without regard to parametrizations."""
    mine = type(module)
    if nn.utils.parametrize.is_parametrized(module) and len(mine.__bases__) == 1:
        base: type[nn.Module] = mine.__bases__[0]
        return base if mine.__name__ == f"Parametrized{base.__name__}" else mine
    return mine


def _set(module: nn.Module, options: Options) -> None:
    """Store the options that are not at their default."""
    for name, value, plain in zip(Options._fields, options, Options(), strict=True):
        module.__dict__.pop(name, None)
        if value != plain:
            setattr(module, name, value)


def _checked(operation: str, algorithm: Any, wide_weights: Any, accumulate: Any) -> Options:
    """The options, if they are some."""
    try:
        if algorithm not in ALGORITHMS:
            raise broken("attribute_choice", "algorithm", repr(algorithm), expected=", ".join(map(repr, ALGORITHMS)))
        for name, value in (("wide_weights", wide_weights), ("accumulate", accumulate)):
            if not isinstance(value, bool):
                raise broken("attribute_type", name, repr(value), expected="True or False")
    except SpecError as error:
        error.operation = operation
        raise
    return Options(algorithm, wide_weights, accumulate)
