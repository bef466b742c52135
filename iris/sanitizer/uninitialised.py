"""What memory looks like that nobody has written, so that who reads it is seen.

Somebody may have written just that: only where the analysis knows of no writer is its reading a mistake.
"""

import ctypes
from typing import Any

import numpy as np

# No program means to write it, and a float of it is a large number.
FILLING = 0xCB

# Larger tensors are not filled: memory that is not touched takes no room.
LARGEST = 1 << 26


def fill(address: int, size: int) -> bool:
    """Fill so many bytes; False if they are too many."""
    if size > LARGEST:
        return False
    ctypes.memset(address, FILLING, size)
    return True


def seen_in(values: np.ndarray) -> bool:
    """Whether some of ``values``, four bytes in a row or all that there are, are as `fill` left them."""
    found = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    whole = (found == FILLING).all(axis=1)
    row = min(max(1, 4 // values.itemsize), whole.size)
    return bool(np.lib.stride_tricks.sliding_window_view(whole, row).all(axis=1).any())


def seen_at(address: int, size: int, element: int) -> bool:
    """The same of the ``size`` bytes there, elements of ``element`` bytes."""
    memory: Any = (ctypes.c_uint8 * size).from_address(int(address))
    return seen_in(np.frombuffer(memory, dtype=np.dtype(f"V{element}")))
