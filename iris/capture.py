"""Which CUDA (or HIP) graph is being captured on a stream. torch says whether, and not which."""

import ctypes
import functools

import torch

from iris.errors import MappingError


@functools.cache
def _query() -> ctypes._CFuncPtr:
    # The driver's own library, which is loaded already: cuStreamGetCaptureInfo of the CUDA Driver API ("Stream
    # Management") and its twin in HIP. What lies behind the id is optional in both.
    if torch.version.hip:
        return ctypes.CDLL("libamdhip64.so").hipStreamGetCaptureInfo
    return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2


def capture_id(stream: int) -> int:
    """A number that is unique to the capture in progress on the stream with this handle."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    arguments = [ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)]
    if not torch.version.hip:
        arguments += [None, None, None]
    error = _query()(*arguments)
    if error:
        raise MappingError(
            f"The driver could not tell which graph stream {stream:#x} is being captured into ({error})."
        )
    return number.value
