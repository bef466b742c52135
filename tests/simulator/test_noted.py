"""What the simulator knows of an operation beside itself: who uses its result, and what its program waits for."""

import inspect
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import triton
import triton.language as tl

import iris
from iris import observer
from iris.language import ll, ordering
from iris.sanitizer.recorder import Recorder
from iris.simulator import ACTIVE, grid, noted, tasks
from iris.simulator.tasks import Condition

assert ACTIVE

FLAG = 6


@triton.jit
def add(flag):
    return tl.atomic_add(flag, 1)


@triton.jit
def add_and_use(flag):
    old = tl.atomic_add(flag, 1)
    return old * 2


@triton.jit
def statements(flag, out, HOW: tl.constexpr):
    if HOW == "dropped":
        tl.atomic_add(flag, 1)
    elif HOW == "assigned":
        old = tl.atomic_add(flag, 1)  # noqa: F841
    elif HOW == "an argument":
        tl.store(out, tl.atomic_add(flag, 1))
    elif HOW == "in an expression":
        tl.store(out, 1 + tl.atomic_add(flag, 1))
    elif HOW == "returned to who drops it":
        add(flag)
    elif HOW == "used by who is dropped":
        add_and_use(flag)
    elif HOW == "the language's, dropped":
        ordering.signal(flag, 1, "add")
    elif HOW == "the language's, used":
        tl.store(out, ordering.signal(flag, 1, "add"))
    else:
        # An operation after a dropped one has a use of its own.
        tl.store(out, 0)
        tl.store(out, tl.atomic_add(flag, 1))


@pytest.fixture
def observed(monkeypatch):
    """Of each operation that looks at a flag, what its task was about then."""
    found, observe = [], tasks.observe

    def look(operation, pointers, values, *args, **kwargs):
        found.append((operation, tasks.current().dropped, tasks.current().condition))
        observe(operation, pointers, values, *args, **kwargs)

    monkeypatch.setattr(tasks, "observe", look)
    return found


@pytest.mark.parametrize(
    ("how", "dropped"),
    [
        ("dropped", True),
        ("assigned", False),
        ("an argument", False),
        ("in an expression", False),
        # What a function of the user's does with the result, its return included, is a use.
        ("returned to who drops it", False),
        ("used by who is dropped", False),
        # A function of the language that uses what it has found returns it, and does no more with it.
        ("the language's, dropped", True),
        ("the language's, used", False),
        ("after a statement", False),
    ],
)
def test_whether_the_result_of_an_operation_is_used(observed, how, dropped):
    statements[(1,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1), how)
    assert [(operation, drops) for operation, drops, _ in observed] == [("atomic_add", dropped)]


@triton.jit
def waits(flag, n, HOW: tl.constexpr):
    if HOW == "ne":
        while tl.load(flag, volatile=True) != n * 2:
            pass
    elif HOW == "lt":
        while n * 2 > tl.atomic_add(flag, 0):
            pass
    elif HOW == "by names":
        while tl.atomic_cas(pointer=flag, cmp=-1, val=-1) != n * 2:
            pass
    elif HOW == "computed":
        while tl.load(flag, volatile=True) != tl.minimum(n * 2, 100):
            pass
    elif HOW == "block":
        while tl.sum(tl.load(flag + tl.arange(0, 1), volatile=True)) != n * 2:
            pass
    elif HOW == "wait":
        ordering.wait(flag, n * 2, "ge", flag)
    else:
        seen = ordering.wait(flag, n * 2, "reached", flag)
        tl.store(flag, seen)


@pytest.mark.parametrize(
    ("how", "condition", "dropped"),
    [
        ("ne", Condition("eq", FLAG, 64), False),
        ("lt", Condition("ge", FLAG, 64), False),
        ("by names", Condition("eq", FLAG, 64), False),
        # What a loop calls to find out cannot be asked twice; a block is compared to nothing.
        ("computed", None, False),
        ("block", None, False),
        ("wait", Condition("ge", FLAG, 32, returned=True), True),
        ("used wait", Condition("reached", FLAG, 32, returned=True), False),
    ],
)
def test_what_a_program_waits_for(observed, how, condition, dropped):
    waits[(1,)](torch.full((1,), FLAG, dtype=torch.int32), FLAG // 2, how)
    assert [(drops, known) for _, drops, known in observed] == [(dropped, condition)]


@triton.jit
def after_a_wait(flag):
    ordering.wait(flag, 6, "eq", flag)
    while tl.load(flag, volatile=True) != 6:
        pass
    tl.atomic_add(flag, 1)


def test_after_a_wait_nothing_is_awaited(observed):
    after_a_wait[(1,)](torch.full((1,), FLAG, dtype=torch.int32))
    (*_, (_, _, loop)), (operation, dropped, after) = observed[:-1], observed[-1]
    assert loop == Condition("eq", FLAG, 64)
    assert (operation, dropped, after) == ("atomic_add", True, None)


@triton.jit
def sends_and_stores(words, out, HOW: tl.constexpr, LANES: tl.constexpr):
    """A message of so many lanes, and something else after it."""
    lanes = tl.arange(0, 4)
    if HOW == "store":
        ll.write_through(words + lanes, lanes.to(tl.int64), lanes < LANES)
    elif HOW == "load":
        ordering.load_relaxed(words + lanes, lanes < LANES)
    elif HOW == "load of all":
        ordering.load_relaxed_uniform(words + lanes, lanes < LANES)
    else:
        ll.ll_send_place(words + lanes, lanes.to(tl.int64), 1, lanes < LANES)
    tl.atomic_add(out, 1.0, sem="relaxed")


@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize("how", ["store", "load", "load of all", "place"])
def test_what_carries_its_own_arrival(monkeypatch, how, lanes):
    """It is said of the one access; nothing that comes after it does, also where no lane accesses anything."""
    recorder = MagicMock()
    monkeypatch.setattr(observer, "recorder", recorder)
    words = torch.zeros(4, dtype=torch.int64)
    sends_and_stores[(1,)](words, torch.zeros(1), how, lanes)
    signature = inspect.signature(Recorder.synchronised)
    calls = [signature.bind(None, *call.args, **call.kwargs).arguments for call in recorder.synchronised.call_args_list]
    calls = [call for call in calls if call["pointers"].size]
    memory = range(words.data_ptr(), words.data_ptr() + words.nbytes)
    said = [(int(call["pointers"][0]) in memory, call.get("message", False)) for call in calls]
    assert said == [(True, True)] * bool(lanes) + [(False, False)]


def test_events_that_device_functions_note_are_known():
    """They say them by name, as a kernel has no other functions of Python's."""
    files = Path(ordering.__file__).parent.glob("*.py")
    events = {event for file in files for event in re.findall(r"\bnote\(\"(\w+)\"", file.read_text())}
    assert "waits_for" in events
    assert all(callable(getattr(noted, event, None)) for event in events), events


@triton.jit
def look_at_own_copy(context_tensor, heap_bases, flag, CONTEXT: tl.constexpr):
    if CONTEXT:
        ctx = iris.DeviceContext.initialize(context_tensor)
        while ctx.load(flag, 0) == 0:
            pass
    else:
        while iris.load(flag, 0, 0, heap_bases) == 0:
            pass


@pytest.mark.parametrize("form", ["context", "function"])
def test_a_load_of_a_ranks_flag_is_the_poll_and_not_what_the_library_loads_for_it(monkeypatch, form):
    monkeypatch.setattr(grid, "limit_s", 0.5)
    found = r"until != 0, holds 0; flag: rank 0's int32\[3\], element 1 \(offset 0x4\)"
    with iris.iris(1 << 20) as ctx:
        flags = ctx.zeros(3, dtype=torch.int32)
        with pytest.raises(iris.errors.IrisTimeoutError, match=found):
            look_at_own_copy[(1,)](ctx.get_device_context(), ctx.get_heap_bases(), flags[1:], form == "context")
