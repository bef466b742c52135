"""The order in which notes are gone through: nobody acquires what has not been released yet. And where they end."""

import queue
import sys
import threading
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from iris import observer, sanitizer
from iris.observer import READ, UPDATE, WRITE
from iris.sanitizer import deadlock
from iris.sanitizer.analysis import Analysis
from iris.sanitizer.event_log import read_events
from iris.sanitizer.events import (
    HOST,
    Accessed,
    Awaiting,
    CollectiveDone,
    CollectiveEnter,
    Finished,
    Known,
    Launched,
    Place,
    ProxyFenced,
    Spans,
    Synchronised,
    Wait,
)
from iris.sanitizer.flags import Guarantees
from iris.simulator.lines import Line

DATA = Spans(("heap", 2), np.array([64]), np.array([128]))
FLAG = Spans(("heap", 2), np.array([0]), np.array([4]))
ANSWER = Spans(("heap", 0), np.array([0]), np.array([4]))


def begin(kernel):
    return [Known(0, Place(kernel, Line("program.py", 1, kernel))), Launched(1)]


def coming_to(*ranks, last=False):
    return [CollectiveEnter(("some", 0), last), Awaiting(("some", 0), ranks, 0, "a meeting", last)]


def meeting_of(*ranks):
    return [*coming_to(*ranks), CollectiveDone(("some", 0), ranks, len(ranks))]


def store_and_signal(number):
    flag = Synchronised(number, 1, 1, 0, FLAG, WRITE, releases=True, acquires=False, scope="sys")
    return [Accessed(1, 1, 0, DATA, WRITE), flag]


def wait_and_load(number):
    flag = Synchronised(number, 1, 1, 0, FLAG, READ, releases=False, acquires=True, scope="sys")
    return [flag, Accessed(1, 1, 0, DATA, READ)]


def test_ranks_that_come_from_a_meeting_of_some_may_release_before_others_acquire():
    meeting = meeting_of(0, 1)
    notes = {
        0: [*meeting, *begin("send"), *store_and_signal(1)],
        1: meeting,
        2: [*begin("receive"), *wait_and_load(2)],
    }
    assert Analysis(notes).run() == []


def test_a_kernel_of_another_thread_runs_while_the_host_waits():
    *comes, goes_on = meeting_of(0, 1, 2)
    notes = {
        0: [*comes, *begin("send"), *store_and_signal(1), goes_on],
        1: meeting_of(0, 1, 2),
        2: [*begin("receive"), *wait_and_load(2), *meeting_of(0, 1, 2)],
    }
    assert Analysis(notes).run() == []


def test_a_wait_that_ended_before_the_signal_orders_nothing():
    notes = {0: [*begin("send"), *store_and_signal(2)], 1: [], 2: [*begin("receive"), *wait_and_load(1)]}
    (finding,) = Analysis(notes).run()
    assert finding.kind == "race"


MORE = Spans(("heap", 2), np.array([128]), np.array([192]))


@pytest.mark.parametrize("wait, kinds", [
    (Wait("ge", 1, 32), ["race"]),
    (Wait("reached", 1, 32), ["race"]),
    (Wait("ge", 2, 32), []),
    (Wait("eq", 2, 32), []),
    (Wait("ge", 0, 32), ["race", "race"]),
    (None, []),
])  # fmt: skip
def test_a_wait_may_count_on_the_first_value_that_ends_it(wait, kinds):
    """Rank 0 stores, says 1, stores more, and says 2; that is what rank 2 sees when it looks, and reads both."""

    def say(number, value):
        how = {"releases": True, "acquires": False, "scope": "sys"}
        return Synchronised(number, 1, 1, 0, FLAG, WRITE, **how, before=value - 1, after=value)

    see = Synchronised(3, 1, 1, 0, FLAG, READ, releases=False, acquires=True, scope="sys", before=2, after=2, wait=wait)
    notes = {
        0: [*begin("send"), Accessed(1, 1, 0, DATA, WRITE), say(1, 1), Accessed(1, 1, 0, MORE, WRITE), say(2, 2)],
        2: [*begin("receive"), see, Accessed(1, 1, 0, DATA, READ), Accessed(1, 1, 0, MORE, READ)],
    }
    findings = Analysis(notes).run()
    assert [finding.kind for finding in findings for _ in range(finding.count)] == kinds, findings


@pytest.mark.parametrize("awaited", [0, 1, 500, 999])
def test_a_wait_may_count_on_a_value_of_long_ago(awaited):
    """Rank 0 stores and raises the flag, 1000 times; rank 2 comes when all is done, and waits for one of the first."""
    raised = 1000

    def chunk(number):
        return Spans(("heap", 2), np.array([64 + 4 * number]), np.array([68 + 4 * number]))

    def send():
        yield from begin("send")
        for number in range(raised):
            yield Accessed(1, 1, 0, chunk(number), WRITE)
            yield Synchronised(
                number, 1, 1, 0, FLAG, WRITE, releases=True, acquires=False, scope="sys", before=number,
                after=number + 1,
            )  # fmt: skip

    def receive():
        yield from begin("receive")
        yield Synchronised(
            raised, 1, 1, 0, FLAG, READ, releases=False, acquires=True, scope="sys", before=raised, after=raised,
            wait=Wait("ge", awaited + 1, 32),
        )  # fmt: skip
        for number in range(raised):
            yield Accessed(1, 1, 0, chunk(number), READ)

    findings = Analysis({0: send(), 2: receive()}).run()
    assert sum(finding.count for finding in findings) == raised - 1 - awaited


@pytest.mark.parametrize("seen, wait, found", [
    (1, Wait("ge", 1, 32), 1),
    (2, Wait("ge", 1, 32), 2),
    (2, Wait("ge", 2, 32), 2),
    (3, Wait("ge", 2, 32), 3),
    (3, Wait("ge", 3, 32), 0),
    (2, None, 2),
    (3, None, 0),
])  # fmt: skip
def test_a_count_of_several_says_how_many_and_not_who(seen, wait, found):
    """Three ranks store a part each and add 1, in no order. Rank 3 looks when it is ``seen``, and reads those parts."""

    def part(rank):
        return Spans(("heap", 2), np.array([64 + 4 * rank]), np.array([68 + 4 * rank]))

    def send(rank):
        # Whoever comes after the look does what those did that came before it.
        number = rank if rank < seen else rank + 1
        how = {"releases": True, "acquires": False, "scope": "sys", "adds": True}
        add = Synchronised(number, 1, 1, 0, FLAG, UPDATE, **how, before=rank, after=rank + 1)
        return [*begin("send"), Accessed(1, 1, 0, part(rank), WRITE), add]

    look = Synchronised(
        seen, 1, 1, 0, FLAG, READ, releases=False, acquires=True, scope="sys", before=seen, after=seen, wait=wait
    )
    notes = {rank: send(rank) for rank in range(3)}
    notes[3] = [*begin("receive"), look, *(Accessed(1, 1, 0, part(rank), READ) for rank in range(seen))]
    guarantees = Guarantees()
    first = Analysis({rank: iter(events) for rank, events in notes.items()}, guarantees=guarantees)
    assert first.run() == []
    assert guarantees.add(first.lucky_looks()) == bool(found)
    findings = Analysis(notes, guarantees=guarantees).run()
    assert sum(finding.count for finding in findings) == found


FENCE = ProxyFenced(1, 1)
STORE, TMA_STORE = Accessed(1, 1, 0, DATA, WRITE), Accessed(1, 1, 0, DATA, WRITE, async_proxy=True)
LOAD, TMA_LOAD = Accessed(1, 1, 0, DATA, READ), Accessed(1, 1, 0, DATA, READ, async_proxy=True)
FLAG_SET = Synchronised(1, 1, 1, 0, FLAG, WRITE, releases=True, acquires=False, scope="sys")
FLAG_SEEN = Synchronised(2, 1, 1, 0, FLAG, READ, releases=False, acquires=True, scope="sys")


@pytest.mark.parametrize("sent, received, fenced", [
    ([STORE, FLAG_SET], [FLAG_SEEN, TMA_LOAD], False),
    ([STORE, FLAG_SET], [FENCE, FLAG_SEEN, TMA_LOAD], False),
    ([FENCE, STORE, FLAG_SET], [FLAG_SEEN, TMA_LOAD], False),
    ([STORE, FLAG_SET], [FLAG_SEEN, FENCE, TMA_LOAD], True),
    ([STORE, FENCE, FLAG_SET], [FLAG_SEEN, TMA_LOAD], True),
    ([STORE, FLAG_SET], [FLAG_SEEN, LOAD], True),
    ([TMA_STORE, FLAG_SET], [FLAG_SEEN, TMA_LOAD], True),
    ([], [STORE, TMA_LOAD], False),
    ([], [STORE, FENCE, TMA_LOAD], True),
    ([], [TMA_STORE, TMA_LOAD], True),
    ([], [STORE, Finished(1), Launched(1), TMA_LOAD], True),
])  # fmt: skip
def test_tma_fetches_what_others_have_stored_only_after_a_proxy_fence(sent, received, fenced):
    """PTX ISA, "Async proxy". The fence may stand on either side of the flag; launches, and TMA itself, need none."""
    findings = Analysis({0: [*begin("send"), *sent], 2: [*begin("receive"), *received]}).run()
    assert [finding.kind for finding in findings] == ([] if fenced else ["race/missing-proxy-fence"]), findings


def test_a_hosts_copy_of_a_flag_may_be_gone_through_before_it_was_made():
    """The word's value at a look is then an older one than what the analysis has seen written."""

    def look(number, value):
        how = {"releases": False, "acquires": True, "scope": "sys", "wait": Wait("ge", 1, 32)}
        return Synchronised(number, 1, 1, 0, FLAG, READ, **how, before=value, after=value)

    notes = {
        0: [*begin("copy"), Accessed(0, HOST, 0, DATA, WRITE), Accessed(0, HOST, 0, FLAG, WRITE)],
        2: [*begin("receive"), look(1, 0), look(2, 1), Accessed(1, 1, 0, DATA, READ)],
    }
    assert Analysis(notes).run() == []


def test_what_comes_after_a_meeting_that_never_was_is_gone_through():
    meeting = meeting_of(0, 1)
    notes = {0: [*meeting, *begin("send"), *store_and_signal(2)], 1: [], 2: [*begin("receive"), *wait_and_load(1)]}
    (finding,) = Analysis(notes).run()
    assert finding.kind == "race"


@pytest.mark.parametrize("other", [[], coming_to(0, 1, last=True)], ids=["is gone", "came afterwards"])
def test_hosts_that_wait_where_nobody_can_go_on_are_told(other):
    notes = {0: [Known(0, Place(None, Line("program.py", 7, "main"))), *coming_to(0, 1)], 1: other}
    (finding,) = Analysis(notes, deadlocked=True).run()
    assert finding.kind == "deadlock"
    assert "the host of rank 0 waits in a meeting, to which rank 1 did not come" in finding.sentence
    assert finding.places == [("waits, rank 0", "program.py:7 in main")]
    # The program may have failed, too.
    assert Analysis(notes, deadlocked=False).run() == []


def test_hosts_that_wait_for_one_that_is_gone_can_not_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(deadlock, "LEAVING_HOSTS_S", 0.02)
    monitor = deadlock.DeadlockMonitor(tmp_path)
    assert not monitor.is_deadlocked()
    first, second = (deadlock.Liveness(tmp_path, rank, 2) for rank in range(2))

    def over():
        for _ in range(4):
            time.sleep(0.01)
            found = monitor.is_deadlocked()
        return found

    first.meets()
    assert not over(), "the other runs"
    second.leave()
    first.on_host()
    assert not over(), "all that are left run"
    first.meets()
    assert over() and first.deadlock_found()


def test_another_thread_of_python_may_help(tmp_path):
    asked = threading.Event()
    with sanitizer.recording(tmp_path, 0, 1):
        recorder = observer.recorder
        recorder.launched(SimpleNamespace(dims=(1, 1, 1)))

        def over():
            return any([recorder.is_deadlocked(deadlock.ENOUGH) for _ in range(2 * deadlock.ENOUGH)])

        def works():
            while not asked.is_set():
                time.sleep(0.01)

        other = threading.Thread(target=works)
        other.start()
        assert not over()
        asked.set()
        other.join()
        assert over()


WAITS = {
    "event": lambda: (lambda event: (event.wait, event.set))(threading.Event()),
    "queue": lambda: (lambda numbers: (numbers.get, lambda: numbers.put(1)))(queue.Queue()),
    "simple queue": lambda: (lambda numbers: (numbers.get, lambda: numbers.put(1)))(queue.SimpleQueue()),
}


@pytest.mark.parametrize("waits", WAITS.values(), ids=WAITS)
def test_a_thread_that_waits_for_another_can_not_help_before_that_has_come(tmp_path, waits):
    works, ends = threading.Event(), threading.Event()
    with sanitizer.recording(tmp_path, 0, 1):
        threads = observer.recorder.threads
        wait, come = waits()

        def work():
            wait()
            works.set()
            while not ends.is_set():
                time.sleep(0.01)

        other, main = threading.Thread(target=work), threading.current_thread()
        other.start()
        while threads.may_help({main}):
            time.sleep(0.01)
        come()
        assert threads.may_help({main}), "it has something to do, and may not know it yet"
        works.wait()
        assert threads.may_help({main})
        ends.set()
        other.join()
        assert not threads.may_help({main})


def test_notes_of_several_threads_of_python_are_complete(tmp_path):
    threads, rounds = 4, 1000

    def note(thread):
        for round in range(rounds):
            recorder.collective_entered((thread, round))

    interval = sys.getswitchinterval()
    with sanitizer.recording(tmp_path, 0, 1):
        recorder = observer.recorder
        sys.setswitchinterval(1e-6)
        try:
            others = [threading.Thread(target=note, args=(thread,)) for thread in range(threads)]
            for other in others:
                other.start()
            for other in others:
                other.join()
        finally:
            sys.setswitchinterval(interval)
    came = [event.key for event in read_events(tmp_path)[0] if isinstance(event, CollectiveEnter)]
    for thread in range(threads):
        assert [round for who, round in came if who == thread] == list(range(rounds))


def test_ranks_that_are_all_gone_have_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(deadlock, "LEAVING_HOSTS_S", 0.01)
    deadlock.Liveness(tmp_path, 0, 1).leave()
    monitor = deadlock.DeadlockMonitor(tmp_path)
    assert not monitor.is_deadlocked()
    time.sleep(0.02)
    assert not monitor.is_deadlocked()


@pytest.mark.thorough
def test_a_million_accesses_take_less_than_a_gibibyte():
    """By what a round of a ping-pong adds, after the first rounds, to what is kept."""
    rounds, first_rounds, kept = 1500, 500, []

    def send():
        yield from begin("send")
        for number in range(0, 4 * rounds, 4):
            yield from store_and_signal(number)
            yield Synchronised(number + 3, 1, 1, 0, ANSWER, READ, releases=False, acquires=True, scope="sys")

    def receive():
        yield from begin("receive")
        for number in range(1, 4 * rounds, 4):
            if number // 4 == first_rounds:
                kept.append(tracemalloc.get_traced_memory()[0])
            yield from wait_and_load(number)
            yield Synchronised(number + 1, 1, 1, 0, ANSWER, WRITE, releases=True, acquires=False, scope="sys")

    tracemalloc.start()
    analysis = Analysis({0: send(), 2: receive()})
    assert analysis.run() == []
    kept.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    of_an_access = (kept[1] - kept[0]) / (6 * (rounds - first_rounds))
    assert 1e6 * of_an_access < 0.5 * 2**30, "the other half is for torch and the bytes' shadow"
