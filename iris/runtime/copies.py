"""Copies on a stream by the driver's own call, which takes the host less time than torch's `copy_` does."""

import ctypes
import functools
from collections.abc import Callable

import torch

Copy = Callable[[int, int, int, int], None]
"""Enqueues a copy to an address, from another one, of so many bytes, on the stream with this handle."""


@functools.cache
def copier() -> Copy:
    """The driver's, between any two places in memory that this GPU reaches.

    What it raises is no error of Iris': then a call would count as refused before it began, and peers would wait.
    """
    # cuMemcpyDtoDAsync of the CUDA Driver API ("Memory Management") and its twin in HIP. The library is loaded already.
    if torch.version.hip:
        enqueue = ctypes.CDLL("libamdhip64.so").hipMemcpyDtoDAsync
    else:
        enqueue = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    enqueue.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def copy(to: int, begin: int, size: int, stream: int) -> None:
        error = enqueue(to, begin, size, stream)
        if error:
            raise RuntimeError(f"The driver could not copy {size} bytes from {begin:#x} to {to:#x}: error {error}.")

    return copy
