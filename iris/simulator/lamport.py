"""Checks that elements that are their own flags (`iris.language.lamport`) are sent to memory that is cleared.

If it is not, and the sender is late, the reader takes what is left there for what it waits for. That is a wrong number
now and then. Here it is an error each time, whoever is late.
"""

import numpy as np

from iris import observer
from iris.compat.interpreter import TensorHandle
from iris.compat.libtriton import load
from iris.errors import UnclearedMemoryError


def check_cleared(pointers: TensorHandle, mask: np.ndarray) -> None:
    """Raise unless the integers that ``pointers`` point to are 0 where ``mask`` is true."""
    where = np.broadcast_to(mask, pointers.data.shape)
    element = np.dtype(f"i{pointers.dtype.scalar.element_ty.primitive_bitwidth // 8}")
    left = load(pointers.data, where, np.zeros(where.shape, element), element)
    if left.any():
        error = UnclearedMemoryError(
            f"{np.count_nonzero(left)} of {np.count_nonzero(where)} words go to memory that holds older ones: "
            "whoever read those has not cleared them"
        )
        raise observer.mistake("race/reuse", error)
