"""Matrix products by a warp group, wgmma (PTX ISA, "Asynchronous warpgroup level matrix instructions").

Until a product has been waited for, its operands may still be read, those in shared memory too, and its result is
poison. Products of a warp group end in order of issue. So one may have for its accumulator the result of another that
has not been waited for.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import triton.language as tl
from triton.experimental.gluon.language.nvidia import hopper

from iris.compat.interpreter import TensorHandle
from iris.simulator import dtypes, tasks
from iris.simulator.asynchronous import Source
from iris.simulator.semantic import SharedMemory, integer, semantic, truth, will_read

Accumulator: TypeAlias = hopper.warpgroup_mma_accumulator
"""The result of a product that has not been waited for: a kernel can only accumulate on it or wait for it."""


def warpgroup_mma_init(value: tl.tensor) -> Accumulator:
    return Accumulator(value.handle, value.type)


def warpgroup_mma(
    a: tl.tensor | SharedMemory,
    b: SharedMemory,
    acc: tl.tensor | Accumulator,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> tl.tensor | Accumulator:
    kind = _type(acc)
    left, right = _operand(a), _operand(b)
    poison = np.full(kind.shape, dtypes.poison(kind.scalar))
    added = acc.handle if truth(use_acc) else TensorHandle(np.zeros_like(poison), kind.scalar)
    result = TensorHandle(poison, kind.scalar)
    products = tasks.current().in_flight.products
    for memory in (a, b):
        if isinstance(memory, SharedMemory):  # type: ignore[misc]
            will_read(memory, "reads by wgmma", products)

    def complete() -> None:
        operands = (TensorHandle(source.at_completion(), x.dtype) for source, x in ((left, a), (right, b)))
        result.data[...] = semantic.builder.create_dot(*operands, added).data

    products.issue(complete)
    products.commit()
    if truth(is_async):
        return Accumulator(result, kind)
    tasks.wait_for(products, 0)
    return tl.tensor(result, kind)


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] | None = None) -> Any:
    if deps is None:
        raise ValueError("warpgroup_mma_wait needs deps: the products that it waits for")
    tasks.wait_for(tasks.current().in_flight.products, integer(num_outstanding))
    results = tuple(tl.tensor(dep.handle, _type(dep)) if isinstance(dep, Accumulator) else dep for dep in deps)  # type: ignore[misc]
    return results[0] if len(results) == 1 else results


def fence_async_shared(cluster: Any = False) -> None:
    """A proxy fence. The simulator has one way to shared memory alone; the race detector finds where one is missing."""
    checker, task = tasks.shared_memory_checker()
    if checker is not None:
        checker.proxy_fence(task)


def _type(value: tl.tensor | Accumulator) -> tl.block_type:
    return value.type.tensor_type if isinstance(value, Accumulator) else value.type  # type: ignore[misc]


def _operand(value: tl.tensor | SharedMemory) -> Source:
    array = value.handle if isinstance(value, SharedMemory) else value.handle.data  # type: ignore[misc]
    return Source(array.copy, value.dtype)


def replacements() -> dict[Any, Callable]:
    """What stands in for which of Gluon's builtins."""
    functions = (warpgroup_mma_init, warpgroup_mma, warpgroup_mma_wait, fence_async_shared)
    return {getattr(hopper, function.__name__): function for function in functions}
