"""RMSNorm of a row in a kernel: what the kernels of `iris.ops.all_reduce_rms_norm` and `iris.ops.sharded_rms_norm` have
in common, and `rms_norm`, for sums that are there already.
"""

import triton
import triton.language as tl

from iris.ccl.combine import PROPAGATE
from iris.language.cluster import cluster_all_reduce
from iris.language.dependent_launch import gdc_wait
from iris.language.ll import ll_recv, ll_send

# Elements in a row that the compiler may give to a thread: 16 bytes of bf16 and fp16. Of an fp8 result it would take 16
# elements. Then all threads exchanged what they had, and Triton 3.6 waited for it three times, once for each layout.
# It is for `tl.max_contiguous`: a hint that stands where addresses are used, as what a function returns has none.
NEIGHBOURS = tl.constexpr(8)


@triton.jit
def keep_residual(tensors, at, inside, x):
    """Store the sums and residuals ``x``. Before programs of a row meet, so that it is done while they do."""
    if tensors.residual is not None:
        tl.store(tensors.residual + at, x.to(tensors.residual.dtype.element_ty), mask=inside)


@triton.jit
def normalise(tensors, scaled, divisor, squares, peak, row, leads, eps, H: tl.constexpr, LARGEST: tl.constexpr):
    """What becomes of ``scaled``: sums and residuals x, times the weight.

    ``squares``: the sum of x * x over the row; ``peak``: the largest absolute value of ``scaled``; ``divisor``: the
    given scale. ``leads``: this program writes what a row has once. ``LARGEST``: of what ``out`` can hold, if that is
    fp8; else 0. Returns what the caller stores to ``out``, and the row's factor: 1 if it has none.
    """
    shrink = tl.rsqrt(squares / H + eps)
    factor = 1.0
    if tensors.row_scales is not None:
        # A row of zeros has any scale: one that divides. Of a row with a NaN ``shrink`` is one, and so is all of it.
        factor = tl.maximum(peak * shrink / LARGEST, 1e-12, propagate_nan=PROPAGATE)
        tl.store(tensors.row_scales + row, factor, mask=leads)
        y = scaled * (shrink / factor)
    else:
        y = scaled * shrink
    if tensors.scale is not None:
        y = y / divisor
    if LARGEST > 0:
        y = tl.maximum(y, -LARGEST, propagate_nan=PROPAGATE)
        y = tl.minimum(y, LARGEST, propagate_nan=PROPAGATE)
    return y.to(tensors.out.dtype.element_ty), factor


@triton.jit
def share(partials, value, piece, stamp, DIVISION: tl.constexpr, rank, record):
    """The float32 ``value`` of every program of a row, and zeros."""
    k = tl.arange(0, DIVISION.LANES)
    words = tl.cast(value, tl.int32, bitcast=True) + 0 * k
    ll_send(partials + k, words, stamp, k == piece)
    words = ll_recv(ptrs=partials + k, stamp=stamp, mask=k < DIVISION.PIECES, source=rank, record=record)
    return tl.where(k < DIVISION.PIECES, tl.cast(words, tl.float32, bitcast=True), 0)


@triton.jit
def sum_and_larger(square, height, other_square, other_height):
    return square + other_square, tl.maximum(height, other_height)


@triton.jit
def over_the_row(
    squares,
    heights,
    meeting,
    entered,
    partials,
    piece,
    stamp,
    BY_ROW: tl.constexpr,
    DIVISION: tl.constexpr,
    rank,
    record,
):
    """The sum of all pieces' ``squares``, and the largest of their ``heights``. ``partials``: the row's, for either."""
    PIECES: tl.constexpr = DIVISION.PIECES
    if DIVISION.CLUSTERED:
        total, peak = cluster_all_reduce(meeting, entered, squares, heights, PROGRAMS=PIECES, PEAKS=BY_ROW)
    else:
        if BY_ROW:
            total, peak = tl.reduce((squares, heights), 0, sum_and_larger)
        else:
            total, peak = tl.sum(squares, axis=0), 0.0
        if PIECES > 1:
            totals = share(partials, total, piece, stamp, DIVISION=DIVISION, rank=rank, record=record)
            total = tl.sum(totals, axis=0)
            if BY_ROW:
                peaks = share(partials + PIECES, peak, piece, stamp, DIVISION=DIVISION, rank=rank, record=record)
                peak = tl.max(peaks, axis=0)
    return total, peak


@triton.jit
def load_or_zero(pointer, begin, i, mask):
    """Of the elements from ``begin`` on, those with the numbers ``i``. Zeros if there is no tensor."""
    if pointer is not None:
        return tl.load(pointer + begin + i, mask=mask, other=0)
    else:
        return (i * 0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def rms_norm(tensors, rows, eps, H: tl.constexpr, ROW: tl.constexpr, LARGEST: tl.constexpr):
    """RMSNorm of rows that are summed already, after an all-reduce of many rows; ``out`` may be ``input``.

    ``tensors``: a `NormTensors`. ``ROW``: the power of two from ``H`` on.
    """
    gdc_wait()
    j = tl.arange(0, ROW)
    inside = j < H
    gain = tl.load(tensors.weight + j, mask=inside, other=0).to(tl.float32)
    divisor = tl.load(tensors.scale) if tensors.scale is not None else 1.0
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * H + j
        added = load_or_zero(tensors.residual, tl.cast(row, tl.int64) * H, j, inside).to(tl.float32)
        x = tl.load(tensors.input + at, mask=inside, other=0).to(tl.float32) + added
        keep_residual(tensors, at, inside, x)
        scaled = x * gain
        peak = tl.max(tl.abs(scaled), axis=0) if tensors.row_scales is not None else 0.0
        y, _ = normalise(
            tensors,
            scaled,
            divisor=divisor,
            squares=tl.sum(x * x, axis=0),
            peak=peak,
            row=row,
            leads=True,
            eps=eps,
            H=H,
            LARGEST=LARGEST,
        )
        tl.store(tensors.out + at, y, mask=inside)
