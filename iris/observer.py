"""Whoever watches what this process does: nobody, or the sanitizer.

The heap, the groups of ranks and the simulator tell here what they do, and know nothing of who listens. This module
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
"""Bytes after each allocation that belong to nobody, while somebody watches."""


class Observer(Protocol):
    """What one is told. The sanitizer's is `iris.sanitizer.recorder.Recorder`, which says more of each."""

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
"""Takes down what this process does; None while nobody wants to know."""


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
    """``operation``, which will be carried out later, noted as the doing of the line that is being done now.

    It comes after what has been done here by now, and in no order with what is done next. Who carries it out has
    waited for it; or, if it signals its end by the ``mbarrier`` at that address, who waits for that.
    """
    return operation if recorder is None else recorder.from_here(operation, mbarrier)


def beside(
    call: str, stream: Any, operation: Callable[..., Any], in_thread: bool
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """``operation``, which carries out a call that goes on beside the host, and how to sign the handle of the call.

    ``stream``: that on which it follows the calls before it. ``in_thread``: it is carried out in a thread of its own.
    """
    if recorder is None:
        return operation, lambda handle: handle
    return recorder.beside(call, stream, operation, in_thread)


def ended(handle: Any) -> None:
    """The current thread knows that the call is over of which ``handle`` is, if it is of one."""
    if recorder is not None:
        recorder.ended(handle)


def promised(handle: Any, future: Any) -> None:
    """Who waits for ``future`` knows that the call is over of which ``handle`` is."""
    if recorder is not None:
        recorder.promised(handle, future)
