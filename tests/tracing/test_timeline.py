"""Recordings of ranks become one timeline: clocks, causes, tracks, and what it adds up to."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from iris.language.trace_buffer import FORMS, NAMES, WORDS
from iris.tracing import chrome
from iris.tracing.clock import Comparison, ahead, common
from iris.tracing.host_clocks import HostClock
from iris.tracing.rank_recording import Recording, Space
from iris.tracing.summary import moves, overlaps, show, traffic, waiting
from iris.tracing.timeline import assemble, length, merge_spans, overlap, tracks
from iris.world.rail import Transfer

BASE = 1 << 20
EXACT = Comparison(0, 0, 0)
HERE = HostClock("a", "a")


def row(
    name, began, ended, *, form="flag", program=0, context=1, target=0, at=0, size=4, value=0, result=0, after=None,
    looks=0,
):  # fmt: skip
    return [
        1000 * began, 1000 * ended, NAMES.index(name), FORMS.index(form), program + (context << 32), target, BASE + at,
        size, value, result, result if after is None else after, 0, 0, looks,
    ]  # fmt: skip


def recording(rank, rows, before=EXACT, after=EXACT, ranks=(0, 1), lost=0, device="cuda:0", host=HERE):
    space = Space("heap", BASE, 1 << 16, ranks)
    events = np.array(rows, dtype=np.int64).reshape(-1, WORDS.value)
    places = {address: ("int32[9]", f"byte {address}") for address in events[:, 6].tolist()}
    return Recording(rank, ranks, device, events, lost, (space,), places, before, after, host)


def causes(*recordings):
    """By wait, what ended it, each as (rank, when it began)."""
    timeline = assemble(recordings)
    events = timeline.events
    return {(events[b].rank, events[b].began): (events[a].rank, events[a].began) for a, b in timeline.flows}


def test_clocks_that_are_apart_and_drift_become_one():
    # Ahead by 500 at 10000, and by 1500 at 20000: it is too fast by a tenth.
    before, after = Comparison(10_000, 500, 3), Comparison(20_000, 1500, 7)
    assert common(np.array([10_000, 15_000, 20_000]), before, after).tolist() == [9500, 14_000, 18_500]
    assert common(np.array([10_000]), before, before).tolist() == [9500]
    timeline = assemble([recording(0, []), recording(1, [row("load", 10, 20)], before, after)])
    assert timeline.clock_error == {0: 0.0, 1: 0.007}
    # Outside of both comparisons it is not so sure: at 30000 as far again as from one to the other.
    later = assemble([recording(1, [row("load", 30, 40)], before, after, device="cuda:1")])
    assert later.clock_error == {1: pytest.approx(0.003 + 2 * 0.007)}


def test_the_clock_of_a_host_comes_on_top_of_those_within_it():
    """Rank 3 is ahead of its host's first rank by 500 ns, and that one of the first host by 2 ms, and it is faster."""
    within = Comparison(0, 500, 3)
    host = HostClock("b", "b", (Comparison(0, 2_000_000, 40), Comparison(10**6, 2_001_000, 70)))
    sent, came = (
        Transfer("all_gather", "a call", "0", (1,), (8,), (1,), (8,)),
        Transfer("all_gather", "a call", "0", (3,), (8,), (3,), (8,)),
    )
    first, ranks = HostClock("a", "a", (EXACT, EXACT)), (0, 1, 2, 3)
    there = replace(
        recording(3, [], within, within, ranks, host=host),
        transfers=np.array([[500, 500_500, 0], [1_000_500, 0, 0]]),
        described=(sent,),
    )
    here = replace(
        recording(1, [row("load", -2000, 1)], ranks=ranks, host=first),
        transfers=np.array([[-(10**6), -999_000, 0]]),
        described=(came,),
    )
    timeline = assemble([there, here])
    rails = [event for event in timeline.events if event.transfer]
    # From the first event on, at -2 ms, in microseconds.
    assert [(event.rank, event.began, event.ended, event.unfinished) for event in rails] == [
        (1, 1000, 1001, False),
        (3, 0, 499.5, False),
        (3, 999, 999, True),
    ]
    assert [(event.row, event.target, event.bytes, event.is_wait) for event in rails][1:] == [("rail", 1, 8, False)] * 2
    assert timeline.clock_error == pytest.approx({3: 0.073, 1: 0.0}) and timeline.of_rank(3).hosts == {3: host}


def ahead_by(us, error=0):
    """A clock that was ahead by so much at both comparisons, at 0 and at 1 ms of its own."""
    return Comparison(0, 1000 * us, 1000 * error), Comparison(10**6, 1000 * us, 1000 * error)


def test_recordings_of_several_contexts_are_on_the_clock_of_the_first_rank():
    """Ranks 2 and 3 of host b have a context of their own, by the clock of rank 2. All ranks have another one."""
    first = HostClock("a", "alpha", (EXACT, EXACT))
    second, alone = HostClock("b", "beta", ahead_by(5000, 2)), HostClock("b", "beta")
    everyone = [
        recording(0, [row("load", 100, 101)], ranks=(0, 1, 2, 3), device="cuda:0", host=first),
        recording(2, [], *ahead_by(0), ranks=(0, 1, 2, 3), device="cuda:0", host=second),
        recording(3, [], *ahead_by(30, 1), ranks=(0, 1, 2, 3), device="cuda:1", host=second),
    ]
    own = [
        # At 120 µs of rank 0: 5 ms later by the clock of rank 2, and 5.03 ms by that of rank 3.
        recording(2, [row("load", 5120, 5121)], *ahead_by(0), ranks=(2, 3), device="cuda:0", host=alone),
        recording(3, [row("load", 5150, 5151)], *ahead_by(30, 50), ranks=(2, 3), device="cuda:1", host=alone),
    ]
    for recordings in (everyone + own, own + everyone):
        timeline = assemble(recordings)
        assert [(event.rank, event.began) for event in timeline.events] == [(0, 0), (2, 20), (3, 20)]
        # By what all ranks have compared, extrapolated to 5 ms; and not by way of rank 2, which is less exact.
        assert timeline.clock_error == pytest.approx({0: 0, 2: 2 * 9.24, 3: 9.3 + 2 * 9.24}) and not timeline.apart
        assert timeline.reference == 0 and {rank: host.name for rank, host in timeline.hosts.items()} == {
            0: "alpha",
            2: "beta",
            3: "beta",
        }
        assert all(timeline.hosts[rank].compared == second.compared for rank in (2, 3))
    # Rank 3 is in no context with rank 0, and so on the way by rank 2.
    timeline = assemble([*everyone[:2], *own])
    assert [(event.rank, event.began) for event in timeline.events] == [(0, 0), (2, 20), (3, 20)]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_clocks_that_no_context_has_compared_are_said_to_be_apart(device):
    hosts = [HostClock(name, name) for name in "aab"]
    recordings = [
        recording(0, [row("load", 100, 110)], ranks=(0, 1), device=device, host=hosts[0]),
        recording(1, [row("load", 130, 140)], ranks=(0, 1), device=device, host=hosts[1]),
        recording(5, [row("load", 9000, 9001)], ranks=(5,), device=device, host=hosts[2]),
    ]
    timeline = assemble(recordings)
    assert [(event.rank, event.began) for event in timeline.events] == [(0, 0), (1, 30), (5, 0)]
    assert timeline.apart == ((5,),) and timeline.clock_error == {0: 0, 1: 0, 5: math.inf}
    console = Console(file=io.StringIO(), width=200)
    show(timeline, console)
    assert "compared the clocks of rank 5 with that of rank 0" in console.file.getvalue()
    assert "All ranks read one clock" not in console.file.getvalue()
    about = chrome._about(timeline)
    assert about["clock_error_us"] == {0: 0, 1: 0, 5: None} and about["clocks_not_compared"] == ((5,),)


def test_simulated_ranks_of_a_host_read_one_clock_whatever_their_contexts_are():
    """On GPUs, those of two contexts that have no rank in common do not."""
    groups = ((0, 1), (2, 3))
    for device, apart in (("cpu", ()), ("cuda:0", ((2,),))):
        each = [recording(ranks[0], [row("load", 10 * ranks[0], 50)], ranks=ranks, device=device) for ranks in groups]
        timeline = assemble(each)
        assert timeline.apart == apart and not timeline.hosts
        assert [event.began for event in timeline.events] == [0, 0 if apart else 20]


def test_hosts_are_the_worlds_whatever_number_a_context_gives_them():
    """Contexts of ranks (2, 4) and of (4, 6), on hosts b and c, and c and d: by their numbers, hosts 0 and 1 each."""
    clocks = {key: HostClock(key, key, (EXACT, EXACT)) for key in "bcd"}
    recordings = [
        recording(rank, [row("load", rank, 9, target=1, at=-BASE)], ranks=ranks, device="cuda:0", host=clocks[key])
        for ranks in ((2, 4), (4, 6))
        for rank, key in zip(ranks, "bc" if ranks[0] == 2 else "cd", strict=True)
    ]
    timeline = assemble(recordings)
    assert [(host["name"], host["ranks"]) for host in chrome._about(timeline)["hosts"]] == [
        ("b", [2]),
        ("c", [4]),
        ("d", [6]),
    ]
    # Nor is a rank what a kernel calls it, where its address is in no memory that is known.
    assert {(event.rank, event.target) for event in timeline.events} == {(2, 4), (4, 4), (4, 6), (6, 6)}


@pytest.mark.parametrize("early", [-300, 0, 4000])
@pytest.mark.parametrize("offset", [-700, 0, 12_345])
def test_hosts_that_exchange_a_byte_find_how_far_their_clocks_are_apart(offset, early):
    """One begins ``early``; both have both bytes 50 ns after the later one began. A worse exchange does not count."""
    begin = np.array([[0, max(0, -early) + 50], [9000, 99999]])
    other = np.array([[-early, max(0, -early) + 50], [9000, 99999]]) + offset
    found = ahead(begin, other[:, ::-1])
    assert abs(found.ahead_ns - offset) <= found.error_ns == 50 + abs(early) / 2


@pytest.mark.parametrize("offset", [-700, 0, 12_345])
def test_the_shortest_exchange_tells_how_far_clocks_are_apart(offset):
    # t0 and t3 of the leader; under way for 100 + 140, 20 + 20, 30 + 10.
    leader = np.array([[0, 250], [1000, 1050], [2000, 2045]])
    follower = np.array([[100, 110], [1020, 1030], [2030, 2035]]) + offset
    found = ahead(leader, follower)
    assert found.error_ns == 20 and abs(found.ahead_ns - offset) <= found.error_ns
    assert found.ahead_ns == offset


def test_a_wait_was_ended_by_who_set_the_flag_to_what_was_seen():
    sender = recording(0, [row("signal", t, t + 1, target=1, value=v, result=v) for t, v in ((0, 1), (10, 2), (20, 1))])
    waiter = recording(1, [row("wait", 5, 12, target=1, value=2, result=2), row("wait", 13, 24, target=1, result=1)])
    assert causes(sender, waiter) == {(1, 5): (0, 10), (1, 13): (0, 20)}


def test_a_signal_of_another_flag_or_rank_or_later_is_no_cause():
    others = [
        row("signal", 0, 1, target=1, at=4, result=1),
        row("signal", 1, 2, target=0, result=1),
        row("signal", 30, 31, target=1, result=1),
    ]
    assert causes(recording(0, others), recording(1, [row("wait", 5, 12, target=1, value=1, result=1)])) == {}


@pytest.mark.parametrize(("form", "shift"), [("whole", 0), ("high", 32), ("low", 0)])
@pytest.mark.parametrize("start", [0, (1 << 31) - 2])
def test_a_count_that_was_reached_was_so_by_the_first_that_is_enough(form, shift, start):
    def signed(value, bits):
        return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)

    counts = [start + i for i in range(1, 5)]
    sent = [row("signal", 10 * i, 10 * i + 1, target=1, result=signed(c << shift, 64)) for i, c in enumerate(counts)]
    wanted = signed(counts[2], 32)
    waits = [row("wait", 5, 35, form=form, target=0, value=wanted, result=wanted)]
    assert causes(recording(0, sent), recording(1, waits)) == {(1, 5): (0, 20)}


def test_ranks_of_a_group_are_those_of_the_world():
    sender = recording(3, [row("signal", 0, 1, target=1, result=1)], ranks=(3, 5))
    waiter = recording(5, [row("wait", 0, 2, target=1, value=1, result=1)], ranks=(3, 5))
    assert causes(sender, waiter) == {(5, 0): (3, 0)}


def test_several_looks_are_a_wait_and_one_is_none():
    mine = [
        row("atomic_cas", 0, 3, target=1, value=0, result=0, after=1, looks=3),
        row("atomic_cas", 10, 11, target=1, value=0, result=0, after=1),
        row("atomic_cas", 20, 22, target=1, value=0, result=0, after=1, looks=2),
    ]
    other = [row("atomic_xchg", t, t + 1, target=1, result=1, after=0) for t in (1, 9, 20)]
    timeline = assemble([recording(0, mine), recording(1, other)])
    assert [event.name for event in timeline.events if event.rank == 0] == ["wait", "atomic_cas", "wait"]
    assert [timeline.events[cause].began for cause, _ in timeline.flows] == [1, 20]


def test_a_barrier_with_flags_that_start_again_is_another_one():
    def meetings(rank, *begins):
        return recording(rank, [row("barrier", t, t + 5, form="meeting", target=rank, after=1) for t in begins])

    assert causes(meetings(0, 0, 22), meetings(1, 1, 20)) == {(0, 0): (1, 1), (1, 20): (0, 22)}


def test_a_wait_that_the_kernel_has_named_is_no_other_one():
    rows = [row("wait", 0, 10, form="named", target=0), row("wait", 1, 9, target=0, value=1, result=1)]
    timeline = assemble([recording(0, [*rows, row("signal", 8, 9, target=0, after=1, program=1)])])
    assert [each.us for each in waiting(timeline)] == [8]
    assert len(timeline.flows) == 1


def test_of_equal_signals_the_one_before_the_end_is_the_cause():
    sender = recording(0, [row("signal", t, t + 1, target=1, result=1) for t in (0, 12)])
    late = Comparison(0, 0, 3_000)
    waiter = recording(1, [row("wait", 0, 11, target=1, value=1, result=1)], late, late)
    assert causes(sender, waiter) == {(1, 0): (0, 0)}


def test_what_happens_at_the_same_time_is_on_tracks_of_its_own():
    spans = [(0, 10), (1, 4), (2, 3), (5, 12), (6, 11), (12, 13)]
    timeline = assemble([recording(0, [row("put", *span, form="move") for span in spans])])
    assert tracks(timeline.events) == [0, 0, 0, 1, 1, 0]


def test_kernels_that_run_at_the_same_time_are_on_tracks_of_their_own():
    launches = [(1, (0, 10)), (2, (2, 3)), (2, (4, 20)), (1, (11, 12)), (3, (13, 14)), (2, (21, 22)), (4, (30, 31))]
    timeline = assemble([recording(0, [row("put", *span, form="move", context=c) for c, span in launches])])
    # The second begins within the first, and the third when that is over.
    assert tracks(timeline.events) == [0, 1, 1, 0, 0, 1, 0]


def test_spans_of_time_are_united():
    union = merge_spans([(5, 7), (0, 2), (1, 3), (7, 8), (6, 6.5)])
    assert union.tolist() == [[0, 3], [5, 8]] and length(union) == 6
    none = merge_spans([])
    assert overlap(union, merge_spans([(2, 6)])) == 2 and length(none) == overlap(union, none) == 0


def test_bytes_between_ranks_are_counted_once():
    rows = [
        row("put", 0, 10, form="named", target=1, size=4096),
        row("store", 1, 3, form="move", target=1, size=1000),
        row("store", 4, 9, form="move", target=1, size=3000),
        row("put", 20, 30, form="named", target=1, size=500),
        row("signal", 25, 26, target=1, size=4),
        row("store", 21, 22, form="move", target=1, size=7, context=2),
        row("load", 40, 50, form="move", target=1, size=64),
        row("store", 60, 70, form="move", target=0, size=999),
    ]
    timeline = assemble([recording(0, rows), recording(1, [])])
    assert [event.bytes for event in moves(timeline)] == [1000, 3000, 500, 7, 4, 64]
    out, back = traffic(timeline)
    assert (out.source, out.target, out.bytes, out.us) == (0, 1, 4511, 17)
    assert out.gbps == pytest.approx(4511 / 17e3)
    assert (back.source, back.target, back.bytes, back.us) == (1, 0, 64, 10)


def test_time_waiting_and_overlap_add_up():
    rows = [
        row("compute", 0, 10, form="named", target=-1, size=0),
        row("store", 8, 14, form="move", program=1, target=1),
        row("wait", 0, 5, program=2, at=8, result=1),
        row("wait", 5, 20, program=2, at=12, result=1),
        row("barrier", 20, 21, form="meeting", program=2, at=16),
    ]
    timeline = assemble([recording(0, rows)])
    (waits, barriers) = waiting(timeline)
    assert (waits.what, waits.flags, waits.times, waits.us, waits.longest_us) == ("wait: int32[9]", 2, 2, 20, 15)
    assert (barriers.what, barriers.us) == ("barrier: int32[9]", 1)
    (mine,) = overlaps(timeline)
    assert (mine.compute_us, mine.communication_us, mine.both_us) == (10, 6, 2)


def test_an_event_without_an_end_is_said_to_have_none():
    (event,) = assemble([recording(0, [row("put", 5, 0, form="move", target=1)])]).events
    assert event.unfinished and event.began == event.ended == 0
