"""What orders threads of Python, of which each is a host: the same two accesses, with and without it."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from iris import sanitizer
from iris.sanitizer.analysis import analyse
from iris.sanitizer.host_recorder import HostRecorder

N = 64


def beside(write, signal):
    """Write in another thread, which then calls ``signal``; the thread."""
    thread = threading.Thread(target=lambda: (write(), signal()))
    thread.start()
    return thread


def join(write, ordered):
    thread = beside(write, lambda: None)
    if ordered:
        thread.join()
    return thread.join


def is_alive(write, ordered):
    thread = beside(write, lambda: None)
    while ordered and thread.is_alive():
        pass
    return thread.join


def event(write, ordered):
    done = threading.Event()
    thread = beside(write, done.set)
    if ordered:
        done.wait()
    return thread.join


def looked_at_event(write, ordered):
    done = threading.Event()
    thread = beside(write, done.set)
    while ordered and not done.is_set():
        pass
    return thread.join


def condition(write, ordered):
    changed, said = threading.Condition(), []

    def say():
        with changed:
            said.append(1)
            changed.notify()

    thread = beside(write, say)
    if ordered:
        with changed:
            changed.wait_for(lambda: said)
    return thread.join


def locked(kind):
    def by_lock(write, ordered):
        taken, done = kind(), []

        def beside_it():
            with taken:
                write()
                done.append(1)

        thread = threading.Thread(target=beside_it)
        thread.start()
        found = not ordered
        while not found:
            taken.acquire()
            found = bool(done)
            taken.release()
        return thread.join

    return by_lock


def handed_over(kind):
    def by_queue(write, ordered):
        items = kind()
        thread = beside(write, lambda: items.put(1))
        if ordered:
            items.get()
        return thread.join

    return by_queue


def future(write, ordered):
    executor = ThreadPoolExecutor(1)
    called = executor.submit(write)
    if ordered:
        called.result()
    return executor.shutdown


def pool_of_threads(write, ordered):
    pool = ThreadPool(1)
    called = pool.apply_async(write)
    if ordered:
        called.get()
    return lambda: (pool.close(), pool.join())


def second_call(write, ordered):
    """In a thread that waits for work already: what is done before the call comes before it."""
    executor, x = ThreadPoolExecutor(1), torch.zeros(N)
    executor.submit(int).result()
    x.add_(1)
    called = executor.submit(x.sum)
    write()
    called.result() if ordered else x.add_(1)
    return executor.shutdown


WAYS = [
    join, is_alive, event, looked_at_event, condition, future, second_call, handed_over(queue.Queue),
    handed_over(lambda: queue.SimpleQueue()), locked(lambda: threading.Lock()), locked(lambda: threading.RLock()),
    locked(threading.Condition), pool_of_threads,
]  # fmt: skip


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_who_knows_of_a_thread_comes_after_it(tmp_path, way, ordered):
    with sanitizer.recording(tmp_path, 0, 1):
        x = torch.zeros(N)
        end = way(lambda: x.fill_(1), ordered)
        x.sum()
        end()
    kinds = [finding.kind for finding in analyse(tmp_path)]
    assert kinds == ([] if ordered else ["race"])


def test_two_threads_that_see_memory_for_the_first_time_race(tmp_path, monkeypatch):
    """Also if one of them is still about to note that the memory is new when the other comes."""
    note = HostRecorder.renewed
    monkeypatch.setattr(HostRecorder, "renewed", lambda *args: (time.sleep(0.05), note(*args)))
    with sanitizer.recording(tmp_path, 0, 1):
        x = torch.zeros(N)
        end = join(lambda: x.fill_(1), ordered=False)
        x.sum()
        end()
    assert [finding.kind for finding in analyse(tmp_path)] == ["race"]


def test_memory_that_is_given_back_may_be_anybodys(tmp_path):
    """Torch gives what one thread has freed to another, which need not know."""
    done = []

    def work():
        for _ in range(20):
            torch.ones(1 << 14).mul_(2)
        done.append(1)

    with sanitizer.recording(tmp_path, 0, 1):
        thread = threading.Thread(target=work)
        thread.start()
        while not done:
            torch.ones(1 << 14).mul_(3)
        thread.join()
    assert analyse(tmp_path) == []


@triton.jit
def double(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, 2 * tl.load(x + i))


@pytest.mark.parametrize("make", [lambda k: torch.tensor([k] * N), lambda k: torch.from_numpy(np.full(N, k))])
def test_memory_that_torchs_dispatcher_did_not_make_is_new_all_the_same(tmp_path, make):
    """Batches of a loader: what the host has dropped is the memory of a later one."""
    batches, addresses = queue.Queue(4), []

    def load():
        for k in range(50):
            batch = make(k)
            double[(1,)](batch, N)
            addresses.append(batch.data_ptr())
            batches.put(batch)
            del batch

    with sanitizer.recording(tmp_path, 0, 1):
        thread = threading.Thread(target=load)
        thread.start()
        for k in range(50):
            batch = batches.get()
            double[(1,)](batch, N)
            assert batch.tolist() == [4 * k] * N
            del batch
        thread.join()
    assert len(set(addresses)) < len(addresses)
    assert analyse(tmp_path) == []


def test_a_race_in_a_view_names_the_views_element(tmp_path):
    with sanitizer.recording(tmp_path, 0, 1):
        x = torch.zeros(3 * N, dtype=torch.int64)
        thread = threading.Thread(target=lambda: double[(1,)](x[10 : 10 + N], N))
        thread.start()
        x[13].item()
        thread.join()
    (finding,) = analyse(tmp_path)
    assert finding.kind == "race" and "element [3]" in str(finding)
