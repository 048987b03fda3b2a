"""Differentiate through convgrad in JAX, with `jax.custom_vjp` and `jax.pure_callback`; works under jit and grad.

Inside of jit and grad arrays have no values yet. A callback gets them when they are there, as NumPy arrays or JAX's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import convgrad

CALL: dict[str, Any] = dict(strides=1, pads_begin=1, pads_end=1, dilations=1)


def on_host(function: Any, shape: tuple[int, ...], *arrays: jax.Array, **attributes: Any) -> jax.Array:
    """Call convgrad when the values are there; the shape of the result must be known before."""

    def call(*values: Any) -> np.ndarray:
        return np.asarray(function(*map(np.asarray, values), **CALL, **attributes))

    return jax.pure_callback(call, jax.ShapeDtypeStruct(shape, arrays[0].dtype), *arrays)


@jax.custom_vjp
def conv(src: jax.Array, weights: jax.Array) -> jax.Array:
    """A 3 x 3 convolution that keeps height and width: NHWC and HWIO, convgrad's defaults."""
    return on_host(convgrad.convolution, (*src.shape[:3], weights.shape[3]), src, weights)


def forward(src: jax.Array, weights: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The result, and what the gradients need."""
    return conv(src, weights), (src, weights)


def backward(kept: tuple[jax.Array, jax.Array], diff_dst: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of both inputs."""
    src, weights = kept
    diff_src = on_host(convgrad.convolution_backward_data, src.shape, diff_dst, weights, dst_shape=src.shape)
    diff_weights = on_host(
        convgrad.convolution_backward_weights, weights.shape, src, diff_dst, weights_shape=weights.shape
    )
    return diff_src, diff_weights


conv.defvjp(forward, backward)


def check() -> None:
    """The gradients must be those of JAX's own convolution: whole numbers, so to the bit."""
    rng = np.random.default_rng(0)
    src, weights = (jnp.asarray(rng.integers(-3, 4, s), jnp.float32) for s in ((2, 9, 9, 4), (3, 3, 4, 6)))

    def theirs(src: jax.Array, weights: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(src, weights, (1, 1), ((1, 1), (1, 1)), dimension_numbers=layout)

    found, expected = (
        jax.jit(jax.grad(lambda x, w, f=f: jnp.square(f(x, w)).sum(), (0, 1)))(src, weights) for f in (conv, theirs)
    )
    for a, b in zip(found, expected, strict=True):
        assert jnp.array_equal(a, b)


if __name__ == "__main__":
    check()
    print("gradients under jit equal JAX's")
