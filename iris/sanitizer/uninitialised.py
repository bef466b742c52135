"""Finds reads of memory that nobody has written: new memory is filled with a pattern, and reads look for it.

A program may have written just that pattern. So a read is a mistake only if the analysis knows of no write, too.
"""

import ctypes
from typing import Any

import numpy as np

# The byte of the pattern. Programs hardly ever write it, and floats of it are large numbers.
PATTERN = 0xCB

# Larger tensors, in bytes, are not filled: their pages take no room before they are touched.
LARGEST = 1 << 26


def fill(address: int, size: int) -> bool:
    """Fill so many bytes with the pattern; returns False, and does nothing, if they are too many."""
    if size > LARGEST:
        return False
    ctypes.memset(address, PATTERN, size)
    return True


def seen_in(values: np.ndarray) -> bool:
    """Whether some of ``values`` have the pattern: four bytes in a row, or all if there are fewer."""
    found = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    whole = (found == PATTERN).all(axis=1)
    row = min(max(1, 4 // values.itemsize), whole.size)
    return bool(np.lib.stride_tricks.sliding_window_view(whole, row).all(axis=1).any())


def seen_at(address: int, size: int, element: int) -> bool:
    """The same for the ``size`` bytes at ``address``, which are elements of ``element`` bytes."""
    memory: Any = (ctypes.c_uint8 * size).from_address(int(address))
    return seen_in(np.frombuffer(memory, dtype=np.dtype(f"V{element}")))
