"""Locks of the program: a thread that takes one acquires what was released when it was last given back.

The methods of a `threading.Lock` are in C, and cannot be replaced. So while the sanitizer records, a lock that the
program makes is of a class here. Locks of the library, of torch and of the standard library stay as they are. What they
order for the program is recorded by what they are used for (`interceptors`).
"""

import _thread
import sys
import threading
from types import FrameType
from typing import Any, Protocol

from iris.simulator import lines


class _Threads(Protocol):
    """The part of `iris.sanitizer.threads.Threads` that locks use."""

    def acquire(self, thing: Any) -> None: ...
    def release(self, thing: Any) -> None: ...


threads: _Threads | None = None
"""Records the acquires and releases of locks, while the sanitizer records."""


class _InterceptedLock:
    """A lock whose calls are recorded. ``_lock``: the one in C."""

    _lock: Any

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken and threads is not None:
            threads.acquire(self)
        return taken

    def release(self) -> None:
        if threads is not None:
            threads.release(self)
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, *error: Any) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        if name == "_lock":
            raise AttributeError(name)
        return getattr(self._lock, name)

    def __repr__(self) -> str:
        return repr(self._lock)


class Lock(_InterceptedLock):
    def __new__(cls) -> Any:
        return super().__new__(cls) if _is_programs(sys._getframe(1)) else _thread.allocate_lock()

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()


class RLock(_InterceptedLock):
    def __new__(cls) -> Any:
        return super().__new__(cls) if _is_programs(sys._getframe(1)) else _thread.RLock()

    def __init__(self) -> None:
        self._lock = _thread.RLock()


# Packages whose locks stay as they are.
_OTHERS = frozenset({"iris", "torch", "triton", *sys.stdlib_module_names})

_REPLACED = {"Lock": Lock, "RLock": RLock}
_BEFORE = {name: getattr(threading, name) for name in _REPLACED}


def replace() -> None:
    for name, new in _REPLACED.items():
        setattr(threading, name, new)


def restore() -> None:
    for name, before in _BEFORE.items():
        setattr(threading, name, before)


def _is_programs(frame: FrameType) -> bool:
    """Whether the program makes a lock in this frame."""
    return lines.package_of(frame) not in _OTHERS
