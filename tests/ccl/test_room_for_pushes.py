"""Pushes in two steps take a larger share of a group's memory while there is room, and what decides is equal on all
ranks."""

from types import SimpleNamespace

import pytest
import torch
from patterns import assert_same_bits

import iris
from iris.bench import tune
from iris.ccl import ReduceOp, lamport_channel, two_shot_direct
from iris.ccl.algorithms import choose_algorithm
from iris.ccl.call import Call
from iris.ccl.select import Choice
from iris.compat.cuda import current_raw_stream

MIB = 1 << 20


@pytest.mark.parametrize(
    ("device_mib", "steps", "largest"), [(143771, 2, 32), (81559, 2, 16), (143771, 1, 8), (81559, 1, 4)]
)
def test_the_largest_sums_of_two_ranks_that_are_pushed(device_mib, steps, largest):
    """MiB, on an H200 and on an H100, with 132 multiprocessors."""
    comm = SimpleNamespace(size=2, num_sms=132, workspace=SimpleNamespace(limit=device_mib * MIB // 128))
    sizes = [3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    fitting = [n for n in sizes if lamport_channel.fits(comm, "all_reduce", n * MIB, steps)]
    assert fitting == sizes[: sizes.index(largest) + 1]


@pytest.mark.parametrize(
    ("steps", "mib", "kib"), [(1, 1, 4), (1, 2, 8), (1, 3, 4), (2, 4, 4), (2, 6, 4), (2, 8, 8), (2, 16, 8)]
)
def test_parts_of_two_ranks_are_larger_where_no_program_has_more_to_do(steps, mib, kib):
    """With two programs on each of 132 multiprocessors; in two steps each has two blocks at least."""
    assert lamport_channel.channel_layout(2, steps, mib * MIB, 264).part == kib << 10
    assert lamport_channel.channel_layout(4, steps, mib * MIB, 264).part <= 2 << 10


@pytest.mark.parametrize(("device_mib", "largest"), [(143771, 64), (81559, 32)])
def test_the_largest_sums_of_two_ranks_that_go_straight_to_results(device_mib, largest):
    """MiB, as above, and with 128 programs."""
    workspace = SimpleNamespace(limit=device_mib * MIB // 128)
    comm = SimpleNamespace(size=2, workspace=workspace, programs=lambda wanted: wanted or 128)
    sizes = [8, 12, 16, 24, 32, 48, 64, 96]
    fitting = [n for n in sizes if two_shot_direct.fits(comm, "all_reduce", n * MIB)]
    assert fitting == sizes[: sizes.index(largest) + 1]


@pytest.mark.parametrize(
    ("size", "nbytes", "part", "programs"),
    [
        (2, 64 * MIB, 16384, 128),
        (2, 4 * MIB, 16384, 128),
        (2, MIB, 4096, 128),
        (8, 64 * MIB, 4096, 128),
        (3, 1, 512, 1),
    ],
)
def test_parts_are_large_where_all_programs_have_one(size, nbytes, part, programs):
    comm = SimpleNamespace(size=size, programs=lambda wanted: wanted or 128)
    slots = two_shot_direct.slots_of(comm, nbytes, None)
    assert (slots.part, slots.programs) == (part, programs)
    # Room for all blocks, in slots that other calls of up to a power of two share.
    assert nbytes <= slots.blocks * part * size < 2 * nbytes + 2 * part * size
    assert slots.nbytes == 2 * slots.blocks * part * size


def refused(ctx, ways):
    """The ways of sums of so many KiB: those that need memory are refused it, and then not."""
    with iris.iris(4 * MIB) as own, pytest.MonkeyPatch.context() as patch:
        comm = own.ccl.communicator()
        comm.table = comm.table | {"all_reduce": [Choice(None, way, None) for way in ways]}
        patch.setattr(lamport_channel, "SHARE_OF_WORKSPACE", 1 << 40)
        line = current_raw_stream(own.gpu_id) if own.device.type == "cuda" else None
        found = []
        for left, sizes in ((4, [32]), (1, [32, 64]), (4, [64, 128])):
            patch.setattr(lamport_channel, "ROOM_LEFT", left)
            for kib in sizes:
                i = torch.arange(kib << 8, device=own.device, dtype=torch.float32)
                x, result = i * (own.cur_rank + 1) + kib, own.zeros(kib << 8)
                comm.forget()
                own.ccl.all_reduce(result, x)
                assert_same_bits(result, i * (own.num_ranks * (own.num_ranks + 1) // 2) + kib * own.num_ranks)
                found.append(
                    (kib, choose_algorithm(Call("all_reduce", comm, result, x, line, op=ReduceOp.SUM))[0].name)
                )
        return found


@pytest.mark.parametrize("ways", [("two_shot_direct", "pull"), ("two_shot_push", "two_shot_direct", "pull")])
def test_sums_without_room_take_the_next_way_that_has_some(ranks, ways):
    first, last = ways[0], ways[-1]
    assert ranks.run(refused, ways) == ranks.num_ranks * [
        [(32, first), (32, first), (64, last), (64, last), (128, first)]
    ]


def decided(ctx):
    """Ways of sums that all have a channel of their own, by what room there is."""
    with iris.iris(4 * MIB) as own, pytest.MonkeyPatch.context() as patch:
        comm = own.ccl.communicator()
        comm.table = comm.table | {"all_reduce": [Choice(None, "two_shot_push", None), Choice(None, "pull", None)]}
        line = current_raw_stream(own.gpu_id) if own.device.type == "cuda" else None
        limit = comm.workspace.limit

        def sum_of(kib):
            x = own.empty(kib << 8)
            return Call("all_reduce", comm, torch.empty_like(x), x, line, op=ReduceOp.SUM)

        def nbytes(kib):
            return lamport_channel.call_channel(sum_of(kib), None, steps=2).layout.nbytes

        def way(kib):
            call = sum_of(kib)
            # Whole numbers, of which sums are exact.
            i = torch.arange(len(call.input), device=own.device, dtype=torch.float32)
            call.input.copy_(i * (own.cur_rank + 1) + kib)
            # As a rank does whose tensors lie otherwise than before.
            comm.forget()
            own.ccl.all_reduce(call.output, call.input)
            ranks = own.num_ranks
            assert_same_bits(call.output, i * (ranks * (ranks + 1) // 2) + kib * ranks)
            return choose_algorithm(call)[0].name

        def leave(some):
            patch.setattr(lamport_channel, "ROOM_LEFT", 4 if some else 1)

        patch.setattr(lamport_channel, "SHARE_OF_WORKSPACE", limit // nbytes(8))
        patch.setattr(lamport_channel, "SHARE_WITH_ROOM", limit // nbytes(64))
        found = []
        for some, sizes in ((True, [32]), (False, [8, 32, 16]), (True, [16, 64, 128])):
            leave(some)
            found += [(kib, way(kib)) for kib in sizes]
        assert comm.workspace.limit - comm.workspace.room >= nbytes(64)
        return found


def tuned(ctx):
    with iris.iris(4 * MIB) as own, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lamport_channel, "SHARE_OF_WORKSPACE", 1 << 40)
        patch.setattr(lamport_channel, "ROOM_LEFT", 1)
        own.ccl.barrier()  # the first one is in no capture
        table, found = own.ccl.communicator().table, {"all_reduce": {}}
        tune.measure(own, found, ["all_reduce"], 8 << 10, None, table, lambda line: None)
        return {variant for variant, _ in found["all_reduce"][8 << 10]}


@pytest.mark.thorough
def test_what_has_no_room_is_not_tuned(ranks):
    assert ranks.run(tuned) == ranks.num_ranks * [{"two_shot", "pull"}]


def test_who_was_first_decides_for_all_that_follow(ranks):
    pushed, pulled = "two_shot_push", "pull"
    assert ranks.run(decided) == ranks.num_ranks * [
        [(32, pushed),
         # Without room: what always may be, what is there already, and a new one.
         (8, pushed), (32, pushed), (16, pulled),
         # With room: what was refused, a new one, and one that is too large.
         (16, pulled), (64, pushed), (128, pulled)]
    ]  # fmt: skip
