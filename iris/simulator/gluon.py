"""Gluon's operations on a CPU: the semantic layer that ``gl`` builtins call, with numpy arrays for shared memory.

Most of Gluon is Triton's language with layouts. Layouts say which thread holds what, which has no meaning here: they
are accepted and ignored. (Whether a layout is possible at all, only the compiler can tell.) Shared memory is an array
per program; a memory descriptor is a view of it. Partitions of `warp_specialize` are tasks of the scheduler, so they
may wait for one another.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon.language import _core as gl_core
from triton.language.semantic import TritonSemantic

from iris.simulator import dtypes, grid
from iris.simulator.interpreter import Builder, MissingOperation
from iris.simulator.reductions import make_tensor

# A larger tile that is read twice is data, not a flag.
LARGEST_FLAG = 32

Descriptor = gl_core.shared_memory_descriptor


class Semantic(TritonSemantic):
    """Triton's semantic layer, and what Gluon adds to it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingOperation(name)

    def atomic_cas(self, ptr: tl.tensor, cmp: tl.tensor, val: tl.tensor, sem: str, scope: str) -> tl.tensor:
        # Python's 0 and 1 come as int32; a 64-bit pointer compares 8 bytes.
        element = ptr.dtype.element_ty
        return super().atomic_cas(ptr, self.cast(cmp, element), self.cast(val, element), sem, scope)

    # Layouts --------------------------------------------------------------------------------------------------------

    def arange(self, start: int, end: int, layout: Any = None, **options: Any) -> tl.tensor:
        return super().arange(start, end, **options)

    def full(self, shape: Sequence[int], value: Any, dtype: tl.dtype, layout: Any = None) -> tl.tensor:
        return super().full(shape, value, dtype)

    def histogram(self, input: tl.tensor, num_bins: int, mask: Any, layout: Any = None) -> tl.tensor:  # noqa: A002
        return super().histogram(input, num_bins, mask)

    def convert_layout(self, value: tl.tensor, layout: Any, assert_trivial: bool = False) -> tl.tensor:
        return value

    def set_auto_layout(self, value: tl.tensor, layout: Any) -> tl.tensor:
        return value

    # Warps ----------------------------------------------------------------------------------------------------------

    def num_ctas(self) -> int:
        return 1

    def num_warps(self, generator: Any = None) -> int:
        return grid.current().num_warps

    def warp_specialize(
        self, functions_and_args: Sequence, worker_num_warps: Sequence[int], worker_num_regs: Any, generator: Any = None
    ) -> Any:
        (default, default_args), *workers = functions_and_args
        task = grid.current()
        bodies = [functools.partial(function, *args) for function, args in workers]
        task.launch.fork(task, bodies, worker_num_warps)
        result = default(*default_args)
        task.launch.join(task)
        return result

    # Shared memory: the handle of a descriptor is a view of the array -----------------------------------------------

    def allocate_shared(self, element_ty: tl.dtype, shape: Sequence[int], layout: Any, value: Any) -> Descriptor:
        memory = np.zeros(shape, dtype=dtypes.storage(element_ty))
        descriptor = Descriptor(memory, element_ty, list(shape), layout, list(shape))
        if value is not None:
            self.shared_store(descriptor, value)
        return descriptor

    def shared_load(self, mem_desc: Descriptor, layout: Any = None) -> tl.tensor:
        values = mem_desc.handle.copy()
        if values.size <= LARGEST_FLAG and grid.current().partitioned:
            observe_shared("shared-memory load", mem_desc, values)
        return make_tensor(values, mem_desc.dtype)

    def shared_store(self, mem_desc: Descriptor, value: tl.tensor) -> None:
        if list(value.shape) != list(mem_desc.shape) or value.dtype != mem_desc.dtype:
            raise ValueError(f"a {value.type} cannot be stored to shared memory {mem_desc.dtype} {mem_desc.shape}")
        mem_desc.handle[...] = value.handle.data

    def shared_dealloc(self, mem_desc: Descriptor) -> None:
        pass

    def shared_gather(self, mem_desc: Descriptor, indices: tl.tensor, axis: int) -> tl.tensor:
        return make_tensor(np.take_along_axis(mem_desc.handle, indices.handle.data, axis), mem_desc.dtype)

    def shared_scatter(self, mem_desc: Descriptor, values: tl.tensor, indices: tl.tensor, axis: int) -> None:
        np.put_along_axis(mem_desc.handle, indices.handle.data, values.handle.data, axis)

    def _view(self, mem_desc: Descriptor, view: np.ndarray, layout: Any = None) -> Descriptor:
        shape = list(view.shape)
        return Descriptor(view, mem_desc.dtype, shape, layout or mem_desc.layout, shape)

    def memdesc_index(self, mem_desc: Descriptor, index: Any) -> Descriptor:
        return self._view(mem_desc, mem_desc.handle[_int(index)])

    def memdesc_slice(self, mem_desc: Descriptor, start: int, length: int, dim: int) -> Descriptor:
        every = (slice(None),) * dim
        return self._view(mem_desc, mem_desc.handle[(*every, slice(_int(start), _int(start) + _int(length)))])

    def memdesc_trans(self, mem_desc: Descriptor, order: Sequence[int]) -> Descriptor:
        return self._view(mem_desc, mem_desc.handle.transpose(order))

    def memdesc_reshape(self, mem_desc: Descriptor, shape: Sequence[int]) -> Descriptor:
        view = mem_desc.handle.view()
        view.shape = tuple(shape)  # unlike reshape(), never a copy
        return self._view(mem_desc, view)

    def memdesc_reinterpret(
        self, mem_desc: Descriptor, dtype: tl.dtype, shape: Sequence[int], layout: Any
    ) -> Descriptor:
        bits = mem_desc.handle.reshape(-1).view(dtypes.storage(dtype))
        if not np.shares_memory(bits, mem_desc.handle):
            raise ValueError("only contiguous shared memory can be reinterpreted")
        needed = int(np.prod(shape))
        return Descriptor(bits[:needed].reshape(shape), dtype, list(shape), layout, list(shape))


semantic = Semantic(Builder())


def observe_shared(operation: str, mem_desc: Descriptor, values: np.ndarray) -> None:
    """Tell the scheduler that the program has looked at shared memory."""
    address = np.array([mem_desc.handle.ctypes.data], dtype=np.uint64)
    grid.observe(operation, address, values.reshape(-1), mem_desc.dtype, lambda: False)


def _int(value: Any) -> int:
    return int(tl.core._unwrap_if_constexpr(value))


# Builtins that insist on layouts before they reach the semantic layer ------------------------------------------------


def multiply_add(a: tl.tensor, b: tl.tensor, acc: tl.tensor, *_: Any, **__: Any) -> tl.tensor:
    """``a @ b + acc``: `dot_fma`, `mfma`, `mma_v2` and the like."""
    return tl.tensor(semantic.builder.create_dot(a.handle, b.handle, acc.handle), acc.type)


def buffer_load(ptr, offsets, mask=None, other=None, cache=None):
    return tl.core.load(ptr + offsets, mask=mask, other=other)


def buffer_store(stored_value, ptr, offsets, mask=None, cache=None):
    tl.core.store(ptr + offsets, stored_value, mask=mask)


def buffer_atomic(name: str) -> Callable:
    def atomic(ptr, offsets, value, mask=None, sem=None, scope=None):
        return getattr(tl.core, name)(ptr + offsets, value, mask=mask, sem=sem, scope=scope)

    return atomic


# Barriers in shared memory (mbarrier): one 64-bit word of count, arrivals still pending, and phase -------------------


def barrier_init(mbarrier: Descriptor, count: Any, **_: Any) -> None:
    count = _int(count)
    mbarrier.handle[...] = count << 32 | count << 16


def barrier_arrive(mbarrier: Descriptor, *, count: Any = 1, pred: Any = True, **_: Any) -> None:
    if not pred:
        return
    word = int(mbarrier.handle.flat[0])
    total, pending, phase = word >> 32, word >> 16 & 0xFFFF, word & 1
    pending -= _int(count)
    if pending <= 0:
        pending, phase = total, phase ^ 1
    mbarrier.handle[...] = total << 32 | pending << 16 | phase


def barrier_wait(mbarrier: Descriptor, phase: Any, pred: Any = True, deps: Any = (), **_: Any) -> None:
    """Wait until the phase of this parity is complete, that is, until the barrier is in the other one."""
    while pred and (int(mbarrier.handle.flat[0]) & 1) == _int(phase):
        observe_shared("mbarrier wait", mbarrier, mbarrier.handle.copy())


def barrier_invalidate(mbarrier: Descriptor, **_: Any) -> None:
    mbarrier.handle[...] = 0
