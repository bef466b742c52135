"""The collectives among the ranks of one host, as steps of those over several: also of a chunk of each rank's part.

A chunk is some columns of a matrix with a row for each rank, so its rows are apart in memory. The kernels of all_gather
and reduce_scatter take any distance between the parts of two ranks. Here they are given it, and nothing is copied.
"""

from typing import Any

import torch
import torch.distributed as dist

from iris.ccl.call import Call
from iris.ccl.collectives import Collectives
from iris.ccl.config import Config, ReduceOp
from iris.ccl.enqueue import FOR_THE_HOST
from iris.ccl.reduction import own_factor, reduction
from iris.operators.graph_break import methods_break_graph


@methods_break_graph(FOR_THE_HOST)
class WithinHost(Collectives):
    """`Collectives`, and two of them for rows that are apart: by the same distance on all ranks.

    The caller guarantees that the tensors are on the device, of one dtype, of these shapes, with the elements of a row
    one after the other, and that outputs and inputs do not overlap, but that ``input`` may be its own row.
    """

    def all_gather_rows(
        self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup | None, config: Config | None
    ) -> None:
        """all_gather: ``(n,)`` → ``(W, n)``."""
        if output.is_contiguous():
            self.all_gather(output, input, group=group, config=config)
            return
        comm, stream, line = self._enter("all_gather", group, output, input, config)
        key = self._key(("all_gather", output.stride(0)), output, input, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            launch = self._prepare(key, config, Call("all_gather", comm, output, input, line))
        self._launch(comm, "all_gather", launch, stream, input, output, None, False)

    def reduce_scatter_rows(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any,
        group: dist.ProcessGroup | None,
        config: Config | None,
    ) -> None:
        """reduce_scatter: ``(W, n)`` → ``(n,)``."""
        if input.is_contiguous():
            self.reduce_scatter(output, input, op=op, group=group, config=config)
            return
        op, factor = (op, None) if op.__class__ is ReduceOp else reduction(op)
        comm, stream, line = self._enter("reduce_scatter", group, output, input, config, None, op)
        factors = (
            () if factor is None else self._factors(comm, own_factor(factor, input.dtype, comm.device), stream, line)
        )
        key = self._key(("reduce_scatter", id(op), input.stride(0)), output, input, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            call = Call("reduce_scatter", comm, output, input, line, op=op, more=factors)
            launch = self._prepare(key, config, call)
        self._launch(comm, "reduce_scatter", launch, stream, input, output, None, False, factors)
