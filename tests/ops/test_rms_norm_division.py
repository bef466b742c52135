"""How all_reduce_rms_norm divides rows among programs, which all have a place at one time."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from iris.ccl import communicator
from iris.ccl.kernel_launch import ALL_REGISTERS, EARLY_LAUNCH, SMALL_LAUNCH
from iris.language.target import threads_per_warp
from iris.ops import row_division
from iris.ops.row_division import BY_OWNER
from ops.norms import BF16, CLUSTERS, rounds


def beyond_the_row(ctx, cluster):
    """Pieces so small that what they are rounded up by is more than one of them."""
    columns, sms = 200, ctx.get_cu_count() if torch.cuda.is_available() else None
    before = row_division.SMALLEST_PIECE, row_division.SMALLEST_PART
    row_division.SMALLEST_PIECE, row_division.SMALLEST_PART = 16, 8
    try:
        division = row_division.divide("two_shot_push", ctx.num_ranks, 1, columns, 2, sms, cluster)
        assert (division.pieces - 1) * ctx.num_ranks * division.part >= columns
        rounds(ctx, "two_shot_push", (1, columns), BF16, BF16, None, True, cluster)
    finally:
        row_division.SMALLEST_PIECE, row_division.SMALLEST_PART = before


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_program_may_have_nothing_of_its_row(ranks, cluster):
    ranks.run(beyond_the_row, cluster)


SMS = 132  # of an H200


def test_programs_that_wait_for_each_other_all_have_a_place():
    """Those of the other ranks wait for all of them, and those of a row for each other."""
    for variant, size, room, columns, itemsize, cluster in product(
        ("one_shot", "two_shot_push", BY_OWNER), (1, 2, 3, 5, 6, 7, 8, 12), (1, 2, 16, 64, 1024),
        (1, 300, 4096, 5000, 16384, 32768), (2, 4), (1, 8, 16),
    ):  # fmt: skip
        division = row_division.divide(variant, size, room, columns, itemsize, SMS, cluster)
        ranks = size if variant == "two_shot_push" else 1
        assert division.pieces * ranks * division.part >= columns
        assert division.piece >= ranks * division.part and division.block >= division.part
        assert division.part * itemsize % 16 == 0 and division.warps & (division.warps - 1) == 0
        # Each thread polls a word.
        polled = 1 if variant == BY_OWNER else itemsize  # results may be of fp8
        assert division.block * polled >= 4 * threads_per_warp() * division.warps
        if division.pieces > 1:
            assert room * division.pieces <= division.programs_at_once(SMS)
        assert division.programs_at_once(SMS) * division.warps * 32 * division.registers <= ALL_REGISTERS // 2 * SMS
        if division.clustered:
            assert 1 < division.pieces <= cluster
            assert division.warps * 32 * division.registers <= row_division.CLUSTER_REGISTERS
            assert row_division.in_registers(division, variant, size, itemsize)


@pytest.mark.parametrize(
    "variant, size, room, columns, pieces, warps, clustered",
    [
        ("one_shot", 4, 1, 4096, 16, 1, True), ("one_shot", 4, 16, 8192, 16, 1, True),
        ("one_shot", 2, 1, 4096, 16, 1, True), ("one_shot", 2, 1, 7168, 16, 2, True),
        ("one_shot", 2, 16, 7168, 8, 2, True), ("one_shot", 2, 64, 8192, 4, 4, True),
        ("one_shot", 2, 256, 4096, 2, 4, True), ("one_shot", 2, 256, 8192, 1, 8, False),
        ("one_shot", 6, 1, 16384, 16, 2, True), ("one_shot", 8, 1, 32768, 128, 1, False),
        ("two_shot_push", 2, 32, 8192, 16, 1, True), ("two_shot_push", 4, 32, 4096, 8, 1, True),
        ("two_shot_push", 5, 32, 4096, 4, 2, True), ("two_shot_push", 4, 128, 8192, 4, 2, True),
        ("two_shot_push", 4, 1024, 8192, 1, 8, False), (BY_OWNER, 2, 128, 7168, 4, 2, True),
        (BY_OWNER, 2, 1024, 8192, 1, 8, False),
    ],
)  # fmt: skip
def test_few_rows_have_several_programs_each(variant, size, room, columns, pieces, warps, clustered):
    division = row_division.divide(variant, size, room, columns, 2, SMS, 16)
    assert (division.pieces, division.warps, division.clustered) == (pieces, warps, clustered)


def agreed(ctx):
    """Ranks whose GPUs have clusters of other sizes, in a new group."""
    own, communicator.largest_cluster = communicator.largest_cluster, lambda: 16 >> ctx.cur_rank
    try:
        assert ctx.ccl.communicator(dist.new_group()).largest_cluster == 16 >> (ctx.num_ranks - 1)
    finally:
        communicator.largest_cluster = own


def test_all_ranks_take_the_smallest_cluster_of_any(ranks):
    ranks.run(agreed)


@pytest.mark.parametrize(
    ("variant", "size", "warps", "registers", "hopper", "given"),
    [("one_shot", 2, 5, 128, True, (True, True, 128)), ("one_shot", 8, 5, 128, True, (True, True, 128)),
     ("one_shot", 2, 6, 128, True, (False, True, 96)), ("one_shot", 2, 8, 128, True, (False, True, 96)),
     ("one_shot", 2, 10, 64, True, (True, True, 64)), ("one_shot", 2, 16, 64, True, (False, True, 48)),
     ("one_shot", 2, 8, 128, False, (False, False, 128)), ("one_shot", 4, 8, 128, True, (False, False, 128)),
     ("two_shot_push", 2, 8, 128, True, (False, False, 128)), (BY_OWNER, 2, 8, 128, True, (False, False, 128))],
)  # fmt: skip
def test_a_launch_begins_early_only_where_there_is_room(monkeypatch, variant, size, warps, registers, hopper, given):
    """``warps`` on each multiprocessor. What is resident before its turn, and what waits, leave room for others."""
    monkeypatch.setattr(row_division, "launches_early", lambda: hopper)
    small, early, registers = row_division.residency(variant, size, 132 * warps, registers, 132)
    assert (small, early, registers) == given
    held = warps * 32 * registers
    assert held <= (SMALL_LAUNCH if small else EARLY_LAUNCH if early else ALL_REGISTERS // 2)
    assert 2 * SMALL_LAUNCH + EARLY_LAUNCH <= ALL_REGISTERS
