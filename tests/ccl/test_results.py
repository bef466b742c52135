"""What each collective gives: every dtype, operation, size, layout, place and variant, 1 to 8 ranks (the sample: 4).

Moved data arrive bit by bit. Sums are what float32 (float64, or the integers themselves) gives, rounded once, and the
same on all ranks. Nothing beside the result is written: tensors lie inside larger buffers, whose rest must not change.
"""

import importlib
import itertools
from unittest.mock import patch

import pytest
import torch
from covering import covering, thorough
from patterns import assert_same_bits, pattern

from ccl.calls import (
    EVERYTHING,
    LAYOUTS,
    MOVES,
    ON_THE_HEAP,
    PLACES,
    SUMS,
    Arena,
    Case,
    chosen,
    mainly,
    perform,
    sample,
)
from iris.ccl import Config, ReduceOp, communicator
from iris.ccl.queue import SLOTS

ARENA_BYTES = 48 << 20

FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SUMMED = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]
MOVED = [*SUMMED, torch.uint16, torch.uint32, torch.uint64, torch.complex128]

# Variants of all_reduce in which ranks add in the order in which they come.
UNORDERED = {"atomic", "spinlock"}

SHAPES = [(0,), (1,), (3,), (), (5, 0), (1021,), (4, 256), (7, 33), (3, 5, 17), (64, 129)]


def results(ctx, cases):
    """A digest of each case's result."""
    arena = Arena(ctx.empty(ARENA_BYTES, dtype=torch.uint8))
    return [perform(ctx, arena, case, call) for call, case in enumerate(cases)]


def run(ranks, cases):
    """All cases, one after the other; sums are the same bits on all ranks."""
    for begin in range(0, len(cases), 40):  # what a worker's limit of time allows
        some = cases[begin : begin + 40]
        for case, *seen in zip(some, *ranks.run(results, some), strict=True):
            if case.collective == "all_reduce" and not {value for _, value in case.config} & UNORDERED:
                assert len(set(seen)) == 1, f"ranks have different bits: {case}"


def meaningful(dtype, op):
    if dtype.is_complex:
        return op in (ReduceOp.SUM, ReduceOp.AVG)
    return dtype.is_floating_point or op is not ReduceOp.AVG


@mainly(1, 2, 3, 4)
@pytest.mark.parametrize("collective", MOVES)
def test_data_arrive_bit_by_bit(ranks, collective):
    most, all_ranks = (12, 32) if EVERYTHING else (8, 16)
    roots, number = [0, ranks.num_ranks - 1], min(most, all_ranks // ranks.num_ranks)
    cases = [
        Case(collective, shape, dtype, root=root, input_place=source, output_place=target, layout=layout)
        for shape, dtype, root, source, target, layout in sample(
            number, collective, SHAPES, MOVED, roots, PLACES, PLACES, LAYOUTS
        )
    ]
    run(ranks, cases)


@mainly(1, 2, 3, 4)
@pytest.mark.parametrize("collective", SUMS)
def test_sums_are_rounded_once(ranks, collective):
    cases = [
        Case(collective, shape, dtype, op, ranks.num_ranks // 2, source, target, layout)
        for shape, dtype, op, source, target, layout in sample(
            min(20, 48 // ranks.num_ranks), collective, SHAPES, SUMMED, ReduceOp, PLACES, PLACES, LAYOUTS
        )
        if meaningful(dtype, op)
    ]
    run(ranks, cases)


@mainly(1, 3)
@pytest.mark.parametrize("collective", ["all_gather", "gather", "scatter", *SUMS])
def test_in_place(ranks, collective):
    cases = [
        Case(collective, shape, dtype, input_place=place, output_place=place, in_place=True)
        for shape, dtype, place in covering([(1,), (7, 129)], [torch.bfloat16, torch.int32], PLACES, ranks=ranks)
    ]
    run(ranks, cases)


# What a rank may be told. comm_sms=1 makes one program's rounds many, more than queues have slots.
CONFIGS = {
    "chosen": (),
    "one program": (("comm_sms", 1),),
    "gluon": (("use_gluon", True),),
    "partitioned": (("all_gather_variant", "partitioned"),),
    "blocks": (("block_size_m", 8), ("block_size_n", 256)),
    "gluon blocks": (("use_gluon", True), ("block_size_m", 16), ("block_size_n", 128), ("num_warps", 4)),
}
# Elements of float32 of a rank's piece. Beyond 64 KiB data go another way, a broadcast beyond 512 KiB yet another.
COUNTS = {"small": 1001, "beyond 64 KiB": 16_400, "beyond 512 KiB": 140_001}


@mainly(3)
@pytest.mark.parametrize("collective", MOVES)
def test_every_way_of_moving(ranks, collective):
    def is_short(config, count, place):
        """Many small blocks, or much data on many ranks, take seconds each. all_to_all_v has no Gluon form."""
        return not (collective == "all_to_all_v" and "gluon" in config) and (
            count == "small" or ("blocks" not in config and COUNTS[count] * ranks.num_ranks < 500_000)
        )

    cases = [
        Case(collective, (COUNTS[count],), torch.float32, root=1, output_place=place, config=CONFIGS[config])
        for config, count, place in covering(CONFIGS, COUNTS, ["heap", "mixed"], where=is_short)
    ]
    run(ranks, cases)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("collective", [thorough("all_gather"), "all_to_all"])
def test_programs_that_send_and_others_that_copy(ranks, collective):
    """As it is between two ranks, with an even and an odd number of programs, and not at all in place."""
    cases = [
        Case(collective, (COUNTS["beyond 512 KiB"],), torch.float32, output_place="heap", config=config)
        for config in ((), (("use_gluon", True),), (("comm_sms", 5),))
    ]
    run(ranks, [*cases, Case("all_gather", cases[0].shape, torch.float32, output_place="heap", in_place=True)])


@mainly(3)
def test_columns_and_rows_that_lie_apart(ranks):
    """Matrices with few and many columns, in tiles that do not divide them."""
    cases = [
        Case(collective, shape, torch.bfloat16, layout=layout, output_place=place, config=CONFIGS[config])
        for collective, shape, layout, place, config in covering(
            ["all_gather", "all_to_all"],
            [(17, 50), (3, 1100), (20, 1)],
            ["contiguous", "sliced", "mixed"],
            PLACES,
            CONFIGS,
            ranks=ranks,
        )
    ]
    large = [Case("all_gather", (90, 300), torch.float32, layout="mixed", output_place=place) for place in PLACES]
    run(ranks, [*cases, *large])


@mainly(3)
def test_all_gather_of_tiles(ranks):
    """Both all-gathers, persistent and partitioned, with tiles that fit the matrix and that do not."""
    cases = [
        Case(
            "all_gather",
            shape,
            dtype,
            output_place="mixed",
            config=(
                ("use_gluon", gluon),
                ("all_gather_variant", variant),
                ("block_size_m", block_m),
                ("block_size_n", block_n),
                # In the simulator, programs that wait cost those that work; each rank's partition has one.
                ("comm_sms", max(4, ranks.num_ranks)),
            ),
        )
        for gluon, variant, (block_m, block_n), shape, dtype in covering(
            [False, True],
            ["persistent", "partitioned"],
            # The last ones do not fit a slot, and are moved in parts.
            [(8, 256), (32, 64), (16, 32), (128, 128), (1, 1 << 20)],
            [(16, 64), (20, 40), (130, 72)],
            [torch.float16, torch.bfloat16, torch.float32],
            ranks=ranks,
        )
    ]
    run(ranks, cases)


# Those of floating-point types, whose elements are their own flags.
LAMPORT = ("one_shot", "two_shot_push", "two_shot_direct")


@mainly(3)
@pytest.mark.parametrize(
    "variant",
    [
        *("one_shot", thorough("two_shot_push"), "two_shot_direct"),
        *("two_shot", thorough("pull"), "ring", "atomic", "spinlock"),
    ],
)
def test_variants_of_all_reduce(ranks, variant):
    """Each of them in all places, in place, in both languages, and with more blocks than programs."""
    dtypes = [torch.float32, torch.bfloat16] + ([] if variant in LAMPORT else [torch.int8])
    cases = [
        Case(
            "all_reduce",
            (count,),
            dtype,
            input_place=place,
            output_place=place,
            in_place=in_place,
            config=(("all_reduce_variant", variant), ("comm_sms", sms), ("use_gluon", gluon)),
        )
        for count, dtype, place, in_place, sms, gluon in covering(
            [1, 1000, 9001], dtypes, PLACES, [False, True], [1, 7], [False, True], ranks=ranks
        )
    ]
    run(ranks, cases)


@mainly(4)
def test_rings(ranks):
    """However many they are, whichever way they go round, and whatever part of the work is whose."""
    cases = [
        Case(
            "all_reduce",
            (count,),
            torch.float16,
            op,
            config=(
                ("all_reduce_variant", "ring"),
                ("all_reduce_num_rings", rings),
                ("all_reduce_distribution", distribution),
                ("all_reduce_ring_slice_n", slice_n),
                ("comm_sms", 5),
            ),
        )
        for count, op, rings, distribution, slice_n in covering(
            [3, 20_003], list(ReduceOp), [1, 2, 3], [0, 1], [None, 256], ranks=ranks
        )
    ]
    run(ranks, cases)


@mainly(2)
@pytest.mark.parametrize("collective", SUMS)
def test_every_way_of_summing(ranks, collective):
    """Floats in one shot, pushed, and through the queues; integers through the queues; in both languages."""
    configs = {**CONFIGS, "invariant": (("batch_invariant", True),)}
    counts = {"one shot": 4099, "pushed": 40_001} | ({"queued": 530_001} if ranks.num_ranks == 2 else {})

    def is_short(config, count, dtype, place):
        return (
            count == "one shot"
            or (count == "pushed" and "blocks" not in config)
            or (count == "queued" and config in ("chosen", "gluon") and collective == "all_reduce")
        )

    cases = [
        Case(collective, (counts[count],), dtype, output_place=place, input_place=place, config=configs[config])
        for config, count, dtype, place in covering(
            configs, counts, [torch.float32, torch.int16], ["heap", "mixed"], where=is_short
        )
    ]
    run(ranks, cases)


def results_of_scarce_memory(ctx, cases):
    """With as much for the slots as a fourth of the programs need, as among many ranks on a GPU."""
    comm, enough = ctx.ccl.communicator(), communicator.STAGING_BYTES
    programs = comm.programs(None)
    communicator.STAGING_BYTES = programs // 4 * comm.size * SLOTS * communicator.LARGEST_SLOT
    comm.forget()
    try:
        assert comm.slot_bytes(programs, False) < communicator.LARGEST_SLOT
        return results(ctx, cases)
    finally:
        communicator.STAGING_BYTES = enough
        comm.forget()


@mainly(3)
def test_the_largest_blocks_have_slots_if_not_for_all_programs(ranks):
    """Larger ones, of 1 MiB here, move in parts."""
    ways = [(collective,) for collective in ("all_gather", "all_to_all", "scatter", "reduce_scatter")]
    ways += [("all_reduce", ("all_reduce_variant", name)) for name in ("two_shot", "ring", "atomic", "spinlock")]
    cases = [
        Case(collective, (20_001,), torch.float64, config=(("block_size_m", m), ("block_size_n", n), *way))
        for (collective, *way), (m, n) in covering(ways, [(4, 512), (256, 512)])
    ]
    slices = (("all_reduce_variant", "ring"), ("all_reduce_ring_slice_n", 4096))
    ranks.run(results_of_scarce_memory, [*cases, Case("all_reduce", (20_001,), torch.float32, config=slices)])


def results_by(ctx, cases, variant, in_flight):
    with patch("iris.ccl.pull.IN_FLIGHT", in_flight), chosen(ctx, variant):
        return results(ctx, cases)


@mainly(2, 3)
@pytest.mark.parametrize(("variant", "in_flight"), ON_THE_HEAP.values(), ids=ON_THE_HEAP)
def test_tensors_that_peers_access_where_they_lie(ranks, variant, in_flight):
    """Or not, since one of the ranks has its input or output elsewhere than on the heap."""
    pulls = variant == "pull"
    cases = [
        Case(collective, (count,), dtype, op, 0, *places, in_place=in_place, config=(("use_gluon", gluon),))
        for collective, count, (dtype, op), places, in_place, gluon in covering(
            ["all_reduce"] + ["reduce_scatter", "broadcast"] * pulls,
            [3, 1000, 20_001],
            [(torch.bfloat16, ReduceOp.AVG), (torch.float32, ReduceOp.SUM)] + [(torch.int8, ReduceOp.MAX)] * pulls,
            [("heap", "heap"), ("mixed", "heap"), ("heap", "mixed"), ("unaligned", "elsewhere")],
            [False, True],
            [False, True],
            ranks=ranks,
        )
    ]
    for case, *seen in zip(cases, *ranks.run(results_by, cases, variant, in_flight), strict=True):
        assert case.collective != "all_reduce" or len(set(seen)) == 1, f"ranks have different bits: {case}"


def invariant(ctx):
    """A sum that is a part of a longer tensor's, and at other places in it."""
    ours = pattern((3000,), torch.int32, ctx.cur_rank).to(torch.float32)
    config = Config(batch_invariant=True)
    seen = []
    for begin, length in [(0, 3000), (0, 3001), (100, 50_000), (20_001, 90_000)]:
        given, result = ctx.zeros(length), ctx.zeros(length)
        given[begin : begin + 3000] = ours[: length - begin]
        ctx.ccl.all_reduce(result, given, config=config)
        seen.append(result[begin : begin + 3000].clone())
    for other in seen[1:]:
        assert_same_bits(other, seen[0])


@mainly(3)
def test_an_invariant_sum_does_not_depend_on_the_size(ranks):
    ranks.run(invariant)


def reference(ctx, module, tiles):
    with importlib.import_module(module).iris(1 << 24) as own:
        for (M, N, block_m, block_n), dtype in itertools.product(tiles, [torch.float16, torch.bfloat16, torch.float32]):
            given, result = own.empty(M, N, dtype=dtype), own.empty(M * own.num_ranks, N, dtype=dtype)
            given.copy_(pattern((M, N), dtype, own.cur_rank))
            expected = torch.empty((M * own.num_ranks, N), dtype=dtype, device=own.device)
            torch.distributed.all_gather_into_tensor(expected, given.clone())
            config = Config(block_size_m=block_m, block_size_n=block_n, use_gluon=module != "iris")
            own.ccl.all_gather(result, given, config=config)
            assert_same_bits(result, expected)
        own.barrier()


@pytest.mark.parametrize("module", ["iris", "iris.experimental.iris_gluon"])
def test_all_gather_is_torchs(ranks, module):
    """From both constructors, against `torch.distributed.all_gather_into_tensor`."""
    ranks.run(reference, module, [(32, 64, 32, 64), (64, 64, 64, 32), (16, 512, 8, 256)])


def far_apart(ctx, step):
    """Small pieces whose rows begin so many bytes apart: their places are more than 32 bits."""
    rows, part, size = 3, 31, ctx.num_ranks  # bytes, which no wider word divides
    columns = part * size
    whole = torch.empty((rows - 1) * step + columns, dtype=torch.uint8, device=ctx.device)
    mine = whole.as_strided((rows, columns), (step, 1))
    everyone = [
        (torch.arange(rows * columns) * 7 + 31 * rank).to(torch.uint8).view(rows, columns) for rank in range(size)
    ]
    mine.copy_(everyone[ctx.cur_rank])
    gathered, turned = (torch.zeros(n * rows, columns, dtype=torch.uint8, device=ctx.device) for n in (size, 1))
    ctx.ccl.all_gather(gathered, mine)
    assert torch.equal(gathered.cpu(), torch.cat(everyone))
    ctx.ccl.all_to_all(turned, mine)
    begin = ctx.cur_rank * part
    assert torch.equal(turned.cpu(), torch.cat([each[:, begin : begin + part] for each in everyone], 1))


@pytest.mark.ranks(2)
def test_rows_that_begin_far_apart(ranks):
    ranks.run(far_apart, 1 << 30)
