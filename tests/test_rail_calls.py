"""Ranks of a rail that make differing calls: who finds it, when, and what it says. Time is what a test says it is.

The ranks are objects of one process, each with a connection of its own to a server of torch's.
"""

import os
import subprocess
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from conftest import UNDER_TORCHRUN, import_path
from covering import thorough
from preloaded import LIMIT_S, python

from iris.errors import GroupAbortedError, MismatchedCollectiveError
from iris.world import inspection, rail_calls
from iris.world.rail_calls import BUSY_S, LONGEST_PAUSE_S, REMEMBERED, RailCalls

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="has ranks of its own")


class Store:
    """Counts what is asked of a store."""

    def __init__(self, store):
        self.below, self.asked = store, 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self.below, name)


class Group:
    """What a rail needs of one."""

    rank, ranks = 0, (1, 5, 9)

    def __init__(self, store):
        self.store, self.broken = Store(store), None

    def check(self):
        if self.broken:
            raise GroupAbortedError([0, 1], self.broken)

    def break_off(self, why):
        self.broken = why


@pytest.fixture(scope="module")
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.fixture
def make(server, request):
    """Makes the calls of so many ranks on one rail."""

    def make(count, rail="rail/0"):
        who = [f"rank {4 * place + 1} on host{place}" for place in range(count)]
        stores = [dist.PrefixStore(request.node.nodeid, server.clone()) for _ in who]
        ranks = [RailCalls(Group(store), rail, place, who) for place, store in enumerate(stores)]
        for rank in ranks:
            rank._since = rank._published_at = 0.0
        return ranks

    return make


def note(rank, *calls):
    for what, nbytes in calls:
        rank.note(what, nbytes)


def looks(rank, begin, seconds):
    """What a rank finds that looks every second, and has seen what there is at the first."""
    return [error for second in range(seconds) if (error := rank.look(begin + second)) is not None]


SAME = [("all_reduce() of float32", 64), ("device_barrier()", 2), ("a message from rank 1 to rank 5", 24)]


def test_ranks_that_make_the_same_calls_are_left_alone_however_late_they_are(make):
    ranks = make(3)
    for place, rank in enumerate(ranks):
        begin = 1000.0 * place
        note(rank, *SAME)
        assert not looks(rank, begin, 600)
    for rank in ranks:
        note(rank, *SAME)
        assert not looks(rank, 9000.0, 600)


DIFFERENT = {
    "words": ([("all_gather()", 64)], [("all_to_all()", 64)], "all_gather() of 64 bytes", "all_to_all() of 64 bytes"),
    "size": ([("all_gather()", 64)], [("all_gather()", 68)], "all_gather() of 64 bytes", "all_gather() of 68 bytes"),
    "order": (
        [("reduce()", 8), ("gather()", 4)],
        [("gather()", 4), ("reduce()", 8)],
        "reduce() of 8 bytes",
        "gather() of 4 bytes",
    ),
    "one call more": (
        [("scatter()", 4), ("gather()", 4)],
        [("scatter()", 4), ("scatter()", 4), ("gather()", 4)],
        "gather() of 4 bytes",
        "scatter() of 4 bytes",
    ),
}


@pytest.mark.parametrize("how", DIFFERENT)
def test_differing_calls_are_found_by_every_rank_and_named_with_rank_and_host(make, how):
    first, second, one, other = DIFFERENT[how]
    ranks = make(3)
    for rank, calls in zip(ranks, (first, second, first), strict=True):
        note(rank, *SAME, *calls)
    # The first to stand still looks again when the others have come to say theirs.
    found = [looks(rank, begin, 120) for rank, begin in ((ranks[0], 0.0), (ranks[1], 30.0), (ranks[2], 60.0))]
    found[0] += looks(ranks[0], 130.0, 60)
    text = f"The hosts do not make the same call: rank 1 on host0 calls {one}; rank 5 on host1 calls {other}"
    for place, errors in enumerate(found):
        assert errors and isinstance(errors[0], MismatchedCollectiveError)
        # The second knows nothing yet of the third, which is like the first.
        third = "" if place == 1 else f"; rank 9 on host2 calls {one}"
        assert str(errors[0]) == f"{text}{third}."


def test_nobody_is_found_wrong_who_has_not_come_yet(make):
    early, late = make(2)
    note(early, *SAME, ("all_gather()", 64))
    note(late, *SAME)
    assert not looks(early, 0.0, 300) and not looks(late, 0.0, 300)
    note(late, ("all_gather()", 65))
    (error, *_) = looks(late, 300.0, 60)
    assert "rank 1 on host0 calls all_gather() of 64 bytes; rank 5 on host1 calls all_gather() of 65" in str(error)
    assert looks(early, 300.0, int(LONGEST_PAUSE_S) + 1)


def test_the_first_call_that_differs_is_named_also_where_the_host_has_run_far_ahead(make):
    ranks = make(2)
    for place, rank in enumerate(ranks):
        for call in range(1000 * (place + 1)):
            rank.note("reduce_scatter()" if place and call == 41 else f"all_gather() {call % 7}", 64)
    for rank in ranks:
        looks(rank, 0.0, 15)
    for rank in ranks:
        (error, *_) = looks(rank, 15.0, 15)
        assert "calls all_gather() 6 of 64 bytes; rank 5 on host1 calls reduce_scatter() of 64 bytes" in str(error)


def test_rails_and_groups_are_compared_each_for_itself(make, server):
    for number, name in enumerate(("rail/0", "pair/0-5/up", "pair/0-5/down")):
        for rank in make(2, name):
            note(rank, (f"call {number}", number))
            assert not looks(rank, 0.0, 60)


def test_a_rail_that_does_not_stand_still_is_compared_now_and_then_with_the_next_rank(make):
    ranks, errors = make(3), {}
    for second in range(3 * int(BUSY_S)):
        for place, rank in enumerate(ranks):
            rank.note("gather()" if place == 2 and second == 70 else "scatter()", 8)
            error = rank.look(float(second))
            if error:
                errors.setdefault(place, second)
    # The neighbours 1 and 2 see it, and 2 and 0; and not before it has happened.
    assert errors.keys() == {1, 2} and min(errors.values()) >= 2 * BUSY_S


@pytest.mark.parametrize("other", ["still", "gone on", "absent"])
def test_a_rail_that_stands_still_asks_the_store_seldom(make, other):
    here, there = make(2)
    note(here, *SAME)
    note(there, *SAME[: 2 if other == "absent" else 3])
    if other != "absent":
        if other == "gone on":
            note(there, ("device_barrier()", 2))
        looks(there, 0.0, 30)
    before = here._group.store.asked
    assert not looks(here, 0.0, 3600)
    assert here._group.store.asked - before <= (100 if other == "absent" else 3)


def test_calls_are_kept_in_bounded_memory(make):
    ranks = make(2)
    for rank in ranks:
        for call in range(3 * REMEMBERED):
            rank.note("all_gather()", call)
    assert len(ranks[0]._noted) == REMEMBERED
    # The first ones are forgotten, and the last ones are known.
    assert not looks(ranks[0], 0.0, 30)
    assert len(ranks[0]._mine) == REMEMBERED and max(ranks[0]._mine) == 3 * REMEMBERED


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", '{"tuple": [1, [], []]}', '{"tuple": [1, ["a"], [3]]}', '{"tuple": ["a", ["b"], [0]]}']
)
def test_what_others_write_into_the_store_is_no_call(make, text):
    here, _ = make(2)
    note(here, *SAME)
    here._group.store.set("calls/rail/0/1", text)
    assert not looks(here, 0.0, 60)


# The thread -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Rails stand still after a fifth of a second, and whatever is found goes into the list."""
    found = []
    monkeypatch.setattr(rail_calls, "INTERVAL_S", 0.02)
    monkeypatch.setattr(rail_calls, "STILL_S", 0.2)
    monkeypatch.setattr(rail_calls, "listeners", [lambda calls, error: found.append((calls, str(error)))])
    return found


def await_(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def thread(quick):
    """The thread of this process that looks, for this test."""
    assert rail_calls._stop is None
    yield quick
    stop, rail_calls._stop = rail_calls._stop, None
    stop.set()


def test_one_thread_compares_all_rails_breaks_the_group_and_says_it_once(make, thread):
    wrong, right, broken = make(2), make(2, "rail/1"), make(2, "rail/2")
    for place in range(2):
        wrong[place].note("all_gather()", 8 + place)
        right[place].note("all_gather()", 8)
        broken[place].note("all_gather()", 8 + place)
        broken[place]._group.break_off("rank 1 has raised an error")
    closed = make(2, "rail/3")
    for place in range(2):
        closed[place].note("all_gather()", 8 + place)
        for rail in (wrong, right, broken, closed):
            rail_calls.watch(rail[place])
        closed[place].close()
    assert sum(each.name == "iris-rail-calls" for each in threading.enumerate()) == 1
    assert await_(lambda: len(thread) == 2)
    time.sleep(0.5)
    text = (
        "The hosts do not make the same call: rank 1 on host0 calls all_gather() of 8 bytes; rank 5 on host1 calls "
        "all_gather() of 9 bytes."
    )
    assert sorted(thread, key=lambda each: each[0]._place) == [(wrong[0], text), (wrong[1], text)]
    for rank in wrong:
        with pytest.raises(GroupAbortedError, match="The hosts do not make the same call"):
            rank._group.check()
    assert not right[0]._group.broken


def test_a_process_that_is_asked_says_where_it_is_and_who_has_not_come(make, thread):
    here, there = make(2)
    rail_calls.watch(here)
    note(there, *SAME[:2])
    looks(there, 0.0, 30)
    note(here, *SAME)
    lines = [
        "rail/0 has begun 3 calls, the last one a message from rank 1 to rank 5 of 24 bytes",
        "  rank 5 on host1 had begun 2, the last one device_barrier() of 2 bytes",
    ]
    assert await_(lambda: here.describe() == lines)
    answer = {**next(inspection.report()), "memory": list(rail_calls._reports()), "complete": True}
    text = "What the library has counted on rank 1, among ranks [1, 5, 9]"
    assert "\n".join([text, *(f"  {line}" for line in lines)]) in inspection.show(answer)


def test_a_store_that_is_gone_is_no_error(make, thread):
    lost, whole = make(2), make(2, "rail/1")
    gone = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = gone.clone()
    del gone
    lost[0]._group.store = client
    for place, rank in enumerate(whole):
        rank.note("all_gather()", place)
        rail_calls.watch(rank)
    lost[0].note("all_gather()", 8)
    rail_calls.watch(lost[0])
    assert await_(lambda: len(thread) == 2)


def test_a_forked_child_has_no_rails_and_may_make_its_own(make, thread):
    for rank in make(2):
        rail_calls.watch(rank)
    if (child := os.fork()) == 0:
        status = 1
        try:
            assert rail_calls._stop is None and not rail_calls._watched
            calls = RailCalls(Group(dist.HashStore()), "rail/0", 0, ["rank 0 on host0", "rank 1 on host1"])
            rail_calls.watch(calls)
            calls.note("all_gather()", 8)
            status = 0 if await_(lambda: calls._published == 1) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rail_calls._stop is not None


ENDING = """
import os, signal, subprocess, sys, time
import torch.distributed as dist
from iris.world import inspection, rail_calls
from test_rail_calls import Group

SERVER = '''
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
'''
server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
rail_calls.INTERVAL_S = rail_calls.STILL_S = rail_calls.SHARE = 0.0
rail_calls.STOP_LIMIT_S = 1.0
group = Group(store)
calls = rail_calls.RailCalls(group, "rail/0", 0, ["rank 0 on host0", "rank 1 on host1"])
calls.note("all_gather()", 8)
rail_calls.watch(calls)
while group.store.asked < 100:
    time.sleep(0.001)
if sys.argv[1] == "stopped":
    os.kill(server.pid, signal.SIGSTOP)
    time.sleep(0.1)
# The interpreter ends while the thread is in the store. The server is ended by another process.
subprocess.Popen(["sh", "-c", f"sleep 3; kill -9 {server.pid}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


@pytest.mark.parametrize("server", ["there", thorough("stopped")])
def test_a_process_ends_well_while_the_thread_looks(tmp_path, server):
    program = tmp_path / "ending.py"
    program.write_text(textwrap.dedent(ENDING))
    environment = {**os.environ, "PYTHONPATH": import_path(os.path.dirname(__file__)), "IRIS_SIMULATOR": "1"}
    begin = time.monotonic()
    result = subprocess.run(
        [*python(), str(program), server], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert time.monotonic() - begin < 60


def test_a_note_costs_the_call_next_to_nothing(make):
    (rank, _), many = make(2), 100_000
    best = min(_seconds(rank, many) for _ in range(5))
    # A third of a microsecond; the limit leaves room for a machine that is busy.
    assert best / many < 2e-6


def _seconds(rank, many):
    begin = time.perf_counter()
    for _ in range(many):
        rank.note("all_gather()", 8)
    return time.perf_counter() - begin
