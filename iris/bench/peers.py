"""The libraries that the collectives are measured against, each at its best, as functions on tensors of its own."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from iris.bench.timing import Operands
from iris.compat.c10d import backend_of
from iris.compat.symmetric_memory import pooled

ByName = dict[str, Callable[[], object]]
"""Calls on tensors that they hold: by collective, or by algorithm."""


def vendor(operands: Operands, group: dist.ProcessGroup | None = None) -> ByName:
    """torch.distributed with the process group's backend: NCCL, RCCL, or Gloo in the simulator."""
    x, out, part = operands.whole, operands.out, operands.part
    return {
        "all_reduce": lambda: dist.all_reduce(out, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(out, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, x, group=group),
        "broadcast": lambda: dist.broadcast(out, 0, group=group),
    }


def with_max_ctas(ctas: int) -> dist.ProcessGroup:
    """A group of all ranks whose NCCL communicator may use so many multiprocessors."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = ctas
    options.config.min_ctas = min(ctas, 4)
    group = dist.new_group(pg_options=options)
    assert isinstance(group, dist.ProcessGroup)  # which has all ranks
    return group


def windows(
    counts: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], torch.cuda.MemPool]:
    """Tensors in memory that NCCL has registered as symmetric windows, for which it has kernels of its own. Collective.

    NCCL's communicator must exist, which it does after the first call, and outlive the pool that comes with them; they
    do not keep it alive themselves. All that will be used is registered at once.
    """
    world = dist.group.WORLD
    assert world is not None
    backend = backend_of(world, device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.empty(count, dtype=dtype, device=device) for count in counts]
    backend.register_mem_pool(pool, symm=True)
    return tensors, pool


def torch_symmetric(operands: Operands) -> ByName:
    """The kernels of torch's symmetric memory, on a buffer that it has shared."""
    world = dist.group.WORLD
    assert world is not None
    group = world.group_name
    whole = operands.whole
    shared = pooled(whole.numel(), whole.dtype, whole.device, group)
    shared.copy_(whole)
    return {
        "one shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group),
        "two shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group),
    }
