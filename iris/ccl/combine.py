"""How elements are combined: in which type, in which order, and how rounded."""

import triton
import triton.language as tl

from iris.language.jit import jit

PROPAGATE = tl.constexpr(tl.PropagateNan.ALL)


@triton.constexpr_function
def accumulator(element):
    """float32 for what is no wider, float64 for itself; integers are exact, or wrap, in their own type.

    Booleans are counted, so that a sum of them is a logical "or", and not what is left of it in one bit.
    """
    if element.is_bool():
        return tl.int32
    return tl.float32 if element.is_floating() and element.primitive_bitwidth <= 32 else element


@jit
def scaled(value, factors, source, OP: tl.constexpr):
    """``value`` of rank ``source``, of the accumulator's type, as it goes into the sum: times the rank's factor.

    ``factors``: ``[W]``, of the accumulator's type; None for all operations but "premul_sum".
    """
    if OP == "premul_sum":
        return value * tl.load(factors + source)
    else:
        return value


@jit
def combine(a, b, OP: tl.constexpr):
    """``a`` and ``b``, of the accumulator's type, as one."""
    if OP == "min":
        return tl.minimum(a, b, propagate_nan=PROPAGATE)
    elif OP == "max":
        return tl.maximum(a, b, propagate_nan=PROPAGATE)
    elif OP == "product":
        return a * b
    else:
        return a + b


@jit
def accumulate(total, value, factors, source: tl.constexpr, OP: tl.constexpr):
    """The total of the ranks before ``source``, and its value: called with one rank after the other, from 0 on.

    ``value``: of the element's type, or the accumulator's, which is that of ``total``. Rank 0's replaces the total. All
    that combine in this order get the same bits.
    """
    value = scaled(tl.cast(value, total.dtype), factors, source, OP)
    if source == 0:
        return value
    else:
        return combine(total, value, OP)


@jit
def finalize(total, element: tl.constexpr, W: tl.constexpr, OP: tl.constexpr):
    """The result in its own type: the only rounding, but for that of the sum itself."""
    if OP == "avg":
        total = total / W
    return tl.cast(total, element)
