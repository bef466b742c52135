"""Matrix products in registers, and AMD's own builtins: buffer loads, stores and atomics, `slice`, compiler hints."""

from collections.abc import Callable, Sequence
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl

from iris.errors import NotInSimulatorError
from iris.simulator.reductions import make_tensor
from iris.simulator.semantic import integer, semantic


def multiply_add(a: tl.tensor, b: tl.tensor, acc: tl.tensor, *_: Any, **__: Any) -> tl.tensor:
    """``a @ b + acc``: `dot_fma`, `mfma`, `mma_v2` and the like."""
    return tl.tensor(semantic.builder.create_dot(a.handle, b.handle, acc.handle), acc.type)


def unavailable(name: str) -> Callable:
    """A stand-in for a builtin that the simulator lacks."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotInSimulatorError(name)

    return refuse


def sliced(source: tl.tensor, shape: Sequence[Any], offsets: Sequence[Any]) -> tl.tensor:
    """`amd.slice`: a block of ``source``, which is in registers."""
    part = tuple(slice(integer(first), integer(first) + integer(n)) for first, n in zip(offsets, shape, strict=True))
    values = source.handle.data[part]
    if list(values.shape) != list(map(integer, shape)):
        raise ValueError(f"a slice {shape} at {offsets} is not within a tensor {source.shape}")
    return make_tensor(values, source.dtype)


def sched_barrier(allow: Any = None) -> None:
    """Does nothing: here no instruction is moved."""


def buffer_load(ptr: Any, offsets: Any, mask: Any = None, other: Any = None, cache: Any = None) -> Any:
    """Where the mask is off, ``other``, or the zeros that a buffer load finds out of range.

    (AMD Instinct MI300 ISA, "Buffer Addressing", "Range checking"; the compiler moves what is masked out of range.)
    """
    if mask is not None and other is None:
        other = 0
    return tl.load(ptr + offsets, mask=mask, other=other)


def buffer_store(stored_value: Any, ptr: Any, offsets: Any, mask: Any = None, cache: Any = None) -> None:
    tl.store(ptr + offsets, stored_value, mask=mask)


def buffer_atomic(name: str) -> Callable:
    def atomic(ptr: Any, offsets: Any, value: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Any:
        return getattr(tl, name)(ptr + offsets, value, mask=mask, sem=sem, scope=scope)

    return atomic


def replacements() -> dict[Any, Callable]:
    """What stands in for which of Gluon's builtins."""
    replaced: dict[Any, Callable] = {gl.dot_fma: multiply_add, gl.nvidia.ampere.mma_v2: multiply_add}
    if hasattr(gl.amd, "slice"):  # not Triton 3.6
        replaced[gl.amd.slice] = sliced
    if hasattr(gl.amd, "hint"):  # Triton 3.9
        replaced[gl.amd.hint.sched_barrier] = sched_barrier
    for module in (gl.amd.cdna3, gl.amd.cdna4):
        for name, value in vars(module).items():
            if name in ("scaled_downcast", "get_scaled_upcast_fp4_scale_layout"):
                replaced[value] = unavailable(name)
            elif name == "mfma":
                replaced[value] = multiply_add
            elif name in ("buffer_load", "buffer_store"):
                replaced[value] = buffer_load if name == "buffer_load" else buffer_store
            elif name.startswith("buffer_atomic_"):
                replaced[value] = buffer_atomic(name.removeprefix("buffer_"))
    return replaced
