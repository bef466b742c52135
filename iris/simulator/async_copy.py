"""Asynchronous copies from global to shared memory by threads: cp.async on NVIDIA, loads to LDS on AMD.

They are committed in groups; a wait says how many groups may be left (PTX ISA, cp.async.wait_group).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon.language.amd.cdna4 import async_copy as cdna4
from triton.experimental.gluon.language.nvidia.ampere import async_copy as ampere

from iris import observer
from iris.simulator import mbarrier, tasks
from iris.simulator.asynchronous import Destination, Source
from iris.simulator.semantic import SharedMemory, integer, semantic, truth

THREADS_OF_A_WARP = 32  # on NVIDIA, whose threads each arrive at an mbarrier


def async_load(smem: SharedMemory, pointer: tl.tensor, mask: Any = None, *_: Any, **__: Any) -> None:
    """NVIDIA's: zeros where the mask is off (PTX ISA, cp.async, src-size)."""
    _load(smem, pointer, mask, 0.0)


def buffer_load_to_shared(
    dest: SharedMemory, ptr: tl.tensor, offsets: tl.tensor, mask: Any = None, other: Any = None, *_: Any, **__: Any
) -> None:
    """AMD's: where the mask is off, ``other``, or the zeros that a buffer load finds out of range."""
    _load(dest, ptr + offsets, mask, 0.0 if other is None else other)


def global_load_to_shared(
    dest: SharedMemory, ptr: tl.tensor, mask: Any = None, other: Any = None, *_: Any, **__: Any
) -> None:
    """AMD's: where the mask is off, ``other``; without one nothing is written there."""
    _load(dest, ptr, mask, other)


def _load(memory: SharedMemory, pointers: tl.tensor, mask: Any, other: Any) -> None:
    if list(pointers.shape) != list(memory.shape) or pointers.dtype.element_ty != memory.dtype:
        raise ValueError(f"{pointers.type} cannot be copied to shared memory {memory.dtype} {memory.shape}")

    def read() -> np.ndarray:
        return tl.load(pointers, mask, None if mask is None else other).handle.data

    source = Source(read, memory.dtype)
    checker, task = tasks.shared_memory_checker()
    copies = task.in_flight.copies
    if checker is not None:
        checker.writes(task, memory.handle, "copies to", completion=copies)
    written = True if mask is None or other is not None else mask.handle.data
    destination = Destination(memory.handle, memory.dtype, written)

    def complete() -> None:
        destination.complete(source.at_completion())

    copies.issue(observer.from_here(complete))


def commit_group() -> None:
    tasks.current().in_flight.copies.commit()


def wait_group(num_outstanding: Any = 0) -> None:
    tasks.wait_for(tasks.current().in_flight.copies, integer(num_outstanding))


def wait_group_or_all(num_outstanding: Any = 0) -> None:
    """AMD's: a wait for everything includes what has not been committed."""
    if integer(num_outstanding) == 0:
        commit_group()
    wait_group(num_outstanding)


def mbarrier_arrive(barrier: SharedMemory, increment_count: Any = True) -> None:
    """Each thread arrives when the copies that it has issued are done (PTX ISA, cp.async.mbarrier.arrive).

    With ``increment_count`` the phase counts these arrivals in addition to those that the barrier was made for.
    """
    checker, task = tasks.shared_memory_checker()
    groups, threads = task.in_flight.copies, THREADS_OF_A_WARP * task.num_warps
    copies, number = groups.issued(), groups.number
    if truth(increment_count):
        mbarrier.update(barrier, arrivals=-threads)
    mbarrier.note_arrival(barrier)

    def arrive() -> None:
        for copy in copies:
            copy()
        if checker is not None:
            checker.groups_arrive(groups, number, barrier.handle)
        mbarrier.update(barrier, arrivals=threads)

    mbarrier.announce(barrier, arrive)


def replacements() -> dict[Any, Callable]:
    """What stands in for which builtin of Gluon."""
    # Triton 3.9 has another name, and keeps the older one to say so.
    newer = hasattr(ampere, "async_load")
    return {
        getattr(ampere, "async_load" if newer else "async_copy_global_to_shared"): async_load,
        ampere.mbarrier_arrive: mbarrier_arrive,
        ampere.commit_group: commit_group,
        ampere.wait_group: wait_group,
        cdna4.buffer_load_to_shared: buffer_load_to_shared,
        cdna4.global_load_to_shared: global_load_to_shared,
        cdna4.commit_group: commit_group,
        cdna4.wait_group: wait_group_or_all,
        cdna4.load_shared_relaxed: semantic.shared_load,
    }
