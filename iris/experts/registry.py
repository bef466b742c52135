"""The `ExpertParallel`s of a context: they live until they are closed, since kernels may use their memory."""

import torch
import torch.distributed as dist

from iris.ccl.protocols import CollectivesContext
from iris.cuda_graphs.capture import refuse_in_capture
from iris.experts.config import ExpertsConfig
from iris.experts.expert_parallel import ExpertParallel
from iris.runtime.process_groups import none_if_all
from iris.world import check_process_group


class ExpertParallels:
    """Those of one context that are open."""

    def __init__(self, context: CollectivesContext) -> None:
        self._context = context
        self._open: dict[ExpertParallel, dist.ProcessGroup | None] = {}

    def make(
        self,
        num_experts: int,
        hidden: int,
        max_tokens: int,
        top_k: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        config: ExpertsConfig | None,
    ) -> ExpertParallel:
        """`ctx.experts`."""
        refuse_in_capture("ctx.experts()")
        group = none_if_all(group, self._context.num_ranks)
        if group is not None:
            check_process_group(group)
        made = ExpertParallel(
            self._context, num_experts, hidden, max_tokens, top_k, dtype, group, config, closed=self._open.pop
        )
        self._open[made] = group
        return made

    def forget(self, group: dist.ProcessGroup) -> None:
        """Close those of a group. The caller guarantees that no kernel of them runs any more on this rank."""
        for made in [made for made, of in self._open.items() if of is group]:
            made._close()

    def close(self) -> None:
        """Close all. The caller guarantees that no kernel of them runs any more, on any rank."""
        for made in [*self._open]:
            made._close()
