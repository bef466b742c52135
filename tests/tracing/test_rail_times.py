"""How transfers between hosts are timed on a GPU: its kernels in the simulator, with streams that do nothing."""

import contextlib
import gc
import threading
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from iris import simulator
from iris.tracing import rail_times
from iris.world.rail import Transfer

pytestmark = pytest.mark.skipif(not simulator.ACTIVE, reason="on GPUs the streams are real: test_over_hosts.py")
CPU = torch.device("cpu")


class Stream:
    """Of what a stream is asked to do, only the order is of interest."""

    def __init__(self, *_, **__):
        self.waited_for = []

    def synchronize(self):
        pass

    def wait_stream(self, other):
        self.waited_for.append(other)


@contextlib.contextmanager
def stand_ins(capturing=False):
    current = Stream()
    with (
        mock.patch.object(torch.cuda, "Stream", Stream),
        mock.patch.object(torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", lambda _: current),
        mock.patch.object(rail_times, "is_current_stream_capturing", lambda: capturing),
    ):
        yield current


def transfer(number, rail="0"):
    return Transfer("all_gather", f"call {number}", rail, (1,), (8,), (1,), (8,))


def run(times, which, log=None):
    """A transfer; ``log`` takes down its number when it starts, and when it was waited for."""
    log = [] if log is None else log
    work = SimpleNamespace(wait=lambda: log.append(("waited", which)))
    start, join = times.timed(transfer(which), lambda: log.append(("started", which)) or work)
    assert start() is work
    join()


def test_each_transfer_has_a_row_and_each_kind_a_number():
    with stand_ins():
        times, log = rail_times.StreamTimes(CPU), []
        for which in (3, 4, 3):
            run(times, which, log)
        assert log == [(what, which) for which in (3, 4, 3) for what in ("started", "waited")]
        rows, described, lost = times.recorded()
        assert rows[:, 2].tolist() == [0, 1, 0] and described == (transfer(3), transfer(4)) and lost == 0
        flat = rows[:, :2].flatten().tolist()
        assert flat == sorted(flat) and flat[0] > 0
        times.forget()
        run(times, 5)
        rows, described, _ = times.recorded()
        assert rows[:, 2].tolist() == [0] and described == (transfer(5),)


def test_a_transfer_that_is_under_way_has_no_end():
    with stand_ins():
        times = rail_times.StreamTimes(CPU)
        run(times, 0)
        start, _ = times.timed(transfer(1), lambda: None)
        start()
        rows, _, _ = times.recorded()
        assert rows[0, 1] >= rows[0, 0] > 0 and rows[1, 0] > 0 and rows[1, 1] == 0


def both():
    return rail_times.StreamTimes(CPU), rail_times.HostTimes()


def test_what_has_no_room_is_counted():
    with mock.patch.object(rail_times, "ROOM", 2), stand_ins():
        for times in both():
            for which in range(5):
                _, noted = times.timed(transfer(which), lambda: None)
                noted()
            rows, described, lost = times.recorded()
            assert rows[:, 2].tolist() == [0, 1] and described == (transfer(0), transfer(1)) and lost == 3


class Slow(Transfer):
    """While it is looked up, other threads get to run."""

    def __hash__(self):
        time.sleep(0.002)
        return super().__hash__()


def test_transfers_of_two_threads_have_numbers_of_their_own():
    with stand_ins():
        for times in both():

            def send(thread, times=times):
                for which in range(5):
                    _, noted = times.timed(Slow(*transfer(10 * thread + which)), lambda: None)
                    noted()

            threads = [threading.Thread(target=send, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rows, described, _ = times.recorded()
            assert len(rows) == 10
            found = [described[number].call for number in rows[:, 2]]
            assert sorted(found) == sorted(f"call {10 * thread + which}" for thread in range(2) for which in range(5))


def held(times):
    """Which transfers are described still."""
    return sorted(int(each.call.split()[1]) for each in times._described.values())


def test_a_long_program_keeps_what_can_have_a_row_and_no_more():
    with (
        mock.patch.object(rail_times, "ROOM", 6),
        mock.patch.object(rail_times, "UNDER_WAY", 3),
        stand_ins(),
    ):
        times = rail_times.StreamTimes(CPU)
        for which in range(1000):
            run(times, which)
        assert held(times) == list(range(9))
        rows, described, lost = times.recorded()
        assert [described[number] for number in rows[:, 2]] == [transfer(which) for which in range(6)] and lost == 994
        times.forget()
        for which in range(2000, 2005):
            run(times, which)
        assert held(times) == list(range(2000, 2005))
        times.forget()  # the last ones may be under way on streams that did not wait for it
        assert held(times) == [2002, 2003, 2004]
        times.forget(idle=True)
        assert held(times) == []


def test_what_is_under_way_while_others_are_forgotten_means_what_it_did():
    """A number is never that of two transfers: here of one that begins late, and of one after it."""
    with stand_ins():
        times, late = rail_times.StreamTimes(CPU), []
        begin = times._begin
        with mock.patch.object(times, "_begin", lambda *args: late.append(args)):
            times.timed(transfer(1), lambda: None)
        times.forget()
        run(times, 2)
        begin(*late.pop())
        rows, described, _ = times.recorded()
        assert [described[number] for number in rows[:, 2]] == [transfer(2), transfer(1)]


def replay(times, captured):
    """What a graph does each time: the kernels with the arguments that they were captured with."""
    for kernel, args in captured:
        kernel(times, *args)


def capture(times, *which):
    """The kernels of these transfers, all of which begin before any ends."""
    kernels, found = (rail_times.StreamTimes._begin, rail_times.StreamTimes._end), []
    with stand_ins(capturing=True) as current:
        with (
            mock.patch.object(times, "_begin", lambda *args: found.append((kernels[0], args))),
            mock.patch.object(times, "_end", lambda *args: found.append((kernels[1], args))),
        ):
            work = SimpleNamespace(wait=lambda: None)
            timed = [times.timed(transfer(each), lambda: work) for each in which]
            for start, join in timed:
                start()
                join()
    # A capture ends on the stream on which it began.
    assert current.waited_for == [times._wait_streams["0"]] * len(which)
    return found


def test_each_replay_of_a_graph_beside_calls_that_are_no_part_of_it_has_rows_of_its_own():
    with stand_ins() as current:
        times = rail_times.StreamTimes(CPU)
        graph = capture(times, 7, 8)
        for _ in range(2):
            run(times, 1)
            replay(times, graph)
        rows, described, _ = times.recorded()
        assert [described[number] for number in rows[:, 2]] == [transfer(each) for each in (1, 7, 8) * 2]
        assert (rows[:, 1] >= rows[:, 0]).all()
        assert not current.waited_for
        rail_times._in_graphs.clear()


def test_what_a_graph_was_captured_with_is_kept_while_a_graph_lives():
    with stand_ins():
        times = rail_times.StreamTimes(CPU)
        graph = capture(times, 7, 8)
        with mock.patch.object(rail_times, "a_graph_lives", lambda: True):
            for which in range(5):
                run(times, which)
                times.forget(idle=True)
            assert held(times) == [7, 8]
            replay(times, graph)
            rows, described, _ = times.recorded()
            assert [described[number] for number in rows[:, 2]] == [transfer(7), transfer(8)]
            # Also when its context is gone.
            words, alive = rail_times._in_graphs[times].places[0].data_ptr(), weakref.ref(times)
            assert graph[0][1][0].data_ptr() == words
            del times, graph
            gc.collect()
            assert alive() is not None
        other = rail_times.StreamTimes(CPU)
        other.forget(idle=True)
        gc.collect()
        assert alive() is None and not rail_times._in_graphs
