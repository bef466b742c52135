"""The gradient of `experts_mlp`'s activation, and what the gradients beside it take of the same rows, in one pass.

A row of this rank's experts has h, what its token times the expert's first matrix is; d, its token's gradient times the
second matrix; and a weight w in the token's sum. With a = act(h) the passes after this one take

    w a             [R, I]      for the gradient of the second matrix
    w d act'(h)     [R, 2 I]    that of h, for the gradients of the first matrix and of the tokens
    a . d           [R]         that of w

Each element of h and d is read once. Rows of no group are neither read nor written. What is after a group's rows in
its room is zeroed, since sums over a group's room read it. Programs find their tiles as those of grouped GEMMs do
(`iris.ops.grouped.groups`).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from iris.language.dependent_launch import gdc_wait
from iris.ops.grouped.groups import group_of, rows_of
from iris.ops.grouped.kernel_arguments import GroupedRows, groups_up_to
from iris.ops.grouped.launch import multiprocessors
from iris.ops.kernel import SIMULATED_PROGRAMS
from iris.runtime.launch import enqueue

# Elements of a tile: 16 bytes of bf16 for each of 128 threads, twice. More take more registers than a thread has.
TILE, MOST_COLUMNS = 2048, 1024
NUM_WARPS = 4
# Programs a multiprocessor: memory is the limit, and each program waits for its loads before it stores.
PROGRAMS = 8


class ActivationGradient(NamedTuple):
    """A constant of the kernel."""

    GROUPS: int
    """As `GroupedForm.GROUPS`."""
    ROWS: int
    COLUMNS: int
    """Of a tile, powers of two."""
    GATED: bool
    """Whether a = silu(left half of h) * right half; or a = h."""


class OfRows(NamedTuple):
    """Contiguous matrices, by their first elements."""

    hidden: Any
    """h: ``[R, 2 I]``, or ``[R, I]`` where it is not gated."""
    to_down: Any
    """d: ``[R, I]``."""
    factors: Any
    """w: float32 ``[R]``."""
    value: Any
    """w a: ``[R, I]``, written."""
    of_hidden: Any
    """Like ``hidden``, written."""
    of_factors: Any
    """float32 ``[R]``, written."""


# A number of rows or groups may be 1, and is no constant then.
@triton.jit(do_not_specialize=["room", "E"])
def activation_gradient(rows, groups, room, E, N, FORM: tl.constexpr):
    """``rows``: an `OfRows`, of ``room`` rows and N = I columns. ``groups``: a `GroupedRows` that has both."""
    gdc_wait()
    ROWS: tl.constexpr = FORM.ROWS
    COLUMNS: tl.constexpr = FORM.COLUMNS
    WIDTH: tl.constexpr = 2 if FORM.GATED else 1
    _firsts, rooms = rows_of(GroupedRows(groups.offs, None), tl.arange(0, FORM.GROUPS), E, room)
    ends = tl.cumsum(tl.cdiv(rooms, ROWS), axis=0)
    for number in range(tl.program_id(0), tl.max(ends, axis=0), tl.num_programs(0)):
        group, before = group_of(number, ends)
        _first, room_of_group = rows_of(GroupedRows(groups.offs, None), group, E, room)
        first, count = rows_of(groups, group, E, room)
        in_group = (number - before) * ROWS + tl.arange(0, ROWS)
        row = (first + in_group).to(tl.int64)
        inside, there = in_group < room_of_group, in_group < count
        w = tl.load(rows.factors + row, mask=there, other=0)[:, None]
        of_factors = tl.zeros((ROWS,), tl.float32)
        for begin in range(0, N, COLUMNS):
            columns = begin + tl.arange(0, COLUMNS)[None, :]
            at, at_hidden = row[:, None] * N + columns, row[:, None] * WIDTH * N + columns
            read, written = there[:, None] & (columns < N), inside[:, None] & (columns < N)
            d = tl.load(rows.to_down + at, mask=read, other=0).to(tl.float32)
            h = tl.load(rows.hidden + at_hidden, mask=read, other=0).to(tl.float32)
            if FORM.GATED:
                up = tl.load(rows.hidden + at_hidden + N, mask=read, other=0).to(tl.float32)
                likely = tl.sigmoid(h)
                silu = h * likely
                value = silu * up
                tl.store(rows.of_hidden + at_hidden + N, w * d * silu, mask=written)
                # silu' = sigmoid + h sigmoid (1 - sigmoid).
                tl.store(rows.of_hidden + at_hidden, w * d * up * (likely + silu * (1 - likely)), mask=written)
            else:
                value = h
                tl.store(rows.of_hidden + at_hidden, w * d, mask=written)
            tl.store(rows.value + at, w * value, mask=written)
            of_factors += tl.sum(value * d, axis=1)
        tl.store(rows.of_factors + row, of_factors, mask=there)


def arguments_of(rows: OfRows, offs: torch.Tensor, counts: torch.Tensor) -> tuple:
    """Of the kernel."""
    (room, columns), E = rows.to_down.shape, len(counts)
    wide = min(MOST_COLUMNS, 1 << (columns - 1).bit_length())
    form = ActivationGradient(groups_up_to(E), max(1, TILE // wide), wide, rows.hidden.shape[1] > columns)
    return rows, GroupedRows(offs, counts), room, E, columns, form


def differentiate_activation(
    hidden: torch.Tensor, to_down: torch.Tensor, factors: torch.Tensor, *, offs: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w a, the gradient of h, and that of w: on the current stream, of the rows of all groups.

    ``hidden``: ``[R, 2 I]``, gates first, or without an activation ``[R, I]``; ``to_down``: ``[R, I]``, of one dtype;
    ``factors``: float32 ``[R]``. All are contiguous. ``offs`` and ``counts`` as `iris.ops.grouped_mm` takes them. The
    results are like ``to_down``, ``hidden`` and ``factors``. Sums are of float32, and rounded once.
    """
    made = OfRows(hidden, to_down, factors, *(torch.empty_like(each) for each in (to_down, hidden, factors)))
    device = hidden.device.index
    programs = SIMULATED_PROGRAMS if device is None else PROGRAMS * multiprocessors(device)
    given = arguments_of(made, offs, counts)
    enqueue(activation_gradient, (programs, 1, 1), device, *given, num_warps=NUM_WARPS)
    return made.value, made.of_hidden, made.of_factors
