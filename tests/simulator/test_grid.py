"""Programs of a launch that wait for each other, and what is said when they wait for ever."""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris.errors import IrisTimeoutError, NotOnCpuError
from iris.simulator import grid, hang


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(grid, "limit_s", 1.0)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    def threads():
        # A process with a heap listens for questions until it ends.
        return [thread for thread in threading.enumerate() if thread.name != "iris-inspection"]

    before = threads()
    yield
    end = time.monotonic() + 60
    while len(threads()) > len(before) and time.monotonic() < end:
        time.sleep(0.01)
    assert len(threads()) == len(before)


@triton.jit
def meet(count, n, out):
    pid = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    tl.atomic_add(count, 1)
    while tl.atomic_add(count, 0) < n:
        pass
    tl.store(out + pid, pid + tl.load(count))


def test_all_programs_meet():
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(24, dtype=torch.int32)
    meet[(6, 4)](count, 24, out)
    assert out.tolist() == [24 + i for i in range(24)]


@triton.jit
def from_last_to_first(flags, n, HOW: tl.constexpr):
    pid = tl.program_id(0)
    if pid < n - 1:
        if HOW == "cas":
            while tl.atomic_cas(flags + pid + 1, 7, 7) != 7:
                pass
        elif HOW == "xchg":
            while tl.atomic_max(flags + pid + 1, 0) != 7:
                pass
        else:
            while tl.load(flags + pid + 1, volatile=True) != 7:
                pass
    tl.atomic_xchg(flags + pid, 7)


@pytest.mark.parametrize("how", ["cas", "xchg", "load"])
def test_each_program_waits_for_the_next(how):
    flags = torch.zeros(12, dtype=torch.int32)
    from_last_to_first[(12,)](flags, 12, how)
    assert flags.tolist() == [7] * 12


@triton.jit
def poll_with_atomic_load(flags, out):
    if tl.program_id(0) == 0:
        tl.atomic_poll(flags, 3)
        while tl.atomic_load(flags + 1) != 4:
            pass
        tl.store(out, 1)
    else:
        tl.atomic_store(flags, 3)
        tl.atomic_store(flags + 1, 4)


@pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason="this Triton has no tl.atomic_poll")
def test_newer_ways_to_poll():
    flags, out = torch.zeros(2, dtype=torch.int32), torch.zeros(1)
    poll_with_atomic_load[(2,)](flags, out)
    assert out.item() == 1


@triton.jit
def count_flags(flags, n, out):
    pid = tl.program_id(0)
    if pid == 0:
        arrived = 0
        while arrived < n - 1:
            arrived = 0
            for other in range(1, n):
                arrived += tl.load(flags + other)
        tl.store(out, arrived)
    else:
        tl.store(flags + pid, 1)


def test_plain_loads_of_several_flags_let_others_have_a_turn():
    """No GPU promises that a poll without "volatile" ends. Here it does, as it mostly does there."""
    flags, out = torch.zeros(4, dtype=torch.int32), torch.zeros(1)
    count_flags[(4,)](flags, 4, out)
    assert out.item() == 3


@triton.jit
def look_at(flag, out):
    while tl.load(flag) == 0:  # looks
        pass
    tl.store(out, 1)


def test_a_plain_load_of_what_nobody_stores_is_a_hang(limit):
    with pytest.raises(IrisTimeoutError) as caught:
        look_at[(3,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1))
    line = line_of("while tl.load(flag) == 0:  # looks")
    assert f"at {__file__}:{line} in look_at: polls with plain loads until != 0, holds 0" in str(caught.value)


@triton.jit
def load_again_and_again(scale, out, rounds, BLOCK: tl.constexpr):
    for i in range(rounds):
        tl.store(out + i * BLOCK + tl.arange(0, BLOCK), tl.load(scale))


def test_loading_the_same_for_long_is_no_hang(monkeypatch):
    monkeypatch.setattr(grid, "limit_s", 0.25)
    scale, out = torch.tensor([3.0]), torch.zeros(4000 * 1024)
    start = time.monotonic()
    load_again_and_again[(1,)](scale, out, 4000, BLOCK=1024)
    assert time.monotonic() - start > 0.05 and out.eq(3).all()


@triton.jit
def ticket(x):
    tl.atomic_add(x, 1)


def test_programs_that_do_not_wait_use_no_thread(monkeypatch):
    monkeypatch.setattr(threading, "Thread", None)
    x = torch.zeros(1, dtype=torch.int32)
    ticket[(100, 100)](x)
    assert x.item() == 10_000


@triton.jit
def wait_for(flag, out):
    while tl.atomic_add(flag, 0) == 0:
        pass
    tl.store(out, 1)


@triton.jit
def release(flag):
    tl.atomic_xchg(flag, 1)


@pytest.mark.parametrize("poll", [wait_for, look_at], ids=["atomic", "plain"])
def test_launches_of_two_threads_may_wait_for_each_other(poll):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    waiting = threading.Thread(target=lambda: poll[(3,)](flag, out))
    waiting.start()
    time.sleep(0.05)
    release[(1,)](flag)
    waiting.join(timeout=60)
    assert not waiting.is_alive() and out.item() == 1


@triton.jit
def fail_while_others_wait(flag):
    pid = tl.program_id(0)
    if pid == 5:
        tl.static_assert(False, "no such tile")
    while tl.atomic_add(flag, 0) == 0:
        pass


def test_an_exception_ends_the_launch_with_its_own_type():
    flag = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="no such tile") as caught:
        fail_while_others_wait[(10,)](flag)
    if sys.version_info >= (3, 11):
        line = fail_while_others_wait.fn.__code__.co_firstlineno + 4
        place = f"at {__file__}:{line}"
        assert caught.value.__notes__ == [f"in program (5, 0, 0) of kernel 'fail_while_others_wait', {place}"]
    release[(1,)](flag)  # the next launch works
    assert flag.item() == 1


def line_of(text: str) -> int:
    return 1 + next(i for i, line in enumerate(Path(__file__).read_text().splitlines()) if line.strip() == text)


@triton.jit
def spin(flag):
    while tl.atomic_cas(flag, 41, 0) != 41:  # here
        pass


@triton.jit
def two_kinds(flags):
    if tl.program_id(0) < 9:
        spin(flags)  # from here
    else:
        while tl.load(flags + 1, volatile=True) == 5:  # there
            pass


def test_a_hang_is_reported_with_place_flag_and_value(limit, monkeypatch):
    monkeypatch.setattr(hang, "rank", lambda: 3)
    flags = torch.tensor([40, 5], dtype=torch.int32)
    with pytest.raises(IrisTimeoutError) as caught:
        two_kinds[(10,)](flags)
    text = str(caught.value)
    assert text.startswith("Rank 3: kernel 'two_kinds' has waited for 1 s")
    here = line_of("while tl.atomic_cas(flag, 41, 0) != 41:  # here")
    there = line_of("while tl.load(flags + 1, volatile=True) == 5:  # there")
    assert f"programs (0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0), ... (9 in all) at {__file__}:{here} in spin" in text
    caller = line_of("spin(flags)  # from here")
    assert (
        f"in spin, called by {__file__}:{caller} in two_kinds: waits with atomic_cas for 41, holds 40; flag: " in text
    )
    assert f"flag: address {flags.data_ptr():#x}" in text
    assert f"program (9, 0, 0) at {__file__}:{there} in two_kinds: polls with load until != 5, holds 5" in text


@triton.jit
def wait_for_flag(DeviceContext: tl.constexpr, context, flags):
    DeviceContext.initialize(context).wait(flags + 2, 3, cmp="ge")  # waits


def test_a_hang_in_the_library_names_the_callers_line_the_tensor_and_what_is_wanted(limit):
    with iris.iris(1 << 20) as ctx:
        flags = ctx.zeros(8, dtype=torch.int32)
        with pytest.raises(IrisTimeoutError) as caught:
            wait_for_flag[(1,)](iris.DeviceContext, ctx.get_device_context(), flags)
    line = line_of('DeviceContext.initialize(context).wait(flags + 2, 3, cmp="ge")  # waits')
    assert f"at {__file__}:{line} in wait_for_flag: waits for >= 3, holds 0; flag: rank 0's int32[8]" in str(
        caught.value
    )


def quit_with_7(number, frame):
    raise SystemExit(7)


HANDLERS = [
    (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),  # Ctrl-C, as in a terminal
    (signal.SIGINT, quit_with_7, SystemExit),
    (signal.SIGTERM, quit_with_7, SystemExit),
]


@pytest.mark.parametrize("poll", [wait_for, look_at], ids=["atomic", "plain"])
@pytest.mark.parametrize(("number", "handler", "error"), HANDLERS, ids=["Ctrl-C", "own Ctrl-C", "SIGTERM"])
def test_a_signal_ends_a_launch_by_what_its_handler_raises(poll, number, handler, error):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    before = signal.signal(number, handler)
    try:
        for programs in (1, 4):
            with pytest.raises(error):
                # On a busy machine it may come before the launch.
                threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
                poll[(programs,)](flag, out)
            assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    # The next launch runs as ever.
    release[(1,)](flag)
    poll[(1,)](flag, out)


def test_a_signal_whose_handler_raises_nothing_ends_nothing():
    flag, out, came = torch.zeros(1, dtype=torch.int32), torch.zeros(1), []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        threading.Timer(0.2, flag.fill_, (1,)).start()
        wait_for[(2,)](flag, out)
        while not came:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_that_was_stopped_has_not_waited_for_so_long(monkeypatch):
    """Its clock goes on meanwhile: here by a minute, when the programs rest for the first time."""
    stopped_s = 0.0

    def rest(seconds):
        nonlocal stopped_s
        time.sleep(seconds)
        stopped_s = 60.0

    monkeypatch.setattr(grid, "limit_s", 30.0)
    monkeypatch.setattr(grid, "time", SimpleNamespace(sleep=rest, monotonic=lambda: time.monotonic() + stopped_s))
    flag = torch.zeros(1, dtype=torch.int32)
    threading.Timer(0.05, flag.fill_, (1,)).start()
    wait_for[(2,)](flag, torch.zeros(1))
    assert stopped_s


@triton.jit
def each_its_own(flags):
    while tl.atomic_add(flags + tl.program_id(0), 0) == 0:
        pass


def test_a_report_stays_short(limit):
    with pytest.raises(IrisTimeoutError, match=r"and 12 more places"):
        each_its_own[(20,)](torch.zeros(20, dtype=torch.int32))


@triton.jit
def work(flag, rounds):
    if tl.program_id(0) == 0:
        for _ in range(rounds):
            tl.atomic_add(flag, 1)
            tl.atomic_add(flag + 1, 0)
        tl.atomic_xchg(flag + 1, 1)
    else:
        while tl.atomic_add(flag + 1, 0) == 0:
            pass


def test_waiting_for_a_program_that_works_is_no_hang(monkeypatch):
    monkeypatch.setattr(grid, "limit_s", 0.05)
    flag = torch.zeros(2, dtype=torch.int32)
    work[(2,)](flag, 400)
    assert flag.tolist() == [400, 1]


def test_a_tensor_that_the_cpu_cannot_reach_is_an_error():
    with pytest.raises(NotOnCpuError, match="'flag' of kernel 'release' is on meta"):
        release[(1,)](torch.zeros(1, dtype=torch.int32, device="meta"))


@triton.jit
def wait_for_many(flags, n):
    missing = n
    while missing > 0:
        missing = n
        for i in range(n):
            missing -= tl.atomic_add(flags + i, 0)
    tl.store(flags + n, 1)


def test_a_loop_over_many_flags_is_a_wait_as_well(limit):
    flags = torch.zeros(201, dtype=torch.int32)
    with pytest.raises(IrisTimeoutError, match="wait_for_many"):
        wait_for_many[(2,)](flags, 200)
    flags[:200] = 1
    wait_for_many[(2,)](flags, 200)
    assert flags[200].item() == 1


@triton.jit
def draw_tickets(count, drawn, EACH: tl.constexpr):
    for i in range(EACH):
        tl.store(drawn + tl.program_id(0) * EACH + i, tl.atomic_add(count, 1))


def order_of_tickets(monkeypatch, seed, programs=6, each=5):
    monkeypatch.setattr(grid, "chance", None if seed is None else random.Random(seed))
    count, drawn = torch.zeros(1, dtype=torch.int32), torch.zeros(programs * each, dtype=torch.int32)
    draw_tickets[(programs,)](count, drawn, each)
    assert sorted(drawn.tolist()) == list(range(programs * each))
    return drawn.tolist()


def test_a_seed_decides_whose_turn_it_is(monkeypatch):
    orders = [order_of_tickets(monkeypatch, seed) for seed in range(8)]
    assert orders == [order_of_tickets(monkeypatch, seed) for seed in range(8)]
    assert len(set(map(tuple, orders))) > 4
    # A program does not go on to its end, as it does where nothing is left to chance.
    assert order_of_tickets(monkeypatch, None) == list(range(30))
    assert all(order != sorted(order) for order in orders)
    assert any(b - a > 1 for order in orders for a, b in zip(order[:5], order[1:5], strict=False))
