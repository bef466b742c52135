"""Captures of CUDA (or HIP) graphs: what torch does not say about them, and how to allocate and load kernels in one.

Which captured calls may share the library's memory? Calls outside graphs share it if they are on one stream, as they
then run one after the other. For calls in graphs this file finds a *line* that stands for the stream. Two graphs are of
one line if they never run at once:

* graphs of one memory pool, by torch's own rule ("CUDA semantics", "Graph memory management");
* graphs whose first call was captured on one stream, as for calls outside a graph.

Branches of one graph run side by side. They are told apart by the streams that they are captured on.
"""

import contextlib
import ctypes
import functools
import gc
from collections.abc import Iterator
from typing import NamedTuple

import torch

from iris import mode
from iris.errors import FirstUseInCaptureError, MappingError

# How many captures are remembered. Several may be under way at once, in threads.
REMEMBERED = 1024
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, and hipStreamCaptureModeRelaxed
CAPTURE_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, and hipErrorStreamCaptureImplicit


@functools.cache
def _driver() -> ctypes.CDLL:
    # The driver's own library, which is loaded already.
    return ctypes.CDLL("libamdhip64.so" if torch.version.hip else "libcuda.so.1")


def _call(name: str, hip: str, *arguments: object) -> None:
    _check(name, getattr(_driver(), hip if torch.version.hip else name)(*arguments))


def _check(name: str, error: int) -> None:
    if error:
        raise MappingError(f"The driver could not describe the capture of a graph: {name}() returned {error}.")


def capture_id(stream: int | None) -> int:
    """The id of the capture in progress on the stream with this handle, which no other capture has."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    arguments = [ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)]
    # cuStreamGetCaptureInfo of the CUDA Driver API ("Stream Management") and its counterpart in HIP. What it returns
    # after the id is optional; HIP's has no such arguments.
    if not torch.version.hip:
        arguments += [None, None, None]
    _call("cuStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo", *arguments)
    return number.value


def is_capturing(stream: int) -> bool:
    """Whether the stream with this handle is being captured, so that an event on it would be the graph's.

    A capture that a mistake made invalid lasts until it is ended. Any thread may ask.
    """
    status = ctypes.c_int()
    function = "hipStreamIsCapturing" if torch.version.hip else "cuStreamIsCapturing"
    error = getattr(_driver(), function)(ctypes.c_void_p(stream), ctypes.byref(status))
    # The legacy default stream waits for all streams that were not made "non-blocking". While one of these is captured,
    # nothing can be enqueued on it, and the driver refuses to answer, too (CUDA Driver API, cuStreamIsCapturing).
    if error == CAPTURE_IMPLICIT:
        return True
    _check(function, error)
    return status.value != 0


def record_event(stream: torch.cuda.Stream, events: list[torch.cuda.Event]) -> bool:
    """Append an event after all work on ``stream`` to ``events``; return False if the stream is being captured.

    An event of a capture is for streams of that capture alone: another stream that waits for it joins the capture, and
    who queries it makes the capture invalid (CUDA C++ Programming Guide, "Creating a Graph Using Stream Capture").
    """
    if is_capturing(stream.cuda_stream):
        return False
    event = stream.record_event()
    # Another thread may have begun a capture before the event.
    if is_capturing(stream.cuda_stream):
        return False
    events.append(event)
    return True


class GraphLine(NamedTuple):
    """Stands for a stream in captured calls: the number of a line of graphs, and of a branch. Equal on all ranks."""

    graphs: int
    branch: int


Line = int | GraphLine | None
"""Calls with the same `Line` run one after the other: the handle of a stream (None in the simulator), or of graphs."""


class Lines:
    """The lines of one group's graphs, numbered in the order of their first use. All ranks use them in one order."""

    def __init__(self) -> None:
        # The number of a line, by memory pool and by stream.
        self._graphs: dict[object, int] = {}
        # By capture: the number of its line, and its branches by stream.
        self._captures: dict[int, tuple[int, dict[int | None, GraphLine]]] = {}
        self._made = 0

    def find(self, stream: int | None) -> GraphLine:
        """The line of a call that is being captured on the stream with this handle."""
        capture = capture_id(stream)
        if capture not in self._captures:
            if len(self._captures) == REMEMBERED:
                del self._captures[next(iter(self._captures))]
            self._captures[capture] = self._find_graphs(stream, capture_pool(capture)), {}
        graphs, branches = self._captures[capture]
        if stream not in branches:
            branches[stream] = GraphLine(graphs, len(branches))
        return branches[stream]

    def forget(self) -> None:
        """Forget all lines: graphs that are captured from now on belong to new ones."""
        self._graphs, self._captures = {}, {}

    def _find_graphs(self, stream: int | None, pool: tuple[int, int] | None) -> int:
        known = self._graphs.get(pool, self._graphs.get(stream))
        if known is None:
            known, self._made = self._made, self._made + 1
        if pool is not None:
            self._graphs[pool] = known
        self._graphs.setdefault(stream, known)
        return known


@functools.lru_cache(REMEMBERED)
def capture_pool(capture: int) -> tuple[int, int] | None:
    """The memory pool of this capture, which is in progress on the current stream; None if it has none.

    None also with another allocator than torch's native one, which does not say which pool memory is from.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return None
    # torch tells the pool of a graph only after the capture. So allocate a tensor, and look up which pool its memory is
    # from. The snapshot makes so many objects that Python may collect garbage here. If that destroys old graphs, the
    # driver invalidates this capture, unless the thread is `relaxed`.
    with relaxed():
        address = torch.empty(1, dtype=torch.uint8, device="cuda").data_ptr()
        for segment in torch.cuda.memory_snapshot():
            if segment["address"] <= address < segment["address"] + segment["total_size"]:
                pool = tuple(segment["segment_pool_id"])
                return pool if any(pool) else None
    return None


@contextlib.contextmanager
def outside_captures(device: torch.device) -> Iterator[None]:
    """In this context nothing becomes part of a graph, also while one is captured on the current stream.

    The current stream is another one here. Memory that outlives the context is allocated by
    `iris.cuda_graphs.kept.keep`.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(side_stream(device)), relaxed():
        yield


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """In this context the thread may allocate memory and load kernels, also while a graph is captured.

    In other capture modes than "relaxed" the driver refuses such calls (CUDA Driver API,
    cuThreadExchangeStreamCaptureMode).
    """
    mode = ctypes.c_int(RELAXED)
    name = "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"
    _call(*name, ctypes.byref(mode))
    try:
        yield
    finally:
        _call(*name, ctypes.byref(mode))


def a_graph_lives() -> bool:
    """Whether this process has CUDA graphs that have not been destroyed.

    From version 2.26 on, ending an NCCL communicator waits until all CUDA graphs are destroyed that have captured it. A
    program's graphs may live until its end (NVIDIA, "CUDA Graph Best Practice for PyTorch", "Process Hang").
    """
    return any(issubclass(type(each), torch.cuda.CUDAGraph) for each in gc.get_objects())


def refuse_in_capture(call: str) -> None:
    """Raise `FirstUseInCaptureError` if a graph is being captured. ``call``: what must first be called outside of it.

    Called before anything that the driver refuses in a capture, so that the program can still end the capture.
    """
    if not mode.ACTIVE and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise FirstUseInCaptureError(call)


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for the library's own copies, which then do not wait for kernels of the program."""
    # torch hands out streams from a pool, in turns. Few take high-priority ones, so this one is hardly shared.
    return torch.cuda.Stream(device, priority=-1)
