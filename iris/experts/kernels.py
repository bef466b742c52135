"""Which kernels serve a layer: those of any number of tokens, or those of few, which take the least time for these.

Both give the same results, but for the bits of NaNs, and take the same arguments, but for a slot's memory. Which of
them it is follows from the kind of the sizes: `Extents` or `FewTokens`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from iris.errors import InvalidConfigError
from iris.experts.combine import combine
from iris.experts.config import ExpertsConfig
from iris.experts.dispatch import dispatch
from iris.experts.kernel_arguments import Bias, Extents, FewTokens, Scales
from iris.experts.low_latency import memory as low_latency
from iris.experts.low_latency.combine import combine as low_latency_combine
from iris.experts.low_latency.dispatch import dispatch as low_latency_dispatch
from iris.experts.memory import NUM_WARPS
from iris.experts.rows import NOT
from iris.language.target import architecture, threads_per_warp

# What rows of fp8 are moved as, where their values do not matter.
BYTES = torch.uint8
NO_BIAS = Bias()


class Kernel(NamedTuple):
    """``arguments``: of the slot's memory (`Views.tensors` or `Views.launched`), of what the caller gives, and of what
    a plan has."""

    name: str
    function: Any
    arguments: Callable[[tuple, tuple, tuple], tuple]


class Kernels(NamedTuple):
    """``programs``: of a launch. ``resident``: threads of a multiprocessor, whose programs wait for each other."""

    dispatch: Kernel
    combine: Kernel
    programs: int
    num_warps: int
    resident: int


def choose(config: ExpertsConfig, extents: Extents, dtype: torch.dtype) -> Extents | FewTokens:
    """The sizes of the kernels that serve calls of these. The same on all ranks, whose sizes and GPUs are."""
    if config.low_latency and not low_latency.possible(extents):
        raise InvalidConfigError(
            f"ExpertsConfig(low_latency=True) cannot work: it is for up to {low_latency.MOST_TOKENS} tokens of up to "
            f"{low_latency.MOST_RANKS} ranks of a host, and not for CDNA3. A host has {extents.W} ranks here, tokens "
            f"are max_tokens times the number of hosts, {extents.M}, and the GPU is {architecture()}. Leave it None."
        )
    wanted = low_latency.fits(extents) if config.low_latency is None else config.low_latency
    return low_latency.few_tokens(extents, dtype, threads_per_warp()) if wanted else extents


def kernels_of(extents: Extents | FewTokens) -> Kernels:
    """Those of `choose`."""
    if isinstance(extents, FewTokens):
        few = Kernel("dispatch", low_latency_dispatch, _dispatch_arguments)
        of_few = Kernel("combine", low_latency_combine, _combine_arguments)
        return Kernels(few, of_few, extents.PROGRAMS, extents.THREADS // threads_per_warp(), extents.THREADS)
    many = Kernel("dispatch", dispatch, _dispatch_arguments)
    of_many = Kernel("combine", combine, _combine_arguments)
    return Kernels(many, of_many, 2 * extents.PROGRAMS, extents.WARPS, 2 * NUM_WARPS * threads_per_warp())


def _dispatch_arguments(memory: tuple, given: tuple, tail: tuple) -> tuple:
    slot, layout, scales, statistics = memory
    x, topk_ids, topk_weights, *others = given
    num_tokens = None
    if others:
        form = tail[3]
        if form.SCALES and form.QUANTIZE == NOT.value:
            scales = Scales(others.pop(0), *scales[1:])
            x = x.view(BYTES) if isinstance(x, torch.Tensor) else x
        num_tokens = others[0] if others else None
    return slot, x, scales, topk_ids, topk_weights, layout, num_tokens, statistics, *tail


def _combine_arguments(memory: tuple, given: tuple, tail: tuple) -> tuple:
    slot, (_, _, _, places), _, statistics = memory
    y, topk_weights, out, *biases = given
    bias = Bias(*biases) if biases else NO_BIAS
    return slot, y, topk_weights, places, out, bias, statistics, *tail
