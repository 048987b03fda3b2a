"""What all kernels share: running numbers, strides, and where the taps of a result are."""

import triton
import triton.language as tl


@triton.jit
def program(WIDE: tl.constexpr):
    """The number of this program. With `WIDE`, everything that follows from it is computed in 64 bits."""
    number = tl.program_id(0)
    if WIDE:
        number = number.to(tl.int64)
    return number


@triton.jit
def span(start, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """The numbers start, start + 1, ..."""
    numbers = tl.arange(0, COUNT)
    if WIDE:
        numbers = numbers.to(tl.int64)
    return start + numbers


@triton.jit
def stride(strides, axis: tl.constexpr, UNIT: tl.constexpr):
    """The stride of an axis; of the one that is known to be contiguous, the constant 1."""
    if axis == UNIT:
        return 1
    else:
        return strides[axis]


@triton.jit
def spatial(p0, p1, p2, strides, UNIT: tl.constexpr):
    """The offset of a spatial position."""
    return p0 * stride(strides, 3, UNIT) + p1 * stride(strides, 4, UNIT) + p2 * stride(strides, 5, UNIT)


@triton.jit
def divided(number, size, factor, shift, WIDE: tl.constexpr):
    """number // size, by a product with `factor`, of which a division of 32 bits takes ten times as long.

    See `plan.axes.factors`.
    """
    if WIDE:
        return number // size
    else:
        high = tl.umulhi((2 * number).to(tl.uint32), tl.full([1], factor, tl.int32).to(tl.uint32))
        return (high >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def unfold(number, sizes, factors, WIDE: tl.constexpr, RANK: tl.constexpr = 3):
    """A running number over images and three axes, as image and position. Only the last RANK axes have a size."""
    outer = divided(number, sizes[2], factors[4], factors[5], WIDE)
    p2 = number - outer * sizes[2]
    p1 = outer * 0
    p0 = p1
    n = outer
    if RANK > 1:
        n = divided(outer, sizes[1], factors[2], factors[3], WIDE)
        p1 = outer - n * sizes[1]
    if RANK > 2:
        image = n
        n = divided(image, sizes[0], factors[0], factors[1], WIDE)
        p0 = image - n * sizes[0]
    return n, p0, p1, p2


@triton.jit
def inside(position, size, WIDE: tl.constexpr):
    """Whether a position is one of an axis: a negative one is larger than any as a number without a sign."""
    kind: tl.constexpr = tl.uint64 if WIDE else tl.uint32
    return position.to(kind) < size.to(kind)


@triton.jit
def within(p0, p1, p2, sizes, WIDE: tl.constexpr, RANK: tl.constexpr = 3):
    """Whether a position lies inside a tensor. Axes before the last RANK have one element, which it is."""
    found = inside(p2, sizes[2], WIDE)
    if RANK > 1:
        found = found & inside(p1, sizes[1], WIDE)
    if RANK > 2:
        found = found & inside(p0, sizes[0], WIDE)
    return found


@triton.jit
def walk(
    phase,
    lead,
    rest,
    KERNEL: tl.constexpr,
    STEP: tl.constexpr,
    DILATION: tl.constexpr,
    COMMON: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Of one axis and phase: the first result, the first input that it reads, the number of taps and the first tap.

    Results i = first + STEP*t of a data gradient have the same taps k, all with k*DILATION = phase modulo STEP: the tap
    k = first + j*STEP/COMMON reads input begin + t - j*DILATION/COMMON. COMMON is the greatest common divisor of STEP
    and DILATION, and INVERSE that of DILATION/COMMON modulo STEP/COMMON.
    """
    if STEP == 1:
        return 0, lead, KERNEL, 0
    else:
        wraps = phase < rest
        tap = (phase // COMMON * INVERSE) % (STEP // COMMON)
        some = (phase % COMMON == 0) & (tap < KERNEL)
        taps = tl.where(some, (KERNEL - tap + STEP // COMMON - 1) // (STEP // COMMON), 0)
        first = phase - rest + tl.where(wraps, STEP, 0)
        return first, lead + tl.where(wraps, 1, 0) - (tap * DILATION - phase) // STEP, taps, tap


@triton.jit
def tap_at(number, taps0, taps1, taps2):
    """The run of taps that a running number is in, and the tap as a position.

    A phase without taps runs no loop, but a loop's first loads may be computed ahead of it: if they divided by zero,
    which is undefined, the compiler would take it that every phase has taps.
    """
    taps0, taps1, taps2 = tl.maximum(taps0, 1), tl.maximum(taps1, 1), tl.maximum(taps2, 1)
    outer = number // taps2
    j2 = number - outer * taps2
    run = outer // taps1
    j1 = outer - run * taps1
    number = run // taps0
    return number, (run - number * taps0).to(tl.int32), j1.to(tl.int32), j2.to(tl.int32)


@triton.jit
def next_tap(run, j0, j1, j2, taps0, taps1, taps2):
    """What follows in the order of `tap_at`, without a division."""
    j2 += 1
    over = j2 >= taps2
    j2 = tl.where(over, 0, j2)
    j1 = tl.where(over, j1 + 1, j1)
    over = j1 >= taps1
    j1 = tl.where(over, 0, j1)
    j0 = tl.where(over, j0 + 1, j0)
    over = j0 >= taps0
    return tl.where(over, run + 1, run), tl.where(over, 0, j0), j1, j2


@triton.jit
def finished(acc, out, bias, ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, has):
    """Sums with the bias and what the result held before; both are pointers of the sums' shape."""
    if BIAS:
        acc += tl.load(bias, mask=has, other=0.0).to(acc.dtype)
    if ACCUMULATE:
        acc += tl.load(out, mask=has, other=0.0).to(acc.dtype)
    return acc
