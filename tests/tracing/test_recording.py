"""ctx.tracing: what kernels did is recorded, on one clock, and nothing that they did not do."""

import json

import pytest
import torch
import triton
from covering import thorough

import iris
from iris.errors import InvalidCountError, NotTracingError, PeerFailedError
from iris.language.trace_buffer import HEADER, ROOM, WORDS
from tracing.traced_kernels import KERNELS, LOOKED, LOOKS, NAMES, polls, scatter

PROGRAMS, BLOCK = 3, 128


def launch(ctx, language, n, traced=True, times=1):
    box = ctx.zeros(3 * PROGRAMS * BLOCK)
    flags = ctx.zeros(24, dtype=torch.int32)
    meetings = ctx.zeros(PROGRAMS, ctx.get_num_ranks(), dtype=torch.int32)
    ctx.barrier()
    for _ in range(times):
        KERNELS[language][(PROGRAMS,)](ctx.get_device_context(), box, flags, meetings, n, BLOCK, traced, num_warps=4)
    ctx.barrier()


def everything(ctx, language, n):
    ctx.tracing.enable(max_events=1000)
    launch(ctx, language, n)
    timeline = ctx.tracing.timeline()
    ctx.barrier()
    return timeline


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("language", KERNELS)
def test_events_are_what_the_kernel_did(ranks, language):
    n = 100
    for timeline in ranks.run(everything, language, n):
        size = len(timeline.devices)
        programs = [(rank, program) for rank in range(size) for program in range(PROGRAMS)]
        of = {each: [e for e in timeline.events if (e.rank, e.program) == each] for each in programs}
        for (rank, program), events in of.items():
            # An event around another one began before it, and ended after it.
            copies = ["get", "put"] if size > 1 else ["get", "get"]
            assert [event.name for event in events] == [*NAMES[:-3], *copies, NAMES[-1]]
            compute, put, store, signal, wait, load, add, cas, exchange, get, put_back, barrier = events
            peer = (rank + 1) % size
            assert {event.target for event in (put, store, signal, load, add, cas)} == {peer}
            assert compute.target is None and wait.target == rank
            assert put.bytes == store.bytes == load.bytes == 4 * n
            assert (compute.pid_m, compute.pid_n, put.pid_m, put.pid_n) == (program, 7, program, 1)
            assert put.began <= store.began <= store.ended <= put.ended
            assert (signal.value, signal.after, wait.value, wait.seen) == (1, 1, 1, 1)
            assert (add.value, add.seen, add.after) == (5, 0, 5)
            assert (cas.value, cas.seen, cas.after) == (3, 0, 0)
            assert (exchange.seen, exchange.after) == (0, 9) and barrier.after == 1
            assert get.name == "get" and get.target == peer and get.bytes == put_back.bytes == 4 * n
            assert signal.thing == wait.thing == "int32[24]" and wait.part.startswith(f"element {program} ")
            assert all(before.ended <= after.began for before, after in zip(events[2:], events[3:], strict=False))
            assert all(event.ended >= event.began >= 0 and not event.unfinished for event in events)
        assert min(event.began for event in timeline.events) == 0


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("language", KERNELS)
def test_each_wait_has_a_flow_from_the_signal_that_ended_it(ranks, language):
    for timeline in ranks.run(everything, language, 1):
        size = len(timeline.devices)
        slack = 2 * max(timeline.clock_error.values())
        flows = [(timeline.events[cause], timeline.events[effect]) for cause, effect in timeline.flows]
        signalled = [(cause, wait) for cause, wait in flows if wait.name == "wait"]
        assert len(signalled) == size * PROGRAMS
        for cause, wait in signalled:
            assert cause.name == "signal" and cause.target == wait.rank and cause.program == wait.program
            assert cause.began <= wait.ended + slack
        met = [(cause, other) for cause, other in flows if other.name == "barrier"]
        assert len(met) == (size - 1) * PROGRAMS
        for cause, other in met:
            peers = [e for e in timeline.events if e.name == "barrier" and e.program == cause.program]
            assert cause.began == max(event.began for event in peers) and cause.rank != other.rank


def by_hand(ctx, rounds):
    flags = ctx.zeros(ctx.get_num_ranks(), dtype=torch.int32)
    ctx.tracing.enable()
    ctx.barrier()
    partner = ctx.get_rank() ^ 1
    for round in range(1, rounds + 1) if partner < ctx.get_num_ranks() else ():
        polls[(1,)](ctx.get_device_context(), flags, ctx.get_rank(), partner, round)
    return ctx.tracing.timeline()


def test_looks_at_a_flag_by_atomics_are_a_wait(ranks):
    rounds = 4
    for timeline in ranks.run(by_hand, rounds):
        for rank in range(len(timeline.devices) // 2 * 2):
            events = [event for event in timeline.events if event.rank == rank]
            assert len(events) >= 2 * rounds
            # The peer may have been there before, and one look is no wait; or have been ahead.
            assert {event.name for event in events[::2]} == {"atomic_xchg"}
            assert {event.name for event in events[1::2]} <= {"atomic_add", "wait"}
            assert all(event.seen >= round for round, event in enumerate(events[1::2], 1))
        waits = [i for i, event in enumerate(timeline.events) if event.name == "wait"]
        assert waits == [effect for _, effect in sorted(timeline.flows, key=lambda flow: flow[1])]
        assert all(timeline.events[cause].rank != timeline.events[wait].rank for cause, wait in timeline.flows)


def looked(ctx, language):
    flags = ctx.zeros(PROGRAMS, dtype=torch.int32)
    # Room for what there is, and not for every look.
    ctx.tracing.enable(max_events=PROGRAMS * len(LOOKED))
    LOOKS[language][(PROGRAMS,)](ctx.get_device_context(), flags, num_warps=4)
    return ctx.tracing.timeline()


@pytest.mark.parametrize("language", ["triton", thorough("gluon")])
def test_looks_at_a_flag_are_a_wait_until_one_sees_something_else(ranks, language):
    for timeline in ranks.run(looked, language):
        assert set(timeline.lost.values()) == {0}
        for rank in timeline.devices:
            for program in range(PROGRAMS):
                events = [event for event in timeline.events if (event.rank, event.program) == (rank, program)]
                assert [(event.name, event.value, event.seen) for event in events] == LOOKED
                assert all(a.ended <= b.began for a, b in zip(events, events[1:], strict=False))


def to_all(ctx, n):
    box = ctx.zeros(ctx.get_num_ranks() * 64, dtype=torch.int32)
    ctx.tracing.enable()
    ctx.barrier()
    scatter[(1,)](ctx.get_device_context(), box, n, triton.next_power_of_2(ctx.get_num_ranks()), 64)
    ctx.barrier()
    return ctx.tracing.timeline()


@pytest.mark.ranks(3)
def test_what_goes_to_a_block_of_ranks_is_one_event(ranks):
    for timeline in ranks.run(to_all, 50):
        size = len(timeline.devices)
        assert [(event.bytes, event.target) for event in timeline.events] == [
            (4 * 50 * size, -2 if size > 1 else 0)
        ] * size


def too_many(ctx):
    ctx.tracing.enable(max_events=10)
    launch(ctx, "triton", 8)
    timeline = ctx.tracing.timeline()
    # The same into memory that goes on past the room for ten.
    buffer = torch.zeros(HEADER.value + 100 * WORDS.value, dtype=torch.int64, device=ctx.device)
    buffer[ROOM.value] = 10
    ctx._record.trace_into(buffer)
    launch(ctx, "triton", 8)
    ctx.tracing.enable()
    rows = buffer[HEADER.value :].view(-1, WORDS.value)
    return timeline, rows.any(dim=1).tolist()


def test_events_that_do_not_fit_are_counted(ranks):
    for timeline, written in ranks.run(too_many):
        expected = PROGRAMS * len(NAMES) - 10
        assert timeline.lost == dict.fromkeys(timeline.devices, expected)
        assert len(timeline.events) == 10 * len(timeline.devices)
        assert written == [True] * 10 + [False] * 90


def in_turn(_):
    with iris.iris(1 << 20) as ctx:
        return counts_in_turn(ctx)


def counts_in_turn(ctx):
    counts = []

    def count():
        counts.append(len(ctx.tracing.recording().events))

    with pytest.raises(NotTracingError, match="enable"):
        ctx.tracing.export()
    # A kernel that is traced, and nobody has asked for it.
    launch(ctx, "triton", 8)
    ctx.tracing.enable()
    count()
    launch(ctx, "triton", 8, traced=False)
    count()
    launch(ctx, "gluon", 8)
    count()
    ctx.tracing.reset()
    count()
    launch(ctx, "triton", 8)
    count()
    ctx.tracing.enable(max_events=500)
    count()
    return counts


def test_only_what_was_asked_for_is_recorded(ranks):
    all_of_them = PROGRAMS * len(NAMES)
    for counts in ranks.run(in_turn):
        assert counts == [0, 0, all_of_them, 0, all_of_them, 0]


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_a_number_of_events_that_is_none_is_refused(ranks, number):
    ranks.run(refused, number)


def refused(ctx, number):
    with pytest.raises(InvalidCountError, match=f"max_events={number}"):
        ctx.tracing.enable(max_events=number)


def unwritable(ctx, file):
    ctx.tracing.enable()
    with pytest.raises(OSError if ctx.get_rank() == 0 else PeerFailedError, match="file"):
        ctx.tracing.export(f"{file}/trace.json", merge=True)
    return ctx.tracing.timeline().events


def test_a_file_that_cannot_be_written_stops_nobody(ranks, tmp_path):
    (tmp_path / "file").touch()
    assert all(events == [] for events in ranks.run(unwritable, str(tmp_path / "file")))


def exported(ctx, folder, merge):
    ctx.tracing.enable()
    launch(ctx, "triton", 8)
    path = ctx.tracing.export(f"{folder}/deep/trace.json", merge=merge)
    ctx.barrier()
    return str(path), json.loads(path.read_text())


@pytest.mark.ranks(1, 3)
def test_a_file_for_all_ranks_or_one_for_each(ranks, tmp_path):
    merged = ranks.run(exported, str(tmp_path), True)
    alone = ranks.run(exported, str(tmp_path), False)
    size = len(merged)
    assert len({path for path, _ in merged}) == 1 and len({path for path, _ in alone}) == size
    slices = [event for event in merged[0][1]["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(size))
    for rank, (path, trace) in enumerate(alone):
        assert path.endswith(f"deep/trace.rank{rank}.json" if size > 1 else "deep/trace.json")
        mine = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert {event["pid"] for event in mine} == {rank} and len(mine) == PROGRAMS * len(NAMES)
