"""Records what the host of a rank does: accesses by torch, collectives and messages, and memory that it allocates.

`HostAccesses` and `Meetings` see what torch does, and call the methods here; so do the heap and the groups of ranks,
through `iris.observer`. A *meeting* is a point where ranks wait for each other: a collective, or a message.
"""

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from iris.heap import symmetric
from iris.heap.lifetime import Life
from iris.observer import READ, WRITE
from iris.sanitizer import bounds, loops, uninitialised, waits
from iris.sanitizer.calls import Call
from iris.sanitizer.deadlock import Liveness
from iris.sanitizer.distributed_calls import goes_to_the_program
from iris.sanitizer.event_log import EventLog
from iris.sanitizer.events import (
    PRIVATE,
    Accessed,
    Allocated,
    Awaiting,
    CollectiveDone,
    CollectiveEnter,
    Place,
    Renewed,
    Synchronised,
)
from iris.sanitizer.host import HostAccesses, runs
from iris.sanitizer.polls import HostPolls
from iris.sanitizer.spaces import Spaces
from iris.sanitizer.threads import Threads
from iris.simulator import lines
from iris.simulator.tasks import MOST_FLAGS

# The dtypes of flags, as `DeviceContext.wait` takes them.
_FLAGS = (torch.int32, torch.int64, torch.uint32, torch.uint64)


class HostRecorder:
    """The half of `iris.sanitizer.recorder.Recorder` that is for the host."""

    log: EventLog
    threads: Threads
    liveness: Liveness
    bounds: bounds.Bounds
    _spaces: Spaces
    _polled: dict
    _polls: HostPolls
    _host: HostAccesses
    _first_sight = threading.Lock()
    _place: Callable[[], int]
    diagnose: Callable[[str, str, int | None], None]

    def host_accessed(self, addresses: np.ndarray, size: int, element: int, kind: int, blank: bool = False) -> None:
        """The host has accessed ``size`` bytes at each of ``addresses``, by torch.

        ``element``: the bytes of an element, or 0 if the values are not used. ``blank``: it wrote zeros.
        """
        place, thread = self._place(), self.threads.current()
        for spans in self._spaces.spans(addresses, size):
            if spans.space[0] != PRIVATE:
                self.bounds.check(self.diagnose, spans, kind, place)
                undefined = element and any(uninitialised.seen_at(address, size, element) for address in addresses)
                self.log.add(Accessed(0, thread, place, spans, kind, bool(undefined), blank))
                if kind == READ:
                    self._polls.looked(int(addresses[0]), spans, lines.user_line(sys._getframe(1)))
            elif self.threads.several() and size * len(addresses) <= uninitialised.LARGEST:
                self.log.add(Accessed(0, thread, place, spans, kind, False, blank))
        if kind != READ:
            self.liveness.changed()

    def may_be_flag(self, tensor: Any) -> bool:
        """Whether a read of this tensor may be a look at flags: at a single one, or at several in a loop that waits."""
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _FLAGS or not 0 < tensor.numel() <= MOST_FLAGS:
            return False
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
        if self._spaces.private(np.array([tensor.data_ptr()], dtype=np.int64)).size:
            return False
        return tensor.numel() == 1 or self._is_in_wait()

    @staticmethod
    def _is_in_wait() -> bool:
        """Whether the program is in a loop that ends by what it sees, or in a function that such a loop calls."""
        line = lines.user_line(sys._getframe(2))
        if line is None or loops.is_in_wait(line[0].co_filename, line[1]):
            return line is not None
        return any(loops.ends_wait_at(code.co_filename, at) for code, at in lines.user_lines(sys._getframe(2)))

    def host_looked(self, number: int, tensor: torch.Tensor) -> None:
        """The host has read a tensor that may hold flags, by torch, while it held ``number``."""
        place, thread, (addresses, size) = self._place(), self.threads.current(), runs(tensor)
        values = b"".join(ctypes.string_at(address, size) for address in addresses.tolist())
        for spans in self._spaces.spans(addresses, size):
            self._polls.looked(tensor.data_ptr(), spans, lines.user_line(sys._getframe(1)))
        key, found = (thread, place, tensor.data_ptr()), (self.log.changes(), values, None)
        if self._polled.get(key) == found:
            return
        self._polled[key] = found
        value = int.from_bytes(values, sys.byteorder, signed=True) if tensor.numel() == 1 else None
        wait = waits.wait_of_host(sys._getframe(1)) if tensor.numel() == 1 else None
        undefined = any(uninitialised.seen_at(address, size, tensor.element_size()) for address in addresses)
        for spans in self._spaces.spans(addresses, size):
            self.bounds.check(self.diagnose, spans, READ, place)
            self.log.add(
                Synchronised(
                    number,
                    0,
                    thread,
                    place,
                    spans,
                    READ,
                    releases=False,
                    acquires=True,
                    scope="sys",
                    before=value,
                    after=value,
                    undefined=undefined,
                    wait=wait,
                    once=not self._is_in_wait(),
                )
            )

    def numbered(self) -> contextlib.AbstractContextManager[int]:
        """Around an operation that orders ranks: see `EventLog.numbered`."""
        return self.log.numbered()

    def changed(self) -> None:
        """Memory has been written that others may wait for."""
        self.liveness.changed()

    def renewed(self, address: int, size: int) -> None:
        """Torch has allocated this memory. It matters only if it is private."""
        (spans,) = self._spaces.spans(np.array([address], dtype=np.int64), size)
        if spans.space[0] == PRIVATE:
            self.log.add(Renewed(spans))

    def seen(self, tensor: torch.Tensor) -> None:
        """This tensor is used. At first sight its memory is new: not all tensors are made by torch's dispatcher."""
        if self.threads.several():
            storage: Any = tensor.untyped_storage()
            # If two threads see it at once, it may be noted only once, and before either goes on. A note that comes
            # after an access would make the analysis forget that access, and hide a race.
            with self._first_sight:
                if not hasattr(storage, "iris_seen"):
                    storage.iris_seen = True
                    self.renewed(storage.data_ptr(), storage.nbytes())

    def begun(self, name: str, stream: Any = None) -> Call:
        """The host makes an asynchronous call of ``torch.distributed``. ``stream``: the one that it is on, if any."""
        line = lines.as_line(lines.user_line(sys._getframe(1)))
        place = self.log.number_of(Place(None, line, call=f"torch.distributed's {name}"))
        return self.threads.begin(place, stream)

    def beside(
        self, name: str, stream: Any, operation: Callable[..., Any], in_thread: bool
    ) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
        """See `iris.observer.beside`."""
        if not goes_to_the_program(sys._getframe(1)):
            return operation, lambda handle: handle
        call = self.begun(name, stream)

        def carry_out(*args: Any) -> Any:
            with self.threads.watched() if in_thread else contextlib.nullcontext(), call.carried_out():
                return operation(*args)

        def sign(handle: Any) -> Any:
            self._host.meetings.begin(handle, call)
            return handle

        return carry_out, sign

    def ended(self, handle: Any) -> None:
        """The current thread has learned that the call of this handle is over."""
        self._host.meetings.end(handle, lambda: True, only_looks=True)

    def promised(self, handle: Any, future: Any) -> None:
        """``future`` completes with the call of this handle."""
        self._host.meetings.promised([handle], future)

    def collective_entered(self, key: tuple) -> None:
        """The host enters a collective or sends a message, and does not wait for it here."""
        self.log.add(CollectiveEnter(key, self.liveness.deadlock_found(), self.threads.current()))

    @contextlib.contextmanager
    def meeting(self, key: tuple, ranks: tuple[int, ...], text: str) -> Iterator[None]:
        """Around a meeting of ``ranks``: the host enters, and waits for the others. ``text``: what it is for."""
        self.collective_entered(key)
        with self.awaiting(key, ranks, text):
            yield
        self.collective_done(key, ranks, len(ranks))

    @contextlib.contextmanager
    def sending(self, key: tuple, ranks: tuple[int, ...], text: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """The host sends ``tensors`` over a rail. While this lasts it waits until ``ranks`` have sent, too."""
        self._host.touch(tensors, READ, uses=False)
        self.collective_entered(key)
        with self.awaiting(key, ranks, text):
            yield

    def received(self, key: tuple, sources: tuple[int, ...], receivers: int, tensors: Sequence[torch.Tensor]) -> None:
        """``tensors`` have received what ``sources`` have sent. ``receivers``: see `CollectiveDone`."""
        if sources:
            self.collective_done(key, sources, receivers)
        self._host.touch(tensors, WRITE, uses=False)

    def collective_done(self, key: tuple, ranks: tuple[int, ...], receivers: int) -> None:
        """What ``ranks`` did before they entered or sent happens before what follows: see `CollectiveDone`."""
        self.log.add(CollectiveDone(key, ranks, receivers, self.threads.current()))

    @contextlib.contextmanager
    def awaiting(self, key: tuple, ranks: tuple[int, ...], text: str) -> Iterator[None]:
        """While this lasts the host waits until all ``ranks`` have entered or sent; without ranks, until any has."""
        self.log.add(Awaiting(key, ranks, self._place(), text, self.liveness.deadlock_found()))
        try:
            with self.threads.meeting():
                self.settled()
                yield
        finally:
            self.liveness.on_host()

    def settled(self) -> None:
        """A thread has begun or ended to wait. If one is in a meeting, the rank waits unless another may still help."""
        if self.threads.any_in_meeting():
            self.liveness.on_host() if self.threads.may_help(set()) else self.liveness.meets()

    def allocated(self, address: int, size: int, text: str, undefined: bool) -> None:
        if not size:
            return
        undefined = undefined and uninitialised.fill(address, size)
        (spans,) = self._spaces.spans(np.array([address], dtype=np.int64), size)
        self.bounds.learn(spans)
        self.log.add(Allocated(spans, text, self._place(), undefined))

    def kernel_argument(self, name: str, tensor: torch.Tensor) -> None:
        """A launch begins that has this argument. If it is private memory, a report calls it by the argument's name."""
        self.used(tensor, f"gives a kernel as {name!r}")
        if tensor.numel() and tensor.layout == torch.strided:
            self.seen(tensor)
            begin, size, shape = tensor.data_ptr(), tensor.nbytes, tuple(tensor.shape)
            if not tensor.is_contiguous():
                storage = tensor.untyped_storage()
                begin, size, shape = storage.data_ptr(), storage.nbytes(), (storage.nbytes() // tensor.element_size(),)
            (spans,) = self._spaces.spans(np.array([begin], dtype=np.int64), size)
            if spans.space[0] == PRIVATE:
                text = f"{symmetric.tensor_text(shape, tensor.dtype)}, the argument {name!r},"
                self.log.add(Allocated(spans, text, self._place(), False, not self.threads.several()))

    def used(self, tensor: torch.Tensor, verb: str) -> None:
        """This tensor is used. Report it if it was freed and another tensor has its memory: accesses look right then.

        ``verb``: what is done, for the report.
        """
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        life = getattr(storage, "iris_owner", None)
        if not isinstance(life, Life) or not life.freed:
            return
        (spans,) = self._spaces.spans(np.array([storage.data_ptr()], dtype=np.int64), storage.nbytes())
        heap, offset = symmetric.heap_named(spans.space[0]), int(spans.begins[0])
        owner = None if heap is None else heap.successor(life.number, offset, storage.nbytes())
        if owner is not None:
            text = symmetric.tensor_text(tensor.shape, tensor.dtype)
            self.diagnose("freed", f"{verb} {text}, which has been freed: {owner.origin} has its memory", self._place())
