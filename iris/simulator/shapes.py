"""Caches the shapes of blocks, for speed.

For each tensor and for its type, Triton makes a tuple of constants and checks it. The compiler does that once for each
operation of a kernel. The simulator would do it each time that the operation runs, for a sixth of its time. So each
shape is made once here, and equal shapes are the same object.
"""

import functools
from typing import Any

import triton.language as tl

from iris.compat.semantic import replace_unwrap_constexpr, unwrap_constexpr

# The types of most values that Triton unwraps; none of them contains a constant.
_BARE = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, bool, float, str, type(None)}


def unwrapped(value: Any) -> Any:
    """``value`` without the `tl.constexpr` around it or in it. As Triton's own function, but faster for most values."""
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind in _BARE else unwrap_constexpr(value)


def _remember_types() -> None:
    make = tl.block_type.__init__
    known: dict[tuple, tuple] = {}

    @functools.wraps(make)
    def remembered(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple(map(unwrapped, shape))
        # With types: 2.0 is equal to 2, but Triton refuses it as a size.
        key = sizes, tuple(map(type, sizes))
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, text = known[key]
            self.name = f"<{text}, {element_ty}>"
        else:
            make(self, element_ty, shape)
            known[key] = self.shape, self.numel, str(self.shape)

    tl.block_type.__init__ = remembered


def _remember_tensors() -> None:
    make = tl.tensor.__init__
    # By the id of its type's shape, which is made once, too; a scalar's is None.
    known: dict[int, tuple[Any, Any, Any]] = {}

    @functools.wraps(make)
    def remembered(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        shape = type.shape if type.is_block() else None
        found = known.get(id(shape))
        if found is not None:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            _, self.shape, self.numel = found
        else:
            make(self, handle, type)
            known[id(shape)] = shape, self.shape, self.numel

    tl.tensor.__init__ = remembered


def install() -> None:
    """For the life of the process."""
    replace_unwrap_constexpr(unwrapped)
    _remember_types()
    _remember_tensors()
