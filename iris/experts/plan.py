"""What a dispatch or a combine has to know of its tensors' dtypes, shapes and devices: found and checked once.

A later call of tensors like these finds its plan in a dictionary. What may differ between the two is looked at in each:
addresses, strides, whether a gradient is wanted, and which memory is in use.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl

from iris.ccl.checks import check_tensor
from iris.experts import checks
from iris.experts.config import ExpertsConfig
from iris.experts.kernel_arguments import Extents, FewTokens, Form
from iris.experts.kernels import BYTES, Kernel, kernels_of
from iris.experts.memory import Memory
from iris.experts.received import Received
from iris.experts.routing import RECEIVE, SEND, WHOLE
from iris.experts.token_rows import DISPATCHED, GIVEN, UNWEIGHTED
from iris.experts.views import Format, Views, views_of
from iris.runtime.launch import remember

# Of a combine without rows of experts: the choices alone travel.
ROUTING = Form(MOVES=False)

STRIDED = torch.strided
# Of a tensor that is looked at in each call.
UNCOMMON = object()


class Plan(NamedTuple):
    """``tail``: the kernel's last arguments. ``launches``: those that are ready, by the remainders of 16 of what is
    given. ``views``: of the slots in the layout of the call."""

    kernel: Kernel
    tail: tuple
    launches: dict[tuple[int, ...], Callable[..., None]]
    views: list[Views]
    programs: int
    """Of a launch."""
    receiving: "Plan | None" = None
    """Of the launch that receives, if it is another one."""


class Plans:
    """Of one `iris.experts.calls.Calls`, whose memory it keeps. ``limits``: of what a call is given."""

    def __init__(
        self,
        memory: Memory,
        extents: Extents | FewTokens,
        dtype: torch.dtype,
        config: ExpertsConfig,
        device: torch.device,
    ) -> None:
        self._memory, self._extents, self._dtype, self._config, self._device = memory, extents, dtype, config, device
        few = isinstance(extents, FewTokens)
        self.limits = checks.Limits(extents.M, extents.H, extents.K, extents.E, dtype, device, messages=few)
        self._kernels = kernels_of(extents)
        self._known: dict[tuple, Plan] = {}
        self._launches: dict[tuple, dict[tuple[int, ...], Callable[..., None]]] = {}
        self._views: dict[Format, list[Views]] = {}

    def find(self, key: tuple) -> Plan | None:
        """Of an earlier call with this key."""
        try:
            return self._known.get(key)
        except TypeError:  # what has no hash is no layout
            return None

    def remember(self, key: tuple, kinds: tuple, plan: Plan) -> None:
        """For later calls, unless one of the ``kinds`` of tensors in the key has to be looked at in each."""
        if UNCOMMON not in kinds:
            remember(self._known, key, plan)

    def of_dispatch(
        self,
        x: Any,
        topk_ids: Any,
        topk_weights: Any,
        x_scales: Any,
        quantize: object,
        layout: object,
        num_tokens: Any,
        async_op: bool,
    ) -> Plan:
        """Checks what `ExpertParallel.dispatch` was given."""
        layout = checks.check_layout(layout, self._config)
        form = checks.check_dispatch(self.limits, x, topk_ids, topk_weights, x_scales, quantize, num_tokens)
        narrow = x.dtype if quantize is None else checks.quantized_dtype()
        format = Format(layout, narrow if x_scales is None else BYTES, narrow, form.SCALES)
        weighted, counted = topk_weights is not None, num_tokens is not None
        return self.dispatch(len(x), topk_ids.dtype, weighted, form, format, counted, async_op)

    def of_route(self, topk_ids: Any, topk_weights: Any, layout: object) -> Plan:
        """Of a dispatch of the choices alone."""
        layout = checks.check_layout(layout, self._config)
        checks.check_number(topk_ids, self.limits.max_tokens)
        checks.check_choices(self.limits, len(topk_ids), topk_ids, topk_weights)
        format = Format(layout, self._dtype, self._dtype)
        return self.dispatch(len(topk_ids), topk_ids.dtype, topk_weights is not None, ROUTING, format)

    def of_combine(
        self, y: Any, received: Received, tokens: int, topk_weights: Any, out: Any, biases: tuple, async_op: bool
    ) -> Plan:
        """Checks what `ExpertParallel.combine` was given."""
        views = self.views_of(Format(received.layout, self._dtype, self._dtype))
        checks.check_combine(self.limits, tokens, y, views[0].rows.shape, topk_weights, out, biases)
        weights = (DISPATCHED if received.weighted else UNWEIGHTED) if topk_weights is None else GIVEN
        return self.combine(weights.value, len(biases), views, async_op)

    def dispatch(
        self,
        tokens: int,
        ids: torch.dtype,
        weighted: bool,
        form: Form,
        format: Format,
        counted: bool = False,
        async_op: bool = False,
    ) -> Plan:
        """``counted``: how many tokens there are is on the device."""
        alignment = self._config.alignment if format.layout == "compact" else 0

        # Of fp8 rows that are given the bytes are moved, whatever the type.
        def plan(phase: tl.constexpr, programs: int) -> Plan:
            tail = (tokens, int(weighted), alignment, form, phase.value, self._extents)
            launches = self.launches_of((ids, form, counted, phase.value))
            return Plan(self._kernels.dispatch, tail, launches, self.views_of(format), programs)

        return self._in_phases(plan, async_op)

    def combine(self, weights: int, biases: int, views: list[Views], async_op: bool = False) -> Plan:
        def plan(phase: tl.constexpr, programs: int) -> Plan:
            launches = self.launches_of((weights, biases, phase.value))
            return Plan(self._kernels.combine, (weights, phase.value, self._extents), launches, views, programs)

        return self._in_phases(plan, async_op)

    def _in_phases(self, plan: Callable[[tl.constexpr, int], Plan], async_op: bool) -> Plan:
        if not async_op:
            return plan(WHOLE, self._kernels.programs)
        half = self._extents.PROGRAMS
        return plan(SEND, half)._replace(receiving=plan(RECEIVE, half))

    def launches_of(self, key: tuple) -> dict[tuple[int, ...], Callable[..., None]]:
        """Those of one kind that are ready."""
        return self._launches.setdefault(key, {})

    def views_of(self, format: Format) -> list[Views]:
        """Of each slot."""
        if format not in self._views:
            numbers = range(self._config.in_flight)
            self._views[format] = [views_of(self._memory, number, format, self._extents) for number in numbers]
        return self._views[format]


def dtypes_and_shapes(*tensors: Any) -> tuple:
    """What a plan depends on of each: its dtype, shape and device; None for None, `UNCOMMON` for an unusual tensor."""
    return tuple([_dtype_and_shape(each) for each in tensors])


def _dtype_and_shape(tensor: Any) -> Any:
    if tensor is None:
        return None
    if (
        tensor.__class__ is torch.Tensor
        and tensor.layout is STRIDED
        and not (tensor.requires_grad and torch.is_grad_enabled())
    ):
        return tensor.dtype, tensor.shape, tensor.device
    return UNCOMMON


def pointers_of(call: str, tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """Where they begin. Raises if one has no memory, as a stand-in of torch.func, whose class says nothing."""
    try:
        pointers = tuple([each.data_ptr() for each in tensors])
    except RuntimeError:
        pointers = ()
    if pointers and all(pointers):
        return pointers
    for each in tensors:
        check_tensor(call, each)
    return tuple([each.data_ptr() for each in tensors])
