"""SGLang's own all-reduce (`CustomAllReduceV2`), and its kernel with a residual and RMSNorm after it.

SGLang compiles the kernels at their first use. The all-reduce chooses among its algorithms by tables of SGLang's, and
by others in a CUDA graph than outside: there it reads the peers' inputs where they are. So what is checked is a graph.
Results are tensors of SGLang's.
"""

import contextlib
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

from iris.bench.optional_peers import Calls, Largest, UnavailableError
from iris.context import Iris

# Bytes of a message for which there is memory at least: SGLang's default.
LEAST_LIMIT = 16 << 20


class SGLang:
    """SGLang's all-reduce with its memory, for inputs that are on no heap."""

    def __init__(self, ctx: Iris, largest: Largest) -> None:
        # Else it asks the parallel state of a server whether GPUs reach each other.
        os.environ.setdefault("SGLANG_SKIP_P2P_CHECK", "1")
        module = importlib.import_module("sglang.srt.distributed.device_communicators.custom_all_reduce_v2")
        self._fused: Any = importlib.import_module("sglang.kernels.ops.communication.all_reduce_fusion")
        self._group: Any = dist.new_group(backend="gloo")  # it wants one of the host's
        # A rank destroys it below only when all others have connected, which would fail otherwise.
        dist.barrier(self._group)
        limit = max(LEAST_LIMIT, largest.summed * largest.dtype.itemsize)
        self._all_reduce: Any = module.CustomAllReduceV2(self._group, ctx.device, max_size=limit)
        self._num_ranks = ctx.num_ranks
        if self._all_reduce.disabled:
            dist.destroy_process_group(self._group)
            raise UnavailableError(f"not for {ctx.num_ranks} ranks on GPUs that are connected as these are")
        if largest.normalised:
            self._all_reduce.reserve_push_capacity(largest.normalised * largest.dtype.itemsize)
            self._fused.register_comm(self._all_reduce.obj)

    def all_reduce(self, library: str, out: torch.Tensor, x: torch.Tensor) -> Calls:
        def call() -> torch.Tensor:
            if not self._all_reduce.should_custom_ar(x):
                raise UnavailableError(f"SGLang leaves {x.nbytes} bytes among {self._num_ranks} ranks to NCCL")
            return self._all_reduce.custom_all_reduce(x)

        def checked() -> None:
            result = call()  # compiles the kernels, if nothing has yet
            if x.is_cuda:
                graph = torch.cuda.CUDAGraph()
                with self.capturing(), torch.cuda.graph(graph):
                    result = call()
                graph.replay()
            out.copy_(result)
            if x.is_cuda:
                torch.cuda.synchronize()  # before the graph goes

        return Calls(call, checked)

    def all_reduce_rms_norm(
        self, library: str, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
    ) -> Calls:
        def call() -> torch.Tensor:
            if x.dtype is not torch.bfloat16:
                raise UnavailableError(f"only for bfloat16, not for {str(x.dtype).removeprefix('torch.')}")
            result, _ = self._fused.all_reduce_residual_norm(x, residual, weight, eps, world_size=self._num_ranks)
            return result

        return Calls(call, lambda: out.copy_(call()))

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        return self._all_reduce.capture()

    def close(self) -> None:
        self._all_reduce.close()
        dist.destroy_process_group(self._group)


def open_peer(ctx: Iris, largest: Largest) -> SGLang:
    """SGLang for calls up to the largest. Collective over the world; raises what SGLang does."""
    return SGLang(ctx, largest)
