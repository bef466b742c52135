"""What torch does not say about captures of CUDA (or HIP) graphs: which capture is in progress, which graphs may share
memory, and how to allocate and load kernels during one.

Graphs of one memory pool, and graphs whose first call is on one stream, are taken for graphs that never run at once:
the first is torch's own rule ("CUDA semantics", "Graph memory management"), the second is that of calls outside a
graph. They are one *line*, and what calls of one line use of the library's memory they share, as calls of a stream do.
Branches of one graph, which run side by side, are distinguished by the streams that they are captured on.
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

# Captures that are remembered: some may be under way at once, in threads.
REMEMBERED = 1024
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, and hipStreamCaptureModeRelaxed


@functools.cache
def _driver() -> ctypes.CDLL:
    # The driver's own library, which is loaded already.
    return ctypes.CDLL("libamdhip64.so" if torch.version.hip else "libcuda.so.1")


def _call(name: str, hip: str, *arguments: object) -> None:
    error = getattr(_driver(), hip if torch.version.hip else name)(*arguments)
    if error:
        raise MappingError(f"The driver could not describe the capture of a graph: {name}() returned {error}.")


def capture_id(stream: int | None) -> int:
    """A number that is unique to the capture in progress on the stream with this handle."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    arguments = [ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)]
    # cuStreamGetCaptureInfo of the CUDA Driver API ("Stream Management") and its twin in HIP. What comes after the id
    # is optional in both.
    if not torch.version.hip:
        arguments += [None, None, None]
    _call("cuStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo", *arguments)
    return number.value


class GraphLine(NamedTuple):
    """Captured calls that follow each other: of the n-th line of graphs, in the n-th branch. Equal on all ranks."""

    graphs: int
    branch: int


Line = int | GraphLine | None
"""What calls follow each other in: a stream, by its handle (None in the simulator), or a line of graphs."""


class Lines:
    """The lines of one group, numbered in order of use, which is the same on every rank of a symmetric program."""

    def __init__(self) -> None:
        self._graphs: dict[object, int] = {}
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
    """The memory pool of this capture, which is in progress on the current stream, or None if torch has set up none.

    None also where the memory is not torch's own, and so nobody says which pool it is of.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return None
    # torch tells the pool of a graph only when it is captured, so ask where a tensor that is made now lies. The
    # snapshot is of so many objects that Python may collect garbage here. Old graphs in it are destroyed then, by which
    # the driver takes this capture for disturbed.
    with relaxed():
        address = torch.empty(1, dtype=torch.uint8, device="cuda").data_ptr()
        for segment in torch.cuda.memory_snapshot():
            if segment["address"] <= address < segment["address"] + segment["total_size"]:
                pool = tuple(segment["segment_pool_id"])
                return pool if any(pool) else None
    return None


@contextlib.contextmanager
def outside_captures(device: torch.device) -> Iterator[None]:
    """What is enqueued and allocated here is part of no graph, also while one is captured on the current stream.

    It is on a stream of its own. What is to be kept is allocated by `iris.cuda_graphs.kept.keep`.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(side_stream(device)), relaxed():
        yield


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Where this thread may allocate, and load kernels, also while a graph is captured.

    The driver refuses what might disturb a capture where the thread does not say that it knows (CUDA Driver API,
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
    """Whether this process has CUDA graphs that were not destroyed.

    From version 2.26 on NCCL waits, when a communicator ends, until no CUDA graph is left in which it was captured, and
    a program's graphs may live until its end (NVIDIA, "CUDA Graph Best Practice for PyTorch", "Process Hang").
    """
    return any(issubclass(type(each), torch.cuda.CUDAGraph) for each in gc.get_objects())


def refuse_in_capture(call: str) -> None:
    """Raise `FirstUseInCaptureError` for a ``call`` in a capture that has to be made before.

    Before anything that the driver refuses there, so that the capture, though not complete, can be ended.
    """
    if not mode.ACTIVE and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise FirstUseInCaptureError(call)


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which the host's own copies do not wait for kernels."""
    # Of high priority, since torch hands out such streams from a pool that few others take theirs from.
    return torch.cuda.Stream(device, priority=-1)
