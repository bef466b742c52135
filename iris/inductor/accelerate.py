"""`iris.accelerate`: the one line after which compiled models use Iris' operators."""

from typing import Any, TypeVar

import torch
from torch.library import Library

from iris.compat.inductor import add_graph_pass
from iris.compat.inductor import graph_pass as inductor_pass
from iris.distributed.contexts import say_place
from iris.errors import InvalidArgumentError, short_repr
from iris.inductor import graph_pass, symm_mem
from iris.inductor.report import FusionReport

Model = TypeVar("Model", bound=torch.nn.Module | None)

# The registrations of Iris' kernels for torch's own fused operators, which end when these objects do. Empty until
# `accelerate` is first called.
_registered: list[Library] = []


def accelerate(model: Model = None) -> Model:  # type: ignore[assignment]
    """Put Iris' fused operators in the place of collectives in what torch.compile compiles from now on. Local.

    A ``model`` is compiled as well, by ``model.compile()``, and returned. Without one, call torch.compile yourself, in
    any mode; the back end is Inductor, its default. In the graphs of both directions these are replaced, whatever the
    process group and its back end: an all_reduce and RMSNorm after it, with or without a residual between; a product
    and all_reduce; all_gather and a product; a product and reduce_scatter. `fusion_report` says what was. torch's own
    fused operators, `torch.ops.symm_mem.fused_all_gather_matmul` and its like, run on Iris then.

    All ranks call it, since they have to compile the same graphs; after torch.distributed.init_process_group() and
    torch.cuda.set_device(), since it tells the others where this rank runs. When an operator first runs, the ranks of
    its group meet on the host: run a model once before you capture it in a CUDA graph by hand, or
    `FirstUseInCaptureError` is raised. Where weights are split unevenly, operators are a product and a collective, one
    after the other. Sums are formed in float32 and rounded once, so results differ by rounding from those of other
    back ends.

    Raises
    ------
    InvalidArgumentError
        ``model`` is no torch.nn.Module.
    MissingPartError
        This torch has not what Iris fuses operations with.
    """
    if model is not None and not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"accelerate() compiles a torch.nn.Module, and got {short_repr(model)}, a {type(model).__name__}. For a "
            "function, call iris.accelerate() and then torch.compile(function)."
        )
    if not _registered:
        replaced = symm_mem.put_in_place()
        add_graph_pass(graph_pass.search, graph_pass.identity)
        # Last: if a part of torch is missing, nothing stays, and another call says so again.
        _registered.extend(replaced)
    say_place()
    if model is not None:
        model.compile()
    return model


def compile_options() -> dict[str, Any]:
    """``options`` of torch.compile that do for one function or model what `accelerate` does for all. Local.

    torch's own fused operators stay as they are. Graph passes that Inductor is configured with by now run first. Empty
    after `accelerate`.
    """
    say_place()
    return {} if _registered else {"post_grad_custom_pre_pass": inductor_pass(graph_pass.search, graph_pass.identity)}


def fusion_report() -> FusionReport:
    """What this process has found in the graphs that it has compiled: what was fused, and what not and why. Local.

    A graph that Inductor takes from its cache on disk was searched when it was made, perhaps by another process, and is
    not in the report: set ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`` to have all graphs searched here.
    """
    return graph_pass.report
