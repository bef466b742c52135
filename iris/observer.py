"""The interface by which the sanitizer is told what a process does: `recorder`, which is None while nobody records.

The heap, the groups of ranks and the simulator report here what they do, and know nothing of the sanitizer. This module
imports nothing of Iris.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

Error = TypeVar("Error", bound=Exception)

READ, WRITE, UPDATE = 1, 2, 3
"""What an operation does to memory; an update is both."""

GAP = 4096
"""Bytes between allocations that belong to nobody, while the sanitizer records."""


class Observer(Protocol):
    """What can be reported. `iris.sanitizer.recorder.Recorder` implements it, and describes each method."""

    def close(self) -> None: ...

    # By groups of ranks and the heap.
    def meeting(self, key: tuple, ranks: tuple[int, ...], text: str) -> contextlib.AbstractContextManager: ...
    def sending(
        self, key: tuple, ranks: tuple[int, ...], text: str, tensors: Sequence[Any]
    ) -> contextlib.AbstractContextManager: ...
    def received(self, key: tuple, sources: tuple[int, ...], receivers: int, tensors: Sequence[Any]) -> None: ...
    def out_of_step(self, text: str) -> None: ...
    def allocated(self, address: int, size: int, text: str, undefined: bool) -> None: ...
    def asymmetric(self, text: str, calls: dict[int, tuple[str, int, str]]) -> None: ...

    # By the backend of torch.distributed: see the functions below.
    def beside(
        self, name: str, stream: Any, operation: Callable[..., Any], in_thread: bool
    ) -> tuple[Callable[..., Any], Callable[[Any], Any]]: ...
    def ended(self, handle: Any) -> None: ...
    def promised(self, handle: Any, future: Any) -> None: ...

    # By launches in the simulator: their arguments, programs and partitions, and how they end.
    def kernel_argument(self, name: str, tensor: Any) -> None: ...
    def launched(self, launch: Any) -> None: ...
    def finished(self, launch: Any) -> None: ...
    def forked(self, parent: Any, partitions: int) -> None: ...
    def joined(self, parent: Any, partitions: int) -> None: ...
    def failed(self, error: BaseException) -> None: ...
    def waits(self, launch: Any, wait: Any) -> None: ...
    def is_deadlocked(self, repeats: int) -> bool: ...

    # By operations in the simulator.
    def place(self) -> int: ...
    def check_mapped(self, pointers: np.ndarray, kind: int) -> None: ...
    def spins_on(self, pointers: np.ndarray) -> bool: ...
    def numbered(self) -> contextlib.AbstractContextManager[int]: ...
    def accessed(
        self, pointers: np.ndarray, size: int, kind: int, values: np.ndarray | None = None, number: int | None = None
    ) -> None: ...
    def synchronised(
        self,
        number: int,
        pointers: np.ndarray,
        values: np.ndarray,
        kind: int,
        sem: str,
        scope: str,
        message: bool = False,
        compares: bool = False,
        changed: bool = True,
        after: np.ndarray | None = None,
        adds: bool = False,
    ) -> None: ...
    def changed(self) -> None: ...
    def cta_synced(self) -> None: ...
    def fenced(self) -> None: ...
    def proxy_fenced(self) -> None: ...
    def mbarrier_arrived(self, address: int, ends: bool) -> None: ...
    def mbarrier_waited(self, address: int) -> None: ...
    def from_here(self, operation: Callable[[], None], mbarrier: int | None) -> Callable[[], None]: ...
    def shared_race(
        self, kind: str, first: tuple[int | None, str, int], second: tuple[int | None, str, int], missing: str
    ) -> None: ...


recorder: Observer | None = None
"""Records what this process does; None while nobody records."""


on_join: list[Callable[[Any], None]] = []
"""Called in the simulator when a process has found all ranks, with their `iris.world.Group`. Collective over it."""


def joined(group: Any) -> None:
    """This process, which runs kernels in the simulator, is a rank of ``group``. Collective over the group."""
    for each in on_join:
        each(group)


def with_gaps(size: int) -> int:
    """The size of a heap in which tensors of ``size`` bytes in all have room for a gap after each."""
    return 2 * size + (1 << 20)


def reported(error: Error) -> Error:
    """``error``, which the host is about to raise: a mistake of the program that is reported."""
    if recorder is not None:
        recorder.failed(error)
    return error


def mistake(kind: str, error: Error) -> Error:
    """``error``, which a program is about to raise: a mistake of its kernel, and a finding of this kind."""
    error.iris_finding = kind  # type: ignore[attr-defined]
    return error


def from_here(operation: Callable[[], None], mbarrier: int | None = None) -> Callable[[], None]:
    """``operation``, an asynchronous one that is issued now and carried out later, with its accesses recorded as such.

    They count as done in the line that is being done now. They come after what was done before, and are unordered with
    what is done next. Whoever calls the result has waited for the operation. But if the operation signals its end by
    the ``mbarrier`` at that address, whoever waits for that has.
    """
    return operation if recorder is None else recorder.from_here(operation, mbarrier)


def beside(
    call: str, stream: Any, operation: Callable[..., Any], in_thread: bool
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """For an asynchronous call: ``operation``, which carries it out, with its accesses recorded as the call's; and a
    function that marks the call's handle, and returns it.

    ``stream``: the one on which it comes after earlier calls. ``in_thread``: ``operation`` runs in a thread of its own.
    """
    if recorder is None:
        return operation, lambda handle: handle
    return recorder.beside(call, stream, operation, in_thread)


def ended(handle: Any) -> None:
    """The current thread has learned that the asynchronous call of this handle is over."""
    if recorder is not None:
        recorder.ended(handle)


def promised(handle: Any, future: Any) -> None:
    """``future`` completes with the asynchronous call of this handle."""
    if recorder is not None:
        recorder.promised(handle, future)
