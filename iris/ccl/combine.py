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
def finalize(total, element: tl.constexpr, W: tl.constexpr, OP: tl.constexpr):
    """The result in its own type: the only rounding, but for that of the sum itself."""
    if OP == "avg":
        total = total / W
    return tl.cast(total, element)
