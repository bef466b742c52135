"""Tensor descriptors: a tensor in global memory, blocks of which are read and written by coordinates.

What TMA does with the part of a block that lies outside the tensor (PTX ISA, "Tensors", out-of-bound access):

* A load fills it with zeros or NaN.
* A store writes nothing there. But it writes 16 bytes at a time: the last ones of a row may reach beyond its end. This
  was seen on H100, and Triton says so of its descriptors' `store`.
* A load may begin before the tensor. A store may not: an H100 ends the kernel with "illegal instruction".
"""

from collections.abc import Sequence

import numpy as np
import triton.language as tl

from iris import observer
from iris.compat.interpreter import TensorDescHandle, TensorHandle
from iris.errors import KernelBoundsError
from iris.simulator import dtypes

# Bytes. The base, every stride but the last, and a block's first coordinate in the last dimension are multiples of it
# (CUDA driver API, cuTensorMapEncodeTiled; Triton's own checks). And so much of a row is written at a time.
ALIGNMENT = 16


class TensorMap(TensorDescHandle):
    """A descriptor's handle. Sizes and strides are in elements. ``nan``: a load fills with NaN, not with zeros."""

    def __init__(
        self, base: TensorHandle, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], nan: bool
    ) -> None:
        self.base = base
        self.block_shape = tuple(block_shape)
        self.element: tl.dtype = base.dtype.element_ty
        self.round_f32_to_tf32 = False
        self._shape = tuple(shape)
        self._strides = tuple(strides)
        self._nan = nan
        self._is_written = False
        self._itemsize = dtypes.storage(self.element).itemsize
        if not len(self._shape) == len(self._strides) == len(self.block_shape) > 0:
            raise ValueError(f"shape {shape}, strides {strides} and block shape {block_shape} differ in their lengths")
        if self._strides[-1] != 1:
            raise ValueError(f"the last dimension of a tensor descriptor is not contiguous: strides {strides}")
        steps = [stride * self._itemsize for stride in self._strides[:-1]]
        if any(number % ALIGNMENT for number in (int(base.data.item()), *steps)):
            raise ValueError(f"the base or a stride of a tensor descriptor is not a multiple of {ALIGNMENT} bytes")

    def as_written(self) -> "TensorMap":
        """The descriptor for stores: its rows end at the next multiple of `ALIGNMENT`."""
        unit = ALIGNMENT // self._itemsize
        shape = (*self._shape[:-1], -(-self._shape[-1] // unit) * unit)
        written = TensorMap(self.base, shape, self._strides, self.block_shape, self._nan)
        written._is_written = True
        return written

    def materialize_pointers(self, offsets: Sequence[TensorHandle]) -> tuple[TensorHandle, TensorHandle]:
        """As Triton's interpreter calls `pointers`."""
        return self.pointers([int(offset.data.item()) for offset in offsets])

    def pointers(self, coordinates: Sequence[int]) -> tuple[TensorHandle, TensorHandle]:
        """The addresses of a block's elements, and which of them lie in the tensor."""
        if len(coordinates) != len(self._shape):
            raise ValueError(f"{len(coordinates)} coordinates for a tensor descriptor of {len(self._shape)} dimensions")
        if coordinates[-1] * self._itemsize % ALIGNMENT:
            raise ValueError(f"the last of the coordinates {coordinates} is not a multiple of {ALIGNMENT} bytes")
        if self._is_written and min(coordinates) < 0:
            error = KernelBoundsError(
                f"a block is stored at {list(coordinates)}: TMA stores none that begins before the tensor, though "
                "it loads such blocks. Begin at 0 or later, with a smaller block, or store with pointers and a mask"
            )
            raise observer.mistake("bounds", error)
        addresses = np.array(int(self.base.data.item()), dtype=np.int64)
        inside = np.array(True)
        for axis, (first, size, stride) in enumerate(zip(coordinates, self._shape, self._strides, strict=True)):
            length = self.block_shape[axis]
            along = np.arange(first, first + length, dtype=np.int64)
            index = along.reshape([length if i == axis else 1 for i in range(len(coordinates))])
            addresses = addresses + index * (stride * self._itemsize)
            inside = inside & (index >= 0) & (index < size)
        return TensorHandle(addresses.view(np.uint64), self.base.dtype.scalar), TensorHandle(inside, tl.int1)

    def fill(self) -> TensorHandle:
        """What a block holds outside the tensor."""
        value = dtypes.poison(self.element) if self._nan else dtypes.storage(self.element).type(0)
        return TensorHandle(np.full(self.block_shape, value), self.element)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """``values`` as a load delivers them: float32 as the nearest tf32, ties away from zero, if so asked."""
        if not self.round_f32_to_tf32 or self.element != tl.float32:
            return values
        # tf32 keeps 10 of 23 bits of the fraction (PTX ISA, cvt.rna.tf32.f32). Infinity and NaN stay.
        bits = np.ascontiguousarray(values).view(np.uint32)
        nearest = ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)
        return np.where(np.isfinite(values), nearest, values)
