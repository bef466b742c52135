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
from iris.experts.combine import DISPATCHED, GIVEN, UNWEIGHTED
from iris.experts.config import ExpertsConfig
from iris.experts.kernel_arguments import Extents, FewTokens, Form
from iris.experts.kernels import BYTES, Kernel, kernels_of
from iris.experts.memory import Memory
from iris.experts.received import Received
from iris.experts.routing import RECEIVE, SEND, WHOLE
from iris.experts.views import Format, Views, views_of
from iris.runtime.launch import remember

IDS = (torch.int32, torch.int64)
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
    """Of one `iris.experts.calls.Calls`, whose memory it keeps."""

    def __init__(
        self,
        memory: Memory,
        extents: Extents | FewTokens,
        dtype: torch.dtype,
        config: ExpertsConfig,
        device: torch.device,
    ) -> None:
        self._memory, self._extents, self._dtype, self._config, self._device = memory, extents, dtype, config, device
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
        tokens = checks.check_tokens(x, self._extents.M, self._extents.H)
        shape, dtypes = (tokens, self._extents.H), (self._dtype, *checks.NARROW)
        checks.check_given("dispatch", "x", x, self._device, shape, dtypes)
        if isinstance(self._extents, FewTokens):
            checks.check_messages(x)
        form = checks.form_of(x, x_scales, quantize, self._dtype)
        self._check_choices(tokens, topk_ids, topk_weights)
        if num_tokens is not None:
            checks.check_given("dispatch", "num_tokens", num_tokens, self._device, (1,), (torch.int32,))
        narrow = x.dtype if quantize is None else checks.quantized_dtype()
        format = Format(layout, narrow if x_scales is None else BYTES, narrow, form.SCALES)
        weighted, counted = topk_weights is not None, num_tokens is not None
        return self.dispatch(tokens, topk_ids.dtype, weighted, form, format, counted, async_op)

    def of_route(self, topk_ids: Any, topk_weights: Any, layout: object) -> Plan:
        """Of a dispatch of the choices alone."""
        layout = checks.check_layout(layout, self._config)
        checks.check_number(topk_ids, self._extents.M)
        self._check_choices(len(topk_ids), topk_ids, topk_weights)
        format = Format(layout, self._dtype, self._dtype)
        return self.dispatch(len(topk_ids), topk_ids.dtype, topk_weights is not None, ROUTING, format)

    def of_combine(
        self, y: Any, received: Received, topk_weights: Any, out: Any, biases: tuple, async_op: bool
    ) -> Plan:
        """Checks what `ExpertParallel.combine` was given."""
        tokens, shape = received.num_tokens, (received.num_tokens, self._extents.H)
        views = self.views_of(Format(received.layout, self._dtype, self._dtype))
        checks.check_given("combine", "y", y, self._device, tuple(views[0].rows.shape), (self._dtype,))
        if topk_weights is not None:
            pairs = (tokens, self._extents.K)
            checks.check_given("combine", "topk_weights", topk_weights, self._device, pairs, (torch.float32,))
        checks.check_given("combine", "out", out, self._device, shape, (self._dtype,))
        for each in biases:
            checks.check_given("combine", "bias", each, self._device, shape, (self._dtype,))
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

    def _check_choices(self, tokens: int, topk_ids: Any, topk_weights: Any) -> None:
        pairs = (tokens, self._extents.K)
        checks.check_given("dispatch", "topk_ids", topk_ids, self._device, pairs, IDS)
        if topk_weights is not None:
            checks.check_given("dispatch", "topk_weights", topk_weights, self._device, pairs, (torch.float32,))


def kind_of(tensor: Any) -> Any:
    """What a plan depends on of a tensor, or of None."""
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
