"""Barriers in shared memory (PTX ISA, "mbarrier"): they count arrivals, and bytes of copies, in phases.

A phase ends when all arrivals that the barrier counts have come, and all bytes that were announced. The next phase
begins at once. A copy that signals a barrier is carried out when something waits for the phase: one by one, until the
phase is over.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon.language.nvidia.ampere import mbarrier as ampere
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as hopper

from iris import observer
from iris.errors import MbarrierError
from iris.simulator import tasks
from iris.simulator.asynchronous import Operation
from iris.simulator.semantic import SharedMemory, integer, semantic, truth
from iris.simulator.shapes import unwrapped

# The object is an opaque 64-bit word. The PTX ISA gives its parts these ranges.
COUNT_BITS = 20
BYTES_BITS = 21


@dataclass
class _State:
    """What the word holds: arrivals per phase, those and the bytes left in this one, and the phase's lowest bit."""

    count: int
    pending: int
    awaited_bytes: int
    phase: int

    @classmethod
    def of(cls, mbarrier: SharedMemory) -> "_State":
        word = int(mbarrier.handle.flat[0])
        mask = (1 << COUNT_BITS) - 1
        state = cls(word >> 1 & mask, word >> 1 + COUNT_BITS & mask, word >> 1 + 2 * COUNT_BITS, word & 1)
        if not state.count or abs(state.awaited_bytes) >> BYTES_BITS - 1:
            error = MbarrierError("an mbarrier is used before init, or after invalidate")
            raise observer.mistake("uninitialised", error)
        return state

    def put(self, mbarrier: SharedMemory) -> None:
        parts = (self.awaited_bytes << COUNT_BITS | self.pending) << COUNT_BITS | self.count
        mbarrier.handle[...] = parts << 1 | self.phase


def allocate_mbarrier(batch: Any = None, two_ctas: Any = False) -> SharedMemory:
    count = unwrapped(batch)
    shape = [1] if count is None else [count, 1]  # a program is one CTA
    return semantic.allocate_shared(tl.int64, shape, hopper.MBarrierLayout(), None)


def init(mbarrier: SharedMemory, count: Any, **_: Any) -> None:
    count = integer(count)
    if not 0 < count < 1 << COUNT_BITS:
        raise ValueError(f"an mbarrier counts 1 to {(1 << COUNT_BITS) - 1} arrivals, not {count}")
    _State(count, count, 0, 0).put(mbarrier)


def invalidate(mbarrier: SharedMemory, **_: Any) -> None:
    _State.of(mbarrier)
    mbarrier.handle[...] = 0


def arrive(mbarrier: SharedMemory, *, count: Any = 1, pred: Any = True, **_: Any) -> None:
    if not truth(pred):
        return
    note_arrival(mbarrier)
    before = int(mbarrier.handle.flat[0])
    over = update(mbarrier, integer(count))
    # First the partitions run that have yet to arrive, then those that wait, and only then this one goes on. This order
    # shows an arrival that comes too early. The loop looks at the word alone, whose lowest bit is the phase: another
    # partition may have invalidated the barrier meanwhile.
    while not over:
        seen = int(mbarrier.handle.flat[0])
        tasks.give_way()
        now = int(mbarrier.handle.flat[0])
        if now == seen:
            return
        over = (now ^ before) & 1 == 1
    tasks.give_way()


def expect(mbarrier: SharedMemory, bytes: Any = None, pred: Any = True, *, bytes_per_cta: Any = None, **_: Any) -> None:
    """Announce bytes, and arrive once: Gluon's `expect` is PTX's ``mbarrier.arrive.expect_tx``.

    The copies that follow it belong to the phase. So, unlike after `arrive`, this partition goes on before those that
    have yet to arrive.
    """
    if not truth(pred):
        return
    note_arrival(mbarrier)
    if update(mbarrier, 1, integer(bytes if bytes_per_cta is None else bytes_per_cta)):
        tasks.give_way()


def update(mbarrier: SharedMemory, arrivals: int = 0, announced: int = 0) -> bool:
    """Count arrivals, and bytes that are announced or, if negative, have come. Returns whether that ends the phase."""
    state = _State.of(mbarrier)
    state.pending -= arrivals
    state.awaited_bytes += announced
    if not 0 <= state.pending < 1 << COUNT_BITS:
        error = MbarrierError(
            f"more than {state.count} arrivals in one phase of an mbarrier: "
            "its count is too small, or an earlier phase has not been waited for"
        )
        raise observer.mistake("race", error)
    if abs(state.awaited_bytes) >> BYTES_BITS - 1:
        raise RuntimeError(f"an mbarrier cannot await {state.awaited_bytes} bytes")
    over = state.pending == 0 and state.awaited_bytes == 0
    if over:
        state.pending, state.phase = state.count, state.phase ^ 1
    checker, _ = tasks.shared_memory_checker()
    if checker is not None:
        if over:
            checker.mbarrier_phase_end(mbarrier.handle)
        if observer.recorder is not None:
            observer.recorder.mbarrier_arrived(mbarrier.handle.ctypes.data, over)
    state.put(mbarrier)
    return over


def announce(mbarrier: SharedMemory, operation: Operation) -> None:
    """Keep ``operation``, which signals the barrier at its end, until something waits for the barrier."""
    _announced(mbarrier).append(observer.from_here(operation, mbarrier.handle.ctypes.data))


def wait(mbarrier: SharedMemory, phase: Any, pred: Any = True, deps: Any = (), **_: Any) -> None:
    """Wait until the phase of this parity is over, that is, until the barrier is in a phase of the other parity."""
    parity = integer(phase)
    if parity not in (0, 1):
        raise ValueError(f"the phase of an mbarrier is 0 or 1, not {parity}: wait for `phase & 1`")
    waiting = truth(pred)
    while waiting and (state := _State.of(mbarrier)).phase == parity:
        announced = _announced(mbarrier)
        if announced:
            announced.popleft()()
        else:
            _observe(mbarrier, state)
    checker, task = tasks.shared_memory_checker()
    if waiting and checker is not None:
        checker.mbarrier_waited(task, mbarrier.handle)
        if observer.recorder is not None:
            observer.recorder.mbarrier_waited(mbarrier.handle.ctypes.data)


def note_arrival(mbarrier: SharedMemory) -> None:
    """Tell the race detector that the current task arrives."""
    checker, task = tasks.shared_memory_checker()
    if checker is not None:
        checker.mbarrier_arrive(task, mbarrier.handle)


def _announced(mbarrier: SharedMemory) -> Any:
    return tasks.current().program.in_flight.announced[mbarrier.handle.ctypes.data]


def _observe(mbarrier: SharedMemory, state: _State) -> None:
    missing = f"{state.pending} of {state.count} arrivals"
    if state.awaited_bytes:
        missing += f" and {state.awaited_bytes} announced bytes"
    tasks.observe(
        "mbarrier wait",
        np.array([mbarrier.handle.ctypes.data], dtype=np.uint64),
        mbarrier.handle.reshape(-1).copy(),
        mbarrier.dtype,
        lambda: False,
        waits_for=f"phase {state.phase} of {_name(mbarrier)}, which lacks {missing}",
    )


def _name(mbarrier: SharedMemory) -> str:
    """The mbarrier in words: with its index, if several were allocated together."""
    word = mbarrier.handle
    allocated = word if word.base is None else word.base
    if allocated.size == 1:
        return "an mbarrier"
    return f"mbarrier {(word.ctypes.data - allocated.ctypes.data) // word.itemsize} of {allocated.size}"


def replacements() -> dict[Any, Callable]:
    """What stands in for which of Gluon's builtins."""
    functions: dict[str, Callable] = {"init": init, "invalidate": invalidate, "arrive": arrive, "wait": wait}
    replaced = {getattr(module, name): new for module in (ampere, hopper) for name, new in functions.items()}
    replaced[hopper.expect] = expect
    if hasattr(hopper, "allocate_mbarrier"):  # a jitted function, which Triton 3.6 has not
        replaced[hopper.allocate_mbarrier.fn] = allocate_mbarrier
    return replaced
