"""The semantic layer: what the builtins of ``tl`` and ``gl`` call. It calls the builder (`iris.simulator.interpreter`).

It is Triton's semantic layer with Gluon's operations added. There is one, `semantic`, for both languages.

* Layouts say which thread holds which element. That has no meaning here, so they are accepted and ignored. (Only the
  compiler can tell whether a layout is possible at all.)
* Shared memory is a numpy array of the program's. The handle of a memory descriptor is a view of it.
* Partitions of `warp_specialize` are tasks of the scheduler, so they may wait for one another.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl

from iris import observer
from iris.compat.semantic import TritonSemantic
from iris.errors import KernelBoundsError
from iris.simulator import dtypes, tasks
from iris.simulator.asynchronous import Groups
from iris.simulator.interpreter import Builder, MissingOperation
from iris.simulator.legality import check_swap
from iris.simulator.reductions import make_tensor
from iris.simulator.shapes import unwrapped
from iris.simulator.shared_memory import LARGEST_FLAG

SharedMemory: TypeAlias = gl.shared_memory_descriptor
"""A view of a program's shared memory; its handle is a view of the array."""


class _OutOfRange(np.ndarray):
    """What an index out of range gives. Only an access is an error: a predicate may be off that guards it."""

    index: int | None = None
    count: int | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.index, self.count = getattr(source, "index", None), getattr(source, "count", None)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        text = f"index {self.index} of {self.count} in shared memory (`%` of a negative number is negative)"
        raise observer.mistake("bounds", KernelBoundsError(text))

    __setitem__ = copy = _refuse
    flat = ctypes = property(_refuse)


# If both operands have one of these types, every binary operation keeps it: nothing is promoted. By id, as there is one
# object for each type.
_SIGNED = (tl.int8, tl.int16, tl.int32, tl.int64)
_UNSIGNED = (tl.uint8, tl.uint16, tl.uint32, tl.uint64)
_UNPROMOTED = {id(dtype) for dtype in (tl.int1, *_SIGNED, *_UNSIGNED, tl.float32, tl.float64)}


class Semantic(TritonSemantic):
    """Triton's semantic layer, and what Gluon adds to it."""

    # Fast paths. The compiler calls these two once for each operation of a kernel, the simulator each time that the
    # operation runs.

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> tuple:
        if type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and id(lhs.dtype) in _UNPROMOTED:
            return self.broadcast_impl_value(lhs, rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **kwargs)

    def broadcast_impl_value(self, lhs: tl.tensor, rhs: tl.tensor) -> tuple:
        if lhs.shape is rhs.shape:  # `iris.simulator.shapes` makes each once
            return lhs, rhs
        return super().broadcast_impl_value(lhs, rhs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingOperation(name)

    def atomic_cas(self, ptr: tl.tensor, cmp: tl.tensor, val: tl.tensor, sem: str, scope: str) -> tl.tensor:
        check_swap(ptr, cmp=cmp, val=val)
        # They are of the element's size, but may have a sign that it has not.
        element = ptr.dtype.element_ty
        return super().atomic_cas(ptr, self.cast(cmp, element), self.cast(val, element), sem, scope)

    def _has_native_tma(self) -> bool:
        return True

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
        return tasks.current().num_warps

    def warp_specialize(
        self, functions_and_args: Sequence, worker_num_warps: Sequence[int], worker_num_regs: Any, generator: Any = None
    ) -> Any:
        (default, default_args), *workers = functions_and_args
        task = tasks.current()
        bodies = [functools.partial(function, *args) for function, args in workers]
        task.launch.fork(task, bodies, worker_num_warps)
        result = default(*default_args)
        task.launch.join(task)
        return result

    # Shared memory: the handle of a descriptor is a view of the array -----------------------------------------------

    def allocate_shared(self, element_ty: tl.dtype, shape: Sequence[int], layout: Any, value: Any) -> SharedMemory:
        memory = np.full(shape, dtypes.poison(element_ty))  # on a GPU, whatever was there before
        descriptor = SharedMemory(memory, element_ty, list(shape), layout, list(shape))
        if value is not None:
            self.shared_store(descriptor, value)
        return descriptor

    def shared_load(self, mem_desc: SharedMemory, layout: Any = None) -> tl.tensor:
        values = mem_desc.handle.copy()
        checker, task = tasks.shared_memory_checker()
        if checker is not None and not _may_be_flag(task, mem_desc):
            checker.reads(task, mem_desc.handle)
        elif checker is not None:
            _used_flag(mem_desc, writes=False)
            address = np.array([mem_desc.handle.ctypes.data], dtype=np.uint64)
            tasks.observe("shared-memory load", address, values.reshape(-1), mem_desc.dtype, lambda: False)
        return make_tensor(values, mem_desc.dtype)

    def shared_store(self, mem_desc: SharedMemory, value: tl.tensor) -> None:
        if list(value.shape) != list(mem_desc.shape) or value.dtype != mem_desc.dtype:
            raise ValueError(f"a {value.type} cannot be stored to shared memory {mem_desc.dtype} {mem_desc.shape}")
        checker, task = tasks.shared_memory_checker()
        flag = _may_be_flag(task, mem_desc)
        if checker is not None and not flag:
            checker.writes(task, mem_desc.handle)
        mem_desc.handle[...] = value.handle.data
        if flag:
            _used_flag(mem_desc, writes=True)

    def shared_dealloc(self, mem_desc: SharedMemory) -> None:
        pass

    def shared_gather(self, mem_desc: SharedMemory, indices: tl.tensor, axis: int) -> tl.tensor:
        index = _along(mem_desc, indices, axis)
        values = mem_desc.handle[index].copy()
        checker, task = tasks.shared_memory_checker()
        if checker is not None and not _may_be_flag(task, mem_desc):
            checker.reads(task, mem_desc.handle, index=index)
        return make_tensor(values, mem_desc.dtype)

    def shared_scatter(self, mem_desc: SharedMemory, values: tl.tensor, indices: tl.tensor, axis: int) -> None:
        values, indices = self.broadcast_impl_value(values, indices)
        index = _along(mem_desc, indices, axis)
        checker, task = tasks.shared_memory_checker()
        if checker is not None and not _may_be_flag(task, mem_desc):
            checker.writes(task, mem_desc.handle, index=index)
        mem_desc.handle[index] = values.handle.data

    def _view(self, mem_desc: SharedMemory, view: np.ndarray, layout: Any = None) -> SharedMemory:
        shape = list(view.shape)
        return SharedMemory(view, mem_desc.dtype, shape, layout or mem_desc.layout, shape)

    def memdesc_index(self, mem_desc: SharedMemory, index: Any) -> SharedMemory:
        number, order = integer(index), getattr(mem_desc.layout, "order", ())
        if len(order) == len(mem_desc.shape):
            raise ValueError(
                f"shared memory {mem_desc.shape} cannot be indexed: its layout, of order {order}, has that dimension. "
                "Give it a layout of the dimensions after the first, which is all that compiles"
            )
        if 0 <= number < len(mem_desc.handle):
            return self._view(mem_desc, mem_desc.handle[number])
        nowhere = np.full(mem_desc.shape[1:], dtypes.poison(mem_desc.dtype)).view(_OutOfRange)
        nowhere.index, nowhere.count = number, len(mem_desc.handle)
        return self._view(mem_desc, nowhere)

    def memdesc_slice(self, mem_desc: SharedMemory, start: int, length: int, dim: int) -> SharedMemory:
        first, end = integer(start), integer(start) + integer(length)
        if not 0 <= first <= end <= mem_desc.shape[dim]:
            text = f"elements {first} to {end} of {mem_desc.shape[dim]} in shared memory"
            raise observer.mistake("bounds", KernelBoundsError(text))
        return self._view(mem_desc, mem_desc.handle[(slice(None),) * dim + (slice(first, end),)])

    def memdesc_trans(self, mem_desc: SharedMemory, order: Sequence[int]) -> SharedMemory:
        return self._view(mem_desc, mem_desc.handle.transpose(order))

    def memdesc_reshape(self, mem_desc: SharedMemory, shape: Sequence[int]) -> SharedMemory:
        view = mem_desc.handle.view()
        view.shape = tuple(shape)  # unlike reshape(), never a copy
        return self._view(mem_desc, view)

    def memdesc_reinterpret(
        self, mem_desc: SharedMemory, dtype: tl.dtype, shape: Sequence[int], layout: Any
    ) -> SharedMemory:
        bits = mem_desc.handle.reshape(-1).view(dtypes.storage(dtype))
        if not np.shares_memory(bits, mem_desc.handle):
            raise ValueError("only contiguous shared memory can be reinterpreted")
        needed = int(np.prod(shape))
        return SharedMemory(bits[:needed].reshape(shape), dtype, list(shape), layout, list(shape))


semantic = Semantic(Builder())


def will_read(memory: SharedMemory, verb: str, groups: Groups) -> None:
    """The current task has issued an asynchronous read of ``memory``, into the group that is open."""
    checker, task = tasks.shared_memory_checker()
    if checker is not None:
        checker.reads(task, memory.handle, verb, groups)


def _may_be_flag(task: tasks.Task, memory: SharedMemory) -> bool:
    """Whether partitions may signal each other by this memory: it is small."""
    return task.partitioned and memory.handle.size <= LARGEST_FLAG


def _used_flag(memory: SharedMemory, writes: bool) -> None:
    """The current task has read, or written, words of shared memory that may be flags: an acquire, or a release."""
    offsets = np.indices(memory.handle.shape).reshape(memory.handle.ndim, -1)
    words = memory.handle.ctypes.data + np.array(memory.handle.strides, dtype=np.int64) @ offsets
    tasks.used_flags(words, reads=not writes, writes=writes, releases=True)
    if observer.recorder is not None:
        for word in words.tolist():
            if writes:
                observer.recorder.mbarrier_arrived(word, True)
            else:
                observer.recorder.mbarrier_waited(word)


def _along(memory: SharedMemory, indices: tl.tensor, axis: Any) -> tuple:
    """The index, for numpy, of the elements that a gather or scatter accesses: ``[i, indices[i, j]]`` for axis 1."""
    numbers, axis = indices.handle.data, integer(axis)
    wrong = numbers[(numbers < 0) | (numbers >= memory.shape[axis])]
    if wrong.size:
        text = f"index {wrong[0]} of {memory.shape[axis]} in shared memory"
        raise observer.mistake("bounds", KernelBoundsError(text))
    index = list(np.indices(numbers.shape, sparse=True))
    index[axis] = numbers
    return tuple(index)


def integer(value: Any) -> int:
    """A number that a kernel gives as a Python number, a constant or a scalar."""
    return int(unwrapped(value))


def truth(value: Any) -> bool:
    """A predicate that a kernel gives in any of these ways."""
    return bool(unwrapped(value))
