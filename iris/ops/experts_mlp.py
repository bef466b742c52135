"""`experts_mlp`: a layer of experts, from tokens to tokens: dispatch, two grouped GEMMs with an activation, combine.

On each rank, with R rows of its E experts, H elements of a row and I of an activation:

1. dispatch brings the rows, compact: ``[R, H]``.
2. A grouped GEMM and the activation: ``[R, H] x [E, H, 2 I]`` to ``[R, I]``, in scratch memory.
3. With weights of fp8, the activation is rounded to fp8, with a factor for each row and 128 columns.
4. A grouped GEMM: ``[R, I] x [E, I, H]`` to ``[R, H]``, over the rows that the dispatch has brought, which nobody needs
   any more: dispatch has set them aside in the wide type, whatever type has travelled.
5. combine adds up, and sends back: after the second product, or beside it (`iris.ops.combine_in_stages`).

All numbers of rows stay on the device. Everything is on one stream, so each step finds what the one before it has
stored. The scratch memory is torch's, for as many rows as may come.
"""

from typing import NamedTuple

import torch

from iris.ccl.protocols import CollectivesContext
from iris.errors import InvalidCollectiveError, InvalidConfigError, InvalidExpertsError, UnknownChoiceError, short_repr
from iris.experts.checks import check_layout, quantized_dtype
from iris.experts.expert_parallel import ExpertParallel
from iris.experts.functional import others_wait
from iris.experts.kernel_arguments import FewTokens
from iris.experts.over_hosts import CallsOverHosts
from iris.ops import combine_in_stages as in_stages
from iris.ops.call import NARROW, check_devices, described, overlap
from iris.ops.grouped import on_hopper
from iris.ops.grouped.call import ACTIVATIONS, MOST_GROUPS, GroupedCall
from iris.ops.grouped.kernel_arguments import SCALE_BLOCK
from iris.ops.grouped.launch import enqueue
from iris.ops.grouped.quantise import quantise
from iris.ops.grouped.stages import PROGRESS_WORDS, Progress, progress_of
from iris.runtime.launch import remember
from iris.runtime.template import tensor_keys

NAME, LAYOUT = "experts_mlp", "compact"


class MlpCall(NamedTuple):
    """What `Operations.experts_mlp` was called with."""

    out: torch.Tensor
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None
    w_up: torch.Tensor
    w_down: torch.Tensor
    activation: str | None
    experts: ExpertParallel
    x_scales: torch.Tensor | None
    scale_up: torch.Tensor | None
    scale_down: torch.Tensor | None
    overlap: bool | None = None

    @property
    def inner(self) -> int:
        """Elements of a row of the activation."""
        return self.w_down.shape[2]

    @property
    def narrow(self) -> bool:
        """Whether the products are of fp8."""
        return self.w_up.dtype in NARROW

    @property
    def quantize(self) -> str | None:
        """What dispatch does with the rows."""
        return "fp8_block128" if self.narrow and self.x.dtype not in NARROW else None

    def given(self) -> dict[str, torch.Tensor]:
        """The tensors of this rank's experts, and the result, by their roles: dispatch looks at the others."""
        given = {"out": self.out, "x": self.x, "w_up": self.w_up, "w_down": self.w_down}
        may_be_given = {"scale_up": self.scale_up, "scale_down": self.scale_down}
        return given | {role: tensor for role, tensor in may_be_given.items() if tensor is not None}

    def check(self, context: CollectivesContext) -> None:
        """Raise unless this can be computed; ``context``: whose operation it is."""
        ep = self.experts
        if not isinstance(ep, ExpertParallel) or ep._calls.context is not context:
            what = "is of another context" if isinstance(ep, ExpertParallel) else "is none"
            raise InvalidExpertsError(
                f"{NAME}(experts=) takes what ctx.experts() has made, and {short_repr(ep)} {what}."
            )
        if self.activation is not None and not (isinstance(self.activation, str) and self.activation in ACTIVATIONS):
            raise UnknownChoiceError("activation", self.activation, ACTIVATIONS)
        if self.overlap not in (None, True, False):
            raise UnknownChoiceError("overlap", self.overlap, (None, True, False))
        check_devices(NAME, self.given(), context.device)
        problem = self._problem()
        if problem:
            raise InvalidCollectiveError(f"{NAME}() with {described(self.given())}, {ep!r}: {problem}.")
        check_layout(LAYOUT, ep.config)
        if self.overlap and isinstance(ep._calls, CallsOverHosts):
            raise InvalidConfigError(
                f"{NAME}(overlap=True) is not possible over several hosts: rails return sums when all are there. Leave "
                "overlap out."
            )

    def _problem(self) -> str | None:
        """What is wrong, in words."""
        up, down, x, ep = self.w_up, self.w_down, self.x, self.experts
        E, H = ep.num_local_experts, ep.hidden
        if not up.dim() == down.dim() == 3 or not self.inner:
            return "w_up and w_down have a matrix for each expert of this rank, three dimensions in all"
        rows_up = self.inner * (1 if self.activation is None else 2)
        if tuple(down.shape) != (E, H, self.inner) or tuple(up.shape) != (E, rows_up, H):
            return (
                f"w_down has to be [{E}, {H}, I], and w_up [{E}, 2 I, {H}], the rows of the gate first; without an "
                f"activation [{E}, I, {H}]"
            )
        if E > MOST_GROUPS:
            return f"a rank has {MOST_GROUPS} experts at most"
        if up.dtype != down.dtype or up.dtype not in (ep.dtype, *NARROW):
            return f"w_up and w_down have one dtype, {ep.dtype} or fp8"
        if self.narrow:
            own = quantized_dtype()
            if x.dtype != up.dtype and (x.dtype != ep.dtype or up.dtype != own):
                return f"with weights of fp8, x is of their dtype, with x_scales; or of {ep.dtype}, and they of {own}"
        elif x.dtype != up.dtype:
            return f"with weights of {up.dtype}, x is so too"
        return self._problem_of_scales() or self._problem_of_out()

    def _problem_of_scales(self) -> str | None:
        weights = {"scale_up": (self.scale_up, self.w_up), "scale_down": (self.scale_down, self.w_down)}
        for role, (scale, weight) in weights.items():
            E, N, K = weight.shape
            shapes = ((E,), (E, N), (E, -(-N // SCALE_BLOCK), -(-K // SCALE_BLOCK)))
            if scale is not None and (scale.dtype != torch.float32 or tuple(scale.shape) not in shapes):
                return f"{role} is float32, of shape {' or '.join(str(list(shape)) for shape in shapes)}"
        return None

    def _problem_of_out(self) -> str | None:
        out, ep = self.out, self.experts
        if self.x.dim() != 2 or tuple(out.shape) != (len(self.x), ep.hidden) or out.dtype != ep.dtype:
            return f"out and x are [tokens, {ep.hidden}], and out is of {ep.dtype}"
        if not out.is_contiguous():
            return "out is contiguous"
        for role, weight in (("w_up", self.w_up), ("w_down", self.w_down)):
            if overlap(out, weight):
                return f"out and {role} overlap in memory; give it an output of its own"
        return None


class Scratch(NamedTuple):
    """Memory of a call."""

    values: torch.Tensor
    """The activation, ``[R, I]``."""
    narrow: torch.Tensor | None
    """The same as fp8, with weights of fp8."""
    factors: torch.Tensor | None
    """float32 ``[R, ceil(I / 128)]``, of fp8."""
    progress: Progress | None
    """Of the second product, if combine runs beside it."""


class ExpertsMlp:
    """The operation of one context, enqueued on the current stream."""

    def __init__(self, context: CollectivesContext) -> None:
        self._context = context
        self._prepared: dict[tuple, None] = {}

    def __call__(self, call: MlpCall) -> None:
        key = _call_key(call, self._context)
        known = key is not None and key in call.experts._calls.checked
        if not known or _overlaps(call):
            call.check(self._context)
        ep, overlap = call.experts, bool(call.overlap)
        ep._calls.enter()
        scratch = scratch_of(call, overlap)
        if not known:
            self._prepare(call, scratch, overlap)
            if key is not None:
                remember(ep._calls.checked, key, None)
        received = ep._calls.dispatch(call.x, call.topk_ids, call.topk_weights, call.x_scales, call.quantize, LAYOUT)
        with others_wait(ep._calls, NAME):
            up, down = products(call, scratch, received._slot, received.rows, received.scales)
            multiply(up, down, scratch)
            if overlap:
                in_stages.enqueue(
                    ep, received, in_stages.arguments_of(ep, received._slot, received.weighted, down, call.out)
                )
            else:
                ep._calls.combine(down.out, received, out=call.out)

    def _prepare(self, call: MlpCall, scratch: Scratch, overlap: bool) -> None:
        """Compile and load what the call needs, before the kernels of any rank wait for another rank."""
        ep, scales = call.experts, call.x_scales
        by_blocks = scales is None or scales.dim() != 2 or scales.shape[1] > 1
        weighted = call.topk_weights is not None
        kinds = [(role, each.dtype, each.stride(), each.data_ptr() % 16) for role, each in call.given().items()]
        key = (ep._calls.extents, len(scratch.values), by_blocks, call.activation, overlap and (weighted,), *kinds)
        if key in self._prepared:
            return
        rows, factors = ep._calls.open_memory().layouts[0][LAYOUT].rows, None
        if call.narrow:
            blocks = -(-ep.hidden // SCALE_BLOCK) if by_blocks else 1
            _, tensors, narrow = ep._calls.open_memory().narrow(0, LAYOUT, call.w_up.dtype, blocks)
            rows, factors = tensors.rows, narrow.placed
        up, down = products(call, scratch, 0, rows, factors)
        if overlap:
            problem = on_hopper.problem(down, on_hopper.hopper_tiles(down))
            if problem:
                raise InvalidConfigError(f"{NAME}(overlap=True) is not possible with this second product: {problem}.")
            if isinstance(ep._calls.extents, FewTokens):
                raise InvalidConfigError(
                    f"{NAME}(overlap=True) is not possible with experts whose dispatch and combine are those for few "
                    "tokens. Make them with iris.experts.ExpertsConfig(low_latency=False), or leave overlap out."
                )
            in_stages.prepared(ep, in_stages.arguments_of(ep, 0, weighted, down, call.out))
        multiply(up, down, scratch, only_prepare=True)
        remember(self._prepared, key, None)


def _call_key(call: MlpCall, context: CollectivesContext) -> tuple | None:
    """What is the same in calls that are checked and prepared alike; None where each has to be looked at."""
    ep = call.experts
    if not isinstance(ep, ExpertParallel) or ep._calls.context is not context or not _is_text(call.activation):
        return None
    keys = tensor_keys((call.out, call.x, call.w_up, call.w_down))
    scales = call.x_scales, call.scale_up, call.scale_down
    if (
        keys is None
        or None in keys
        or call.narrow
        or call.overlap is not None
        or any(scale is not None for scale in scales)
    ):
        return None
    return keys, call.activation, call.topk_weights is None


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _overlaps(call: MlpCall) -> bool:
    return overlap(call.out, call.w_up) or overlap(call.out, call.w_down)


def scratch_of(call: MlpCall, overlap: bool) -> Scratch:
    """For as many rows as may come."""
    ep, narrow, factors, progress = call.experts, None, None, None
    room = len(ep._calls.open_memory().layouts[0][LAYOUT].rows)
    values = torch.empty(room, call.inner, dtype=ep.dtype, device=call.out.device)
    if call.narrow:
        narrow = torch.empty(room, call.inner, dtype=call.w_down.dtype, device=call.out.device)
        factors = torch.empty(room, -(-call.inner // SCALE_BLOCK), dtype=torch.float32, device=call.out.device)
    if overlap:
        counts = torch.zeros(PROGRESS_WORDS, dtype=torch.int32, device=call.out.device)
        progress = progress_of(counts)
    return Scratch(values, narrow, factors, progress)


def products(
    call: MlpCall, scratch: Scratch, slot: int, rows: torch.Tensor, scales: torch.Tensor | None
) -> tuple[GroupedCall, GroupedCall]:
    """Those of what a dispatch has left in a slot."""
    tensors = call.experts._calls.open_memory().layouts[slot][LAYOUT]
    offs, counts = tensors.offsets[1:], tensors.counts
    if scales is not None and scales.shape[1] == 1 < -(-rows.shape[1] // SCALE_BLOCK):
        scales = scales[:, 0]
    up = GroupedCall(
        out=scratch.values,
        mat_a=rows,
        mat_b=call.w_up.transpose(1, 2),
        scale_a=scales,
        scale_b=call.scale_up,
        activation=call.activation,
        offs=offs,
        counts=counts,
    )
    down = GroupedCall(
        out=tensors.rows,
        mat_a=scratch.values if scratch.narrow is None else scratch.narrow,
        mat_b=call.w_down.transpose(1, 2),
        scale_a=scratch.factors,
        scale_b=call.scale_down,
        activation=None,
        progress=scratch.progress,
        offs=offs,
        counts=counts,
    )
    return up, down


def multiply(up: GroupedCall, down: GroupedCall, scratch: Scratch, only_prepare: bool = False) -> None:
    """Steps 2 to 4."""
    enqueue(up, None, only_prepare)
    if scratch.narrow is not None and scratch.factors is not None:
        assert up.offs is not None and up.counts is not None
        quantise(up.out, scratch.narrow, scratch.factors, offs=up.offs, counts=up.counts, only_prepare=only_prepare)
    enqueue(down, on_hopper.hopper_tiles(down) if down.progress else None, only_prepare)
