"""Collectives over hosts in chunks: how many, and that every bit is that of a call in one piece."""

import contextlib
import itertools
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, thorough
from rank_pool import FEWER_HOSTS, Hosts, needs_gloo

import iris
from ccl.calls import LAYOUTS, PLACES, Case, sample
from ccl.test_fp32_partials import add_up
from ccl.test_over_hosts import combine, move, premultiply
from ccl.test_results import SUMMED, meaningful
from iris.ccl import ReduceOp, chunks, rooted_over_hosts
from iris.ccl.chunks import (
    MOST_ROOM,
    chunks_of_exchange,
    chunks_of_part,
    chunks_of_rooted,
    chunks_of_whole,
    cut,
    one_ahead,
    programs_beside_rails,
)
from iris.ccl.cluster import Cluster, HostFigures
from iris.errors import GroupAbortedError

SHAPES = [(1,), (16,), (1021,), (7, 129), (40, 256)]
DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.int32, torch.float64, torch.complex128]
# An odd one, and more than small calls have.
NUMBERS = [thorough(2), thorough(3), 8]


@contextlib.contextmanager
def in_chunks(ctx, number):
    """Calls of any size are made in so many chunks. Yields the names of the transfers of this rank's rail."""
    rail, transfers = ctx._world.rail, []

    def noted(start, nbytes, what, **given):
        transfers.append(given.get("move", ("barrier",))[0])
        return transfer(start, nbytes, what, **given)

    transfer = rail._transfer
    with (
        mock.patch.object(chunks, "number_of_chunks", lambda *_: number),
        mock.patch.object(rail, "_transfer", noted),
    ):
        yield transfers


def move_in_chunks(ctx, cases, number, expected):
    with in_chunks(ctx, number) as transfers:
        move(ctx, cases)
    assert transfers == expected


@pytest.mark.thorough
@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_gathered_is_the_same(ranks, number):
    cases = [
        Case("all_gather", shape, dtype, input_place=source, output_place=target)
        for shape, dtype, source, target in sample(10, f"chunks {number}", SHAPES, DTYPES, PLACES, PLACES)
    ]
    cases += [Case("all_gather", (40, 256), torch.bfloat16, in_place=True)]
    sizes = [torch.Size(case.shape).numel() * case.dtype.itemsize for case in cases]
    expected = ["all_gather"] * sum(len(cut(nbytes, number)) for nbytes in sizes)
    ranks.run(move_in_chunks, cases, number, expected)


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_exchanged_is_the_same(ranks, number):
    cases = [
        Case("all_to_all", shape, dtype, input_place=source, output_place=target, layout=layout)
        for shape, dtype, source, target, layout in sample(
            10, f"exchanged {number}", [(1021,), (3, 129), (40, 8)], DTYPES, PLACES, PLACES, LAYOUTS
        )
    ]
    of_rows = [
        (case.shape[0], 1) if len(case.shape) > 1 else (case.shape[0] * case.dtype.itemsize, 16) for case in cases
    ]
    expected = ["all_to_all"] * sum(len(cut(length, number, alignment)) for length, alignment in of_rows)
    ranks.run(move_in_chunks, cases, number, expected)


def move_on_the_rail_of_roots(ctx, hosts, cases, number):
    """Only the rail of each root takes part between hosts."""
    with in_chunks(ctx, number) as transfers:
        move(ctx, cases)
    calls = [(case.collective, case.shape, case.dtype, case.root) for case in cases]
    assert transfers == transfers_of_roots(ctx, hosts, calls, number)


def transfers_of_roots(ctx, hosts, calls, number):
    """Of this rank's rail, in calls ``(name, shape, dtype, root)``."""

    def place(rank):
        return hosts.ranks_of(hosts.host_of(rank)).index(rank)

    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype, _ in calls]
    names = [
        [name] * len(cut(nbytes, number))
        for nbytes, (name, _, _, root) in zip(sizes, calls, strict=True)
        if place(root) == place(ctx.cur_rank)
    ]
    return list(itertools.chain(*names))


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("collective", ["broadcast", thorough("gather"), "scatter"])
def test_what_has_a_root_is_the_same(ranks, collective, number):
    chosen = sample(10, f"{collective} {number}", SHAPES, DTYPES, PLACES, PLACES, LAYOUTS)
    cases = [
        Case(
            collective, shape, dtype, input_place=source, output_place=place, layout=layout, root=turn % ranks.num_ranks
        )
        for turn, (shape, dtype, source, place, layout) in enumerate(chosen)
    ]
    ranks.run(move_on_the_rail_of_roots, ranks.hosts, cases, number)


def lack_room(ctx, name):
    """The root alone has no memory left: it gets torch's error, and the others one that tells of it."""

    def refuse(*_):
        raise torch.OutOfMemoryError("Tried to allocate 64.00 MiB.")

    with iris.iris(1 << 20) as other:
        x, start, here = torch.ones(4), time.monotonic(), ctx.cur_rank == ctx.num_ranks - 1
        error, text = (torch.OutOfMemoryError, "64.00 MiB") if here else (GroupAbortedError, "OutOfMemoryError: Tried")
        with mock.patch.object(rooted_over_hosts, "two_buffers", refuse) if here else contextlib.nullcontext():
            with pytest.raises(error, match=text):
                ROOTED[name](other.ccl, x, x, ctx.num_ranks - 1)
                other.barrier()
        assert time.monotonic() - start < 10


ROOTED = {
    "gather": lambda ccl, x, mine, root: ccl.gather(x.new_empty(len(x) * dist.get_world_size()), mine, root),
    "scatter": lambda ccl, x, mine, root: ccl.scatter(mine, x.new_ones(len(x) * dist.get_world_size()), root),
    "reduce": lambda ccl, x, mine, root: ccl.reduce(x.clone(), mine, root),
}


@needs_gloo
@pytest.mark.ranks(Hosts(2, 2), Hosts(3, 2))
@pytest.mark.parametrize("name", ROOTED)
def test_nobody_waits_for_a_root_without_room(ranks, name):
    ranks.run(lack_room, name)


def reduce_in_chunks(ctx, hosts, cases, number):
    """As `combine` has them: each rank is a root by turns."""
    with in_chunks(ctx, number) as transfers:
        combine(ctx, hosts, cases)
    calls = [("gather", shape, dtype, call % ctx.num_ranks) for call, (_, shape, dtype, *_) in enumerate(cases)]
    assert transfers == transfers_of_roots(ctx, hosts, calls, number)


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("number", NUMBERS)
def test_sums_at_a_root_have_the_same_bits(ranks, number):
    layouts = ["plain", "stepped", "in place"]
    cases = [
        ("reduce", shape, dtype, op, layout)
        for shape, dtype, op, layout in sample(12, f"reduce {number}", SHAPES, SUMMED, ReduceOp, layouts)
        if meaningful(dtype, op)
    ]
    ranks.run(reduce_in_chunks, ranks.hosts, cases, number)


def sum_in_chunks(ctx, calls, hosts, cases, number, expected):
    with in_chunks(ctx, number) as transfers:
        calls(ctx, hosts, cases)
    assert transfers == expected


def transfers_of_sums(collective, shape, dtype, size, number):
    """A rail brings what is to be added up, and of an all_reduce the sum of each chunk after that for the next one."""
    count = torch.Size(shape).numel()
    each = count if collective == "reduce_scatter" else -(-count // size)
    chunks = len(cut(each * dtype.itemsize, number))
    if collective == "reduce_scatter":
        return ["all_to_all"] * chunks
    return ["all_to_all", *["all_to_all", "all_gather"] * (chunks - 1), "all_gather"]


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("number", [thorough(2), 3, 8])
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce"])
def test_sums_have_the_same_bits(ranks, collective, number):
    size, layouts = ranks.num_ranks, ["plain", "stepped", "in place"]
    cases = [
        (collective, shape, dtype, op, layout)
        for shape, dtype, op, layout in sample(12, f"{collective} {number}", SHAPES, SUMMED, ReduceOp, layouts)
        if meaningful(dtype, op)
    ]
    # A size that all ranks divide: then an all_reduce writes its result over what it reads.
    cases += [(collective, (64 * size,), torch.bfloat16, ReduceOp.SUM, "in place")]
    expected = [transfers_of_sums(collective, shape, dtype, size, number) for _, shape, dtype, *_ in cases]
    ranks.run(sum_in_chunks, combine, ranks.hosts, cases, number, list(itertools.chain(*expected)))


@pytest.mark.ranks(Hosts(2, 2), *([Hosts(2, 2, dealt=True), Hosts(3, 2)] if EVERYTHING else []))
@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce"])
def test_sums_that_hosts_send_as_float32_have_the_same_bits(ranks, collective):
    cases = [
        (collective, (1021,), torch.bfloat16, ReduceOp.SUM),
        (collective, (7, 129), torch.float16, ReduceOp.AVG),
        (collective, (40, 8), torch.complex32, ReduceOp.SUM),
    ]
    expected = [transfers_of_sums(*case[:3], ranks.num_ranks, 3) for case in cases]
    ranks.run(sum_in_chunks, add_up, ranks.hosts, cases, 3, list(itertools.chain(*expected)))


def premultiply_in_chunks(ctx, hosts):
    with in_chunks(ctx, 2) as transfers:
        premultiply(ctx, hosts)
    assert transfers == ["all_to_all", "all_to_all", "all_gather", "all_gather"]


@pytest.mark.ranks(Hosts(2, 2))
def test_every_chunk_is_multiplied_by_the_factors_of_ranks(ranks):
    ranks.run(premultiply_in_chunks, ranks.hosts)


def known(hosts, ranks_each, network=50.0):
    return Cluster(hosts, ranks_each, network), HostFigures(290.0, 290.0, 388.0, 4000.0, 12.0, 46.0)


@pytest.mark.parametrize(
    ("hosts", "ranks_each", "network", "mebibytes", "of_parts", "of_exchange", "of_whole"),
    [
        (2, 8, 50, 1024, 1, 8, 8),  # the own host's step takes longer than the rail, and is beside it anyway
        (2, 8, 25, 4, 1, 1, 1),
        (2, 8, 25, 8, 2, 1, 1),
        (2, 8, 25, 32, 4, 3, 2),
        (4, 8, 50, 1, 1, 1, 1),
        (4, 8, 50, 4, 2, 1, 1),  # a rail sends 12 MiB
        (8, 8, 50, 4, 2, 2, 1),  # it sends 28, but there are 8 kernels in each chunk
        (4, 8, 50, 1024, 8, 8, 8),
        (2, 8, 5, 32, 5, 3, 2),  # of a slow network the steps within the host are what is hidden
        (2, 1, 50, 1024, 1, 1, 1),  # a rank alone on its host has nobody to move data to
    ],
)
def test_as_many_chunks_as_pay(hosts, ranks_each, network, mebibytes, of_parts, of_exchange, of_whole):
    here, nbytes = known(hosts, ranks_each, network), mebibytes << 20
    assert len(chunks_of_part(*here, nbytes)) == of_parts
    # all_to_all: as many bytes for each host on the rail, which are for all of its ranks.
    assert len(chunks_of_exchange(*here, 1, nbytes // ranks_each)) == of_exchange
    assert len(chunks_of_exchange(*here, 512, nbytes // ranks_each // 512)) == of_exchange
    assert len(chunks_of_whole(*here, nbytes)) == of_whole


@pytest.mark.parametrize(
    ("mebibytes", "of_gather", "of_reduce"),
    # Of 4 hosts of 8 the root has 32 parts to receive in a gather, and 4 in a reduce: 64 MiB of them at a time.
    [(0.25, 1, 1), (2, 1, 1), (16, 8, 2), (256, 128, 16)],
)
def test_a_root_has_room_for_two_chunks_however_large_the_whole_is(mebibytes, of_gather, of_reduce):
    here, nbytes = known(4, 8), int(mebibytes * (1 << 20))
    gather, reduce = chunks_of_rooted(*here, nbytes, 32), chunks_of_rooted(*here, nbytes, 4, reduces=True)
    assert (len(gather), len(reduce)) == (of_gather, of_reduce)
    for pieces, rows in ((gather, 32), (reduce, 4)):
        assert all(rows * (piece.stop - piece.start) <= MOST_ROOM for piece in pieces)


@pytest.mark.parametrize("nbytes", [16, 4096, 8 << 20, (32 << 20) + 2, 1 << 30])
def test_a_chunk_more_or_less_takes_longer(nbytes):
    """By the formula, unless chunks would be too small, or too many."""
    number, rail_us, step_us = len(chunks_of_part(*known(2, 8, 25.0), nbytes)), nbytes / 25e3, 7 * nbytes / 290e3

    def beside_the_longer(count):
        return min(rail_us - step_us, step_us) / count + count * (chunks.NEXT_TRANSFER_US + 2 * 12)

    assert number == 1 or nbytes / number >= chunks.LEAST_BYTES
    assert number == 1 or beside_the_longer(number) <= beside_the_longer(number - 1)
    if number < chunks.MOST and nbytes / (number + 1) >= chunks.LEAST_BYTES:
        assert beside_the_longer(number) <= beside_the_longer(number + 1)


@pytest.mark.parametrize("nbytes", [1, 15, 16, 17, 160, 1000, 12345])
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_chunks_begin_at_multiples_of_16_bytes(nbytes, number):
    pieces = cut(nbytes, number)
    assert [each for piece in pieces for each in range(nbytes)[piece]] == list(range(nbytes))
    assert len(pieces) <= number and all(piece.start % 16 == 0 for piece in pieces)


@pytest.mark.parametrize(("num_sms", "programs"), [(132, 96), (304, 268), (60, 30), (1, None)])
def test_steps_beside_a_rail_leave_room_for_it(num_sms, programs):
    assert programs_beside_rails(num_sms) == programs


def test_two_chunks_are_under_way():
    events = []

    def begin(chunk):
        events.append(f"begin {chunk}")
        return lambda: events.append(f"finish {chunk}")

    assert list(one_ahead(one_ahead("abc", begin), lambda chunk: begin(chunk.upper()))) == list("abc")
    assert events == [
        *("begin a", "begin b", "finish a", "begin A", "begin c", "finish b", "begin B", "finish A"),
        *("finish c", "begin C", "finish B", "finish C"),
    ]
