"""TMA: asynchronous copies of blocks of a tensor, to and from shared memory (PTX ISA, cp.async.bulk.tensor).

A load signals an mbarrier with the bytes of its block, those outside the tensor included. A store ends in two steps.
First it has read shared memory, which may then be overwritten: `store_wait` waits for that. Then others can see what it
has written: only `store_wait` with ``read_only=False`` waits for that. Otherwise it happens when the program ends.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import tma as gl_tma
from triton.experimental.gluon.nvidia import hopper
from triton.tools.tensor_descriptor import TensorDescriptor as TritonDescriptor

from iris import observer
from iris.errors import NotInSimulatorError
from iris.simulator import mbarrier, tasks
from iris.simulator.asynchronous import Destination, Source
from iris.simulator.reductions import make_tensor
from iris.simulator.semantic import SharedMemory, integer, semantic, truth, will_read
from iris.simulator.shapes import unwrapped
from iris.simulator.tensor_map import TensorMap

HOST_DESCRIPTORS = tuple(
    getattr(hopper, name) for name in ("TensorDescriptor", "TensorDescriptorIm2Col") if hasattr(hopper, name)
) + (TritonDescriptor,)
"""What a program passes to a kernel; Triton 3.6 has no im2col."""


def from_host(given: Any, base: tl.tensor) -> Any:
    """The descriptor that a kernel sees of ``given``, whose tensor starts at ``base``."""
    if not isinstance(given, (hopper.TensorDescriptor, TritonDescriptor)):
        raise NotInSimulatorError("a tensor descriptor in im2col mode")
    layout = () if isinstance(given, TritonDescriptor) else (given.layout,)
    descriptor = _descriptor(base, given.shape, given.strides, given.block_shape, given.padding, *layout)
    descriptor.handle.round_f32_to_tf32 = getattr(given, "round_f32_to_tf32", False)
    return descriptor


def make_tensor_descriptor(
    base: tl.tensor,
    shape: Sequence[Any],
    strides: Sequence[Any],
    block_shape: Sequence[Any],
    layout: Any,
    padding_option: Any = "zero",
) -> Any:
    return _descriptor(base, shape, strides, block_shape, padding_option, unwrapped(layout))


def _descriptor(
    base: tl.tensor, shape: Sequence, strides: Sequence, block_shape: Sequence, padding: Any, *layout: Any
) -> Any:
    """The descriptor as the language has it: Gluon's if there is a layout, else Triton's."""
    shape, strides, block_shape = ([integer(number) for number in numbers] for numbers in (shape, strides, block_shape))
    handle = TensorMap(base.handle, shape, strides, block_shape, unwrapped(padding) == "nan")
    sizes = [semantic.to_tensor(size) for size in shape]
    steps = [semantic.cast(semantic.to_tensor(stride), tl.int64) for stride in strides]
    kind = gl_tma.tensor_descriptor if layout else tl.tensor_descriptor
    return kind(handle, sizes, steps, tl.block_type(base.dtype.element_ty, block_shape), *layout)


def load(
    tensor_desc: Any, coord: Any, barrier: SharedMemory, result: SharedMemory, pred: Any = True, *_: Any, **__: Any
) -> None:
    if not truth(pred):
        return
    block = _block(tensor_desc, result)
    pointers, inside = _pointers(block, coord)
    fill = make_tensor(block.fill().data, block.element)

    def read() -> np.ndarray:
        with _async_proxy():
            return block.rounded(tl.load(pointers, inside, fill).handle.data)

    source = Source(read, block.element)
    checker, task = tasks.shared_memory_checker()
    if checker is not None:
        checker.writes(task, result.handle, "writes by TMA", completion=barrier.handle)
    destination = Destination(result.handle, block.element)

    def complete() -> None:
        destination.complete(source.at_completion())
        mbarrier.update(barrier, announced=-result.handle.nbytes)

    mbarrier.announce(barrier, complete)


def store(tensor_desc: Any, coord: Any, src: SharedMemory, *_: Any, **__: Any) -> None:
    _issue(tensor_desc, coord, src, tl.store)


def reduction(name: str) -> Callable:
    """The builtin that combines a block with what is in memory, by "add", "min" and the like."""

    def put(pointers: tl.tensor, values: tl.tensor, inside: tl.tensor) -> None:
        semantic.builder.reduce(name.upper(), pointers.handle, values.handle, inside.handle)

    def reduce(tensor_desc: Any, coord: Any, src: SharedMemory, *_: Any, **__: Any) -> None:
        _issue(tensor_desc, coord, src, put)

    return reduce


def store_wait(pendings: Any, read_only: Any = True) -> None:
    in_flight = tasks.current().in_flight
    tasks.wait_for(in_flight.stores, integer(pendings))
    if not truth(read_only):
        in_flight.write()


def _issue(tensor_desc: Any, coord: Any, src: SharedMemory, put: Callable) -> None:
    block = _block(tensor_desc, src)
    pointers, inside = _pointers(block.as_written(), coord)
    source, in_flight = Source(src.handle.copy, block.element), tasks.current().in_flight
    will_read(src, "reads by TMA", in_flight.stores)
    values: list[tl.tensor] = []

    def write() -> None:
        with _async_proxy():
            put(pointers, values.pop(), inside)

    write_in_time = observer.from_here(write)

    def read() -> None:
        values.append(make_tensor(source.at_completion(), block.element))
        in_flight.writes.append(write_in_time)

    in_flight.stores.issue(read)
    in_flight.stores.commit()


@contextlib.contextmanager
def _async_proxy() -> Iterator[None]:
    """While this lasts, memory is accessed as TMA accesses it (PTX ISA, "Async proxy")."""
    task = tasks.current()
    task.async_proxy = True
    try:
        yield
    finally:
        task.async_proxy = False


def _block(tensor_desc: Any, memory: SharedMemory) -> TensorMap:
    block = tensor_desc.handle
    if memory.handle.shape != block.block_shape or memory.dtype != block.element:
        raise ValueError(
            f"a block {list(block.block_shape)} of {block.element} and shared memory {memory.shape} of {memory.dtype}"
        )
    return block


def _pointers(block: TensorMap, coordinates: Sequence[Any]) -> tuple[tl.tensor, tl.tensor]:
    addresses, inside = block.pointers(list(map(integer, coordinates)))
    return make_tensor(addresses.data, addresses.dtype), make_tensor(inside.data, tl.int1)


def replacements() -> dict[Any, Callable]:
    """What stands in for which of Gluon's builtins."""
    # Triton 3.9 has other names, and keeps the older ones to say so.
    newer = hasattr(gl_tma, "async_load")
    names: dict[str, Callable] = {
        "async_load" if newer else "async_copy_global_to_shared": load,
        "async_store" if newer else "async_copy_shared_to_global": store,
        "store_wait": store_wait,
        "make_tensor_descriptor": make_tensor_descriptor,
    }
    for operation in ("add", "min", "max", "and", "or", "xor"):
        if hasattr(gl_tma, f"async_atomic_{operation}"):
            names[f"async_atomic_{operation}"] = reduction(operation)
    return {getattr(gl_tma, name): function for name, function in names.items()}
