"""Dispatches and combines on the host: what `ExpertParallel` and `iris.experts.functional` have in common.

A call of tensors like those of an earlier one costs a look into a dictionary (`iris.experts.plan`), which memory is in
use, and the driver's call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from iris import simulator
from iris.ccl.checks import compare_calls
from iris.ccl.enqueue import to_read
from iris.ccl.kernel_launch import leaving_room
from iris.ccl.protocols import CollectivesContext
from iris.ccl.work import Work
from iris.compat.cuda import current_raw_stream, is_current_stream_capturing
from iris.cuda_graphs.capture import capture_id
from iris.errors import HeapClosedError, PendingCallError, TooManyInFlightError
from iris.experts import checks, padding
from iris.experts.config import ExpertsConfig
from iris.experts.kernel_arguments import Extents, FewTokens, Form
from iris.experts.kernels import kernels_of
from iris.experts.memory import Memory, layout_rows
from iris.experts.pending import PendingCall
from iris.experts.plan import Plan, Plans, dtypes_and_shapes, pointers_of
from iris.experts.received import Received
from iris.experts.token_rows import DISPATCHED, GIVEN, UNWEIGHTED
from iris.experts.views import Format, Views, shape_of_rows, with_rows
from iris.heap import describe_address
from iris.heap.history import debugging
from iris.language.target import on_nvidia
from iris.operators.version_counter import bump_version
from iris.runtime.launch import prepare
from iris.world import Group

DEBUGGING = debugging()
NOTHING = torch.empty(0)


class Calls:
    """Of one `ExpertParallel`. Made collectively: compiles.

    Attributes
    ----------
    context, group
        As `ctx.experts` was called.
    extents : Extents or FewTokens
    dtype : torch.dtype
    config : ExpertsConfig
    abort_flag : AbortFlag
        Of the group.
    pending : dict of str
        The calls that nobody has waited for.
    limits : Limits
        Of what a program may give.
    checked : dict
        Kinds of calls of `iris.ops.experts_mlp` that need no other look.
    """

    def __init__(
        self,
        context: CollectivesContext,
        group: dist.ProcessGroup | None,
        members: Group,
        memory: Memory,
        extents: Extents | FewTokens,
        dtype: torch.dtype,
        config: ExpertsConfig,
    ) -> None:
        self.context, self.group, self.extents, self.dtype, self.config = context, group, extents, dtype, config
        self._members, self._kernels, self.checked = members, kernels_of(extents), dict[tuple, None]()
        self._device, self._on_gpu = context.device, context.device.type == "cuda"
        self._memory: Memory | None = memory
        self.abort_flag, self._state = memory.abort_flag, memory.abort_flag.state
        self._in_use = [False] * config.in_flight
        self.pending: dict[object, str] = {}
        self._plans = Plans(memory, extents, dtype, config, self._device)
        self.limits = self._plans.limits
        # A pointer where no weights are given. Nobody reads what is there.
        self._no_weights = memory.slots[0].weights
        # Compile and load now: no rank's kernel waits while another's is being compiled.
        members.agree(self._prepare_all, "compile dispatch and combine")

    # What programs call -----------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "compact",
        num_tokens: torch.Tensor | None = None,
        async_op: bool = False,
        rows: torch.Tensor | None = None,
    ) -> Any:
        """`ExpertParallel.dispatch`. ``rows [rows, H]``: where rows go, by default to the memory set aside for them."""
        self.enter()
        kinds = dtypes_and_shapes(x, topk_ids, topk_weights, x_scales, num_tokens)
        key = (layout, quantize, async_op, kinds)
        plan = self._plans.find(key)
        if plan is None:
            plan = self._plans.of_dispatch(x, topk_ids, topk_weights, x_scales, quantize, layout, num_tokens, async_op)
            self._plans.remember(key, kinds, plan)
        factors = () if x_scales is None else (to_read(x_scales),)
        return self._send(plan, to_read(x), topk_ids, topk_weights, factors, layout, num_tokens, rows)

    def route(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None, layout: str) -> Received:
        """A dispatch of the choices alone: for a combine of rows that are there."""
        self.enter()
        kinds = dtypes_and_shapes(topk_ids, topk_weights)
        key = (layout, kinds)
        plan = self._plans.find(key)
        if plan is None:
            plan = self._plans.of_route(topk_ids, topk_weights, layout)
            self._plans.remember(key, kinds, plan)
        return self._send(plan, plan.views[0].rows, topk_ids, topk_weights, (), layout)

    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        async_op: bool = False,
    ) -> Any:
        """`ExpertParallel.combine`."""
        self.enter()
        checks.check_received(received, self)
        tokens = self._tokens_of(received)
        if out is None:
            out = room_for(tokens, self.extents.H, self.dtype, self._device)
        kinds = dtypes_and_shapes(y, topk_weights, out)
        biases: tuple[torch.Tensor, ...] = ()
        if bias is not None:
            biases = checks.biases_of(bias)
            kinds += dtypes_and_shapes(*biases)
        key = (received.layout, tokens, received.weighted, async_op, kinds)
        plan = self._plans.find(key)
        if plan is None:
            plan = self._plans.of_combine(y, received, tokens, topk_weights, out, biases, async_op)
            self._plans.remember(key, kinds, plan)
        checks.check_out(out)
        weights = self._no_weights if topk_weights is None else to_read(topk_weights)
        given: tuple[torch.Tensor, ...] = (to_read(y), weights, out)
        if biases:
            given += tuple([to_read(each) for each in biases])
        pointers = pointers_of("combine", given)
        checks.check_apart(pointers[2], out.nbytes, y=pointers[0], y_nbytes=given[0].nbytes, biases=pointers[3:])
        if DEBUGGING and not self._capturing():
            how = "not given" if topk_weights is None else "given"
            self.compare(f"combine() in slot {received._slot}, weights {how}")
        views = plan.views[received._slot]
        self._launch(plan, views, given, pointers)
        received._ended = "combine()"
        if plan.receiving is None:
            return self._combined(received._slot, out)
        end = functools.partial(self._combined, received._slot, out)
        return self._pend_launch(plan.receiving, views, received._slot, given, pointers, end)

    def release(self, received: Received) -> None:
        """`Received.release`."""
        self.enter()
        if DEBUGGING and not self._capturing():
            self.compare(f"release() of slot {received._slot}")
        self.context.device_barrier(self.group)
        self.end(received, "release()")

    @torch.no_grad()
    def zero_padding(self, received: Received) -> None:
        """`Received.zero_padding`."""
        self.enter()
        for rows in (received.rows, received.scales):
            if rows is not None:
                args = padding.arguments(rows, received.counts, received.offsets, self.extents)
                launches = self._plans.launches_of(("zero_padding", rows.dtype, args[3:5]))
                padding.enqueue(launches, self._kernels.programs, args, self._stream())
                bump_version(rows)

    def close(self) -> bool:
        """`ExpertParallel.close`. Whether it was open."""
        memory, self._memory = self._memory, None
        if memory is None:
            return False
        memory.close()
        # Views keep it mapped.
        del self._plans
        self._no_weights = NOTHING
        return True

    # For gradients ----------------------------------------------------------------------------------------------------

    def rows_shape(self, layout: str) -> tuple[int, ...]:
        """Of `Received.rows`."""
        layout = checks.check_layout(layout, self.config)
        return shape_of_rows(self.extents, layout, layout_rows(self.extents, layout, self.config.alignment))

    def choices(self, received: Received) -> tuple[torch.Tensor, torch.Tensor]:
        """Which row each choice of each rank's tokens is, int32, -1 for none here; and its weight, float32, if given.

        Each is ``[ranks, max_tokens, top_k]``.
        """
        memory, extents = self.open_memory(), self.extents
        slot, tensors = memory.slots[received._slot], memory.layouts[received._slot][received.layout]
        places = tensors.places.view(extents.W, extents.M, extents.K)
        if isinstance(extents, FewTokens):
            # Those of tokens that a rank has not got have been written, too. Programs get a copy.
            return places.clone(), slot.weights
        there = torch.arange(extents.M, device=self._device) < slot.tokens[:, None]
        return torch.where(there[:, :, None], places, -1), slot.weights

    @property
    def choices_shape(self) -> tuple[int, int, int]:
        """Of what `choices` returns."""
        return self.extents.W, self.extents.M, self.extents.K

    # For kernels that others enqueue ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Raise unless a call may begin."""
        if self.context.heap.closed:
            self.context.heap.check_open()
        self.open_memory()
        if self._state[0]:
            raise self.abort_flag.error()

    def open_memory(self) -> Memory:
        if self._memory is None:
            raise HeapClosedError("This ctx.experts() was closed. Make another one.")
        return self._memory

    def broken_by(self, call: str, error: BaseException) -> None:
        """``error`` has ended a call before what the other ranks wait for."""
        self.abort_flag.interrupted(call, error)

    def compare(self, call: str) -> None:
        """That all ranks make the same call."""
        compare_calls(self._members, f"ctx.experts: {call}")

    def end(self, received: Received, how: str) -> None:
        """``received`` has been used up by the call ``how``; its slot is free."""
        received._ended = how
        self._in_use[received._slot] = False

    # ------------------------------------------------------------------------------------------------------------------

    def _tokens_of(self, received: Received) -> int:
        """Rows of the result of its combine."""
        return received.num_tokens

    def _stream(self) -> int | None:
        return current_raw_stream(self.context.gpu_id) if self._on_gpu else None

    def _capturing(self) -> bool:
        return self._on_gpu and is_current_stream_capturing()

    def _capture(self) -> int | None:
        """The number of the capture of a graph that is in progress on the current stream, if one is."""
        return capture_id(self._stream()) if self._capturing() else None

    def _send(
        self,
        plan: Plan,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        factors: tuple[torch.Tensor, ...],
        layout: str,
        num_tokens: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> Any:
        weights = self._no_weights if topk_weights is None else to_read(topk_weights)
        given = (x, to_read(topk_ids), weights, *factors)
        if num_tokens is not None:
            given += (num_tokens,)
        pointers = pointers_of("dispatch", given)
        checked = (DEBUGGING or simulator.ACTIVE) and not self._capturing()
        if checked:
            there = topk_ids if num_tokens is None else topk_ids[: max(int(num_tokens), 0)]
            checks.check_numbers(there, self.extents.E)
        try:
            number = self._in_use.index(False)
        except ValueError:
            raise TooManyInFlightError(self.config.in_flight, [*self.pending.values()]) from None
        weighted = topk_weights is not None
        if DEBUGGING and checked:
            how = f"{'weights given' if weighted else 'no weights'}, {checks.in_words(x.dtype, plan.tail[3])}"
            self.compare(f"dispatch() in slot {number}, layout={layout!r}, {how}")
        views = plan.views[number] if rows is None else with_rows(plan.views[number], rows)
        self._launch(plan, views, given, pointers)
        self._in_use[number] = True
        tokens = topk_ids.shape[0]
        if plan.receiving is None:
            return self._dispatched(number, layout, views, tokens, weighted)
        end = functools.partial(self._dispatched, number, layout, views, tokens, weighted)
        return self._pend_launch(plan.receiving, views, number, given, pointers, end)

    def _dispatched(self, number: int, layout: str, views: Views, tokens: int, weighted: bool) -> Received:
        # Autograd may have saved what an earlier dispatch had put there.
        bump_version(views.rows)
        return Received(self, number, layout, views, tokens, weighted)

    def _combined(self, number: int, out: torch.Tensor) -> torch.Tensor:
        bump_version(out)
        self._in_use[number] = False
        return out

    def _pend_launch(
        self,
        plan: Plan,
        views: Views,
        number: int,
        given: tuple[torch.Tensor, ...],
        pointers: tuple[int, ...],
        end: Callable[[], Any],
    ) -> PendingCall:
        """What was sent from this slot is received when a program waits for it, by a launch of ``plan``."""

        def receive() -> Any:
            self._launch(plan, views, given, pointers)
            return end()

        return self._pend(f"{plan.kernel.name}() in slot {number}", given, receive)

    def _pend(self, call: str, used: Sequence[torch.Tensor], receive: Callable[[], Any]) -> PendingCall:
        """The handle of a call whose other half ``receive`` enqueues, on ``used``; it returns the result."""
        sent, stream, capture, key = Work(self._on_gpu), self._stream(), self._capture(), object()
        self.pending[key] = call

        def wait() -> Any:
            self.enter()
            moves = self._stream() != stream
            # A stream that is not captured yet is so from its wait for what was sent on.
            joins = moves and capture is not None and not self._capturing() and capture_id(stream) == capture
            if not joins and self._capture() != capture:
                raise PendingCallError(
                    f"A graph would have one half of {call}. Have the call and its wait() captured in one graph, or "
                    "neither of them."
                )
            if DEBUGGING and capture is None:
                self.compare(f"wait() of {call}")
            if moves:
                sent.wait()
                for each in used:
                    # Else its memory might be given away when the stream that it is of does not need it any more.
                    each.record_stream(torch.cuda.current_stream(self._device))
            result = receive()
            del self.pending[key]
            return result

        return PendingCall(call, wait)

    def _launch(self, plan: Plan, views: Views, given: tuple[torch.Tensor, ...], pointers: tuple[int, ...]) -> None:
        """Enqueue on the current stream; compile first, if pointers are aligned as in no launch before."""
        kernel = plan.kernel
        try:
            aligned = tuple([each & 15 for each in pointers])
            launch = plan.launches.get(aligned)
            if launch is None:
                launch = plan.launches[aligned] = self._prepare(plan, views, given)
            launched = kernel.arguments(views.launched, given if simulator.ACTIVE else pointers, plan.tail)
            launch(self._stream(), launched)
            if simulator.ACTIVE:
                # It is over, and so what has gone wrong in it is known.
                self.abort_flag.raise_recorded(describe_address)
        except BaseException as error:
            self.abort_flag.interrupted(kernel.name, error)
            raise

    def _prepare(self, plan: Plan, views: Views, given: tuple[torch.Tensor, ...]) -> Callable[..., None]:
        options: dict[str, Any] = leaving_room(self._kernels.resident) if on_nvidia() else {}
        args = plan.kernel.arguments(views.tensors, given, plan.tail)
        grid = (plan.programs, 1, 1)
        return prepare(plan.kernel.function, grid, *args, num_warps=self._kernels.num_warps, **options)

    @torch.no_grad()
    def _prepare_all(self) -> None:
        """For rows of the dtype, in memory that is aligned."""
        format = Format(self.config.layouts[0], self.dtype, self.dtype)
        views = self._plans.views_of(format)[0]
        rows, pairs = views.tensors[1].rows[:0], views.tensors[1].places[:0]
        aligned = (0, 0, 0)
        for ids in checks.IDS:
            plan = self._plans.dispatch(0, ids, False, Form(), format)
            plan.launches[aligned] = self._prepare(plan, views, (rows, pairs.to(ids), self._no_weights))
        for weights in (UNWEIGHTED, DISPATCHED, GIVEN):
            plan = self._plans.combine(weights.value, 0, [views])
            plan.launches[aligned] = self._prepare(plan, views, (rows, self._no_weights, rows))


def room_for(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for the result of a combine."""
    return torch.empty((tokens, hidden), dtype=dtype, device=device)
