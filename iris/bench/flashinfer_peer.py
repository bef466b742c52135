"""FlashInfer's all-reduce, which has TensorRT-LLM's kernels, and the form with a residual and RMSNorm after it.

By way of `flashinfer.comm.allreduce_fusion`. FlashInfer compiles the kernels at their first use, which takes minutes.
The memory is for one shot, in which each rank sends everybody all that it has, and for two.
"""

import contextlib
import importlib
import math
from typing import Any

import torch

from iris.bench.optional_peers import Calls, Largest
from iris.context import Iris

# None: by FlashInfer's own choice.
ONE_SHOT = {"flashinfer": None, "flashinfer one shot": True, "flashinfer two shot": False}
# An all-reduce has rows, too: of as many columns as a large model has, where so many fit.
COLUMNS = 8192


class FlashInfer:
    """FlashInfer with its workspace, of which each call of a size that fits makes use."""

    def __init__(self, ctx: Iris, largest: Largest) -> None:
        self._comm: Any = importlib.import_module("flashinfer.comm")
        # Not "auto", which prefers kernels with NVLink multicast that are no longer TensorRT-LLM's.
        self._workspace = self._comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=ctx.num_ranks,
            rank=ctx.cur_rank,
            max_token_num=-(-max(largest.summed, largest.normalised) // COLUMNS),
            hidden_dim=COLUMNS,
            dtype=largest.dtype,
        )

    def all_reduce(self, library: str, out: torch.Tensor, x: torch.Tensor) -> Calls:
        rows = (-1, math.gcd(x.numel(), COLUMNS))
        pattern = self._comm.AllReduceFusionPattern.kAllReduce
        return self._calls(library, pattern, input=x.view(rows), output=out.view(rows))

    def all_reduce_rms_norm(
        self, library: str, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
    ) -> Calls:
        return self._calls(
            library,
            self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            input=x,
            norm_out=out,
            residual_in=residual,
            residual_out=residual,
            rms_gamma=weight,
            rms_eps=eps,
        )

    def _calls(self, library: str, pattern: int, **tensors: Any) -> Calls:
        def call() -> object:
            # Sums in float32, as the other libraries form them; and calls that follow each other start early.
            return self._comm.allreduce_fusion(
                workspace=self._workspace,
                pattern=pattern,
                use_oneshot=ONE_SHOT[library],
                fp32_acc=True,
                launch_with_pdl=True,
                **tensors,
            )

        return Calls(call, call)

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def close(self) -> None:
        self._workspace.destroy()


def open_peer(ctx: Iris, largest: Largest) -> FlashInfer:
    """FlashInfer for calls up to the largest. Collective over the world; raises what FlashInfer does."""
    return FlashInfer(ctx, largest)
