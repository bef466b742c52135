"""How transfers between hosts are timed on a GPU: its kernels in the simulator, with streams that do nothing."""

import contextlib
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
        assert times.transfers == [transfer(3), transfer(4)]
        rows, lost = times.rows()
        assert rows[:, 2].tolist() == [0, 1, 0] and lost == 0
        flat = rows[:, :2].flatten().tolist()
        assert flat == sorted(flat) and flat[0] > 0
        times.forget()
        run(times, 5)
        rows, _ = times.rows()
        assert rows[:, 2].tolist() == [2] and len(times.transfers) == 3


def test_a_transfer_that_is_under_way_has_no_end():
    with stand_ins():
        times = rail_times.StreamTimes(CPU)
        run(times, 0)
        start, _ = times.timed(transfer(1), lambda: None)
        start()
        rows, _ = times.rows()
        assert rows[0, 1] >= rows[0, 0] > 0 and rows[1, 0] > 0 and rows[1, 1] == 0


def test_what_has_no_room_is_counted():
    with mock.patch.object(rail_times, "ROOM", 2), stand_ins():
        for times in (rail_times.StreamTimes(CPU), rail_times.HostTimes()):
            for which in range(5):
                _, noted = times.timed(transfer(which), lambda: None)
                noted()
            rows, lost = times.rows()
            assert rows[:, 2].tolist() == [0, 1] and lost == 3


def test_a_graph_keeps_its_own_word_and_ends_on_its_own_stream():
    """So each replay of it, beside calls that are no part of it, takes a row and ends the one that it has taken."""
    with stand_ins(capturing=True) as current:
        times = rail_times.StreamTimes(CPU)
        with mock.patch.object(rail_times, "_in_graphs", []) as kept:
            run(times, 0)
            run(times, 0)
            places = [place.data_ptr() for _, place in kept]
        assert len(set(places)) == 2 and current.waited_for == [times._sides["0"]] * 2
    with stand_ins() as current:
        run(times, 1)
        assert not current.waited_for
