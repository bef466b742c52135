"""`iris.accelerate`: the one line after which compiled models use Iris' operators."""

from typing import TypeVar

import torch
from torch.library import Library

from iris.compat.inductor import add_graph_pass
from iris.inductor import graph_pass, groups, symm_mem  # noqa: F401 (makes the contexts of groups)
from iris.inductor.report import FusionReport

Model = TypeVar("Model", bound=torch.nn.Module | None)

# What lasts as long as the process: torch's operators on Iris. Empty until they are.
_on: list[Library] = []


def accelerate(model: Model = None) -> Model:  # type: ignore[assignment]
    """Let what torch.compile compiles in this process from now on communicate by Iris' operators. Local.

    torch's own fused operators, `torch.ops.symm_mem.fused_all_gather_matmul` and its like, run on Iris then.
    """
    if not _on:
        add_graph_pass(graph_pass.search, graph_pass.IDENTITY)
        _on.extend(symm_mem.put_in_place())
    if model is not None:
        model.compile()
    return model


def fusion_report() -> FusionReport:
    """What was fused in graphs that this process has compiled since `accelerate`, and what was left, with the reason."""
    return graph_pass.report
