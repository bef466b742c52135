"""Shapes of blocks, each made once.

The language makes a tuple of constants for each tensor and another for its type, and looks through them. The compiler
does so once for each operation of a kernel. The simulator would each time it carries one out, for a sixth of its time.
"""

import functools
from typing import Any

import triton.language as tl

from iris.compat.semantic import replace_unwrap_constexpr, unwrap_constexpr

# Of which most are what the language unwraps, and which hold nothing.
_BARE = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, bool, float, str, type(None)}


def unwrapped(value: Any) -> Any:
    """What the language's own gives, which asks for lists and tuples first."""
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
        # A number of another kind, which the language refuses, may be equal to a size.
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
    # By what the shape is of its type, which is made once, too; of None if it is of no block.
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
