"""Which groups of a product are done, told to a kernel that runs beside it and uses them one stage after the other.

Groups are computed in their order. A stage is several groups; stages are numbered from the end: stage 0 has the last
UNIT groups, stage 1 the 2 UNIT before them, stage 2 the 4 UNIT before these, and so on. So there are few stages, and
little is left to do when the product ends. The product counts the tiles of each stage that are stored, and the other
kernel waits until there are as many as there will be.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris.language.jit import jit

# The last stage has one group of so many, at least one: less than a tile for each multiprocessor gains nothing.
UNITS = 32
# Stages at most.
MOST_STAGES = UNITS.bit_length()
PROGRESS_WORDS = 8 + MOST_STAGES


class Stages(NamedTuple):
    """A constant of both kernels."""

    GROUPS: int
    """How many there are."""
    UNIT: int
    NUMBER: int
    """Of stages."""


class Progress(NamedTuple):
    """Counts of a product, int32, which are 0 when it begins."""

    begun: Any
    """1 as soon as all launches before the product are over."""
    tickets: Any
    """Items of the other kernel's work that are taken. The product leaves it alone."""
    finished: Any
    """``[NUMBER]``: tiles of each stage whose results are stored."""


def stages_of(groups: int) -> Stages:
    unit = -(-groups // UNITS)
    return Stages(groups, unit, (-(-groups // unit)).bit_length())


def progress_of(words: Any) -> Progress:
    """In a tensor of `PROGRESS_WORDS` zeros, each part at a multiple of 16 bytes."""
    return Progress(words[:1], words[4:5], words[8:])


@jit
def stage_of(group, STAGES: tl.constexpr):
    """Of a group, or of a block of them."""
    NUMBER: tl.constexpr = STAGES.NUMBER
    units = (STAGES.GROUPS - 1 - group) // STAGES.UNIT + 1
    stage = units * 0
    for power in tl.static_range(1, NUMBER):
        stage += tl.where(units >= 2**power, 1, 0)
    return stage


@triton.jit
def tiles_of_stage(counts, stage, BLOCK_M: tl.constexpr, tiles_n, GROUPS: tl.constexpr, STAGES: tl.constexpr):
    """How many tiles a stage has. ``counts``: rows of each group. ``GROUPS``: a power of two, from their number on."""
    group = tl.arange(0, GROUPS)
    there = group < STAGES.GROUPS
    rows = tl.load(counts + group, mask=there, other=0)
    mine = there & (stage_of(group, STAGES) == stage)
    return tl.sum(tl.where(mine, tl.cdiv(rows, BLOCK_M) * tiles_n, 0), axis=0)
