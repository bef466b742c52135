"""`ExpertParallel`: dispatch and combine of one layer's shape, as the host calls them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from iris import simulator
from iris.ccl.checks import compare_calls
from iris.ccl.kernel_launch import leaving_room
from iris.ccl.protocols import CollectivesContext
from iris.compat.cuda import current_raw_stream, is_current_stream_capturing
from iris.errors import (
    HeapClosedError,
    InvalidExpertsError,
    MismatchedCollectiveError,
    SeveralHostsError,
    TooManyInFlightError,
)
from iris.experts import checks
from iris.experts.combine import DISPATCHED, GIVEN, UNWEIGHTED, combine
from iris.experts.config import ExpertsConfig
from iris.experts.dispatch import dispatch
from iris.experts.kernel_arguments import Extents, FewTokens, Form, Layout, Scales
from iris.experts.low_latency.combine import combine as low_latency_combine
from iris.experts.low_latency.dispatch import dispatch as low_latency_dispatch
from iris.experts.low_latency.memory import few_tokens, power_of_two
from iris.experts.memory import Memory, extents
from iris.experts.received import Received
from iris.heap import describe_address
from iris.heap.history import debugging
from iris.language.target import on_nvidia, threads_per_warp
from iris.operators.graph_break import methods_break_graph
from iris.operators.version_counter import bump_version
from iris.runtime.launch import addresses, prepare

# Programs of a launch in the simulator.
SIMULATED_PROGRAMS = 4
NUM_WARPS = 8
IDS = (torch.int32, torch.int64)
# What rows of fp8 are moved as, where their values do not matter.
BYTES = torch.uint8

DEBUGGING = debugging()


@methods_break_graph("ctx.experts is for the host")
class ExpertParallel:
    """Experts that are shared by the ranks of a group; made by ``ctx.experts``, collectively.

    Rank r has the experts from ``r * num_experts / ranks`` on. Calls are enqueued on the current stream. Every rank
    makes the same calls in the same order; each with as many tokens as it has, 0 too. They meet nobody on the host and
    may be captured in a CUDA graph, from the first on. Calls on several streams have to wait for each other. A replay
    uses the memory that the capture has used, so none of that may be in use then. Tensors that are not contiguous are
    copied. Nothing here has gradients.

    Attributes
    ----------
    num_experts, hidden, max_tokens, top_k : int
    dtype : torch.dtype
    config : ExpertsConfig
    num_local_experts, first_expert : int
        This rank's.
    capacity : int
        Rows of an expert at most.
    nbytes : int
        Of the symmetric memory on each rank; what `dispatch` returns lies in memory besides.
    """

    num_experts: int
    hidden: int
    max_tokens: int
    top_k: int

    # What is made in inference mode could not be saved for gradients outside it.
    @torch.inference_mode(False)
    def __init__(
        self,
        context: CollectivesContext,
        num_experts: int,
        hidden: int,
        max_tokens: int,
        top_k: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        config: ExpertsConfig | None,
    ) -> None:
        workspace = context._workspace(group)
        self._context, self._group, self._members = context, group, workspace.group
        self._on_gpu, self.device = context.device.type == "cuda", context.device
        if group in context._spanning:
            raise SeveralHostsError("ctx.experts()", "Give it a group of ranks that are on one host.")
        members = self._members

        def check() -> tuple:
            self.config = checks.check_config(config)
            self.dtype = checks.check_dtype(dtype)
            found = checks.sizes(
                members.size, num_experts=num_experts, hidden=hidden, max_tokens=max_tokens, top_k=top_k
            )
            return found, str(self.dtype), repr(self.config), context.get_cu_count()

        asked = members.agree(check, "set memory aside for experts")
        if any(each[:3] != asked[0][:3] for each in asked):
            each = "; ".join(f"rank {rank}: {said[:3]}" for rank, said in zip(members.ranks, asked, strict=True))
            raise MismatchedCollectiveError(f"The ranks do not ask ctx.experts() for the same: {each}.")
        for name, number in asked[0][0].items():
            setattr(self, name, number)
        self._extents: Extents | FewTokens = extents(
            members.size, self.num_experts, self.top_k, self.max_tokens, self.hidden, self.dtype
        )
        self.num_local_experts = self._extents.LOCAL
        self.first_expert = members.rank * self.num_local_experts
        self.capacity = members.size * self.max_tokens
        most = SIMULATED_PROGRAMS if simulator.ACTIVE else power_of_two(min(each[3] for each in asked)) // 2
        self._programs = max(1, min(self.config.num_sms or most, most))
        self._kernels: dict[str, Any] = {"dispatch": dispatch, "combine": combine}
        if checks.is_low_latency(self.config, self._extents):
            self._extents = few_tokens(self._extents, self._programs, NUM_WARPS)
            self._programs = self._extents.PROGRAMS
            self._kernels = {"dispatch": low_latency_dispatch, "combine": low_latency_combine}
        # Behind a barrier of its ranks a released slot is free: made here, since its first call meets.
        context.device_barrier(group)
        self._memory: Memory | None = Memory(workspace, self._extents, self._programs, self.dtype, self.config)
        self.nbytes = self._memory.mapping.size
        self._abort_flag = self._memory.abort_flag
        self._in_use = [False] * self.config.in_flight
        self._launches: dict[tuple, Callable[..., None]] = {}
        # Compile and load now, so that no rank's kernel waits while another's is being compiled.
        members.agree(self._prepare_all, "compile dispatch and combine")

    @torch.no_grad()
    def _prepare_all(self) -> None:
        memory = self._open()
        slot, layout = memory.slots[0], next(iter(memory.layouts[0].values()))
        x = layout.rows[:0]
        for ids in IDS:
            pairs = layout.places[:0].to(ids)
            given = (slot, x, None, pairs, slot.weights, layout, 0, 0, 0, Form(), self._extents)
            self._launch("dispatch", *given, only_prepare=True)
        for weights in (UNWEIGHTED, DISPATCHED, GIVEN):
            self._launch(
                "combine", slot, x, slot.weights, layout.places, x, weights.value, self._extents, only_prepare=True
            )

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "expanded",
    ) -> Received:
        """Send each token to the ranks of its experts, once to each rank, and place its row for each expert.

        Collective; does not block the host.

        Parameters
        ----------
        x : torch.Tensor
            ``[tokens, hidden]`` of ``dtype``, or of fp8; at most ``max_tokens``, another number on each rank. Of one
            dtype on all ranks. For fp8, ``hidden`` is a multiple of 16.
        topk_ids : torch.Tensor
            int32 or int64 ``[tokens, top_k]``: each token's experts, -1 for none. One that is chosen twice gets one
            row, which counts twice in `combine`. Other numbers are `InvalidExpertsError` in the simulator and with
            ``IRIS_DEBUG=1``; else they are taken for none.
        topk_weights : torch.Tensor, optional
            float32 ``[tokens, top_k]``: by which `combine` multiplies, on the ranks of the experts. On all ranks, or on
            none.
        x_scales : torch.Tensor, optional
            With an x of fp8, float32: ``[tokens, 1]``, a factor a token, or ``[tokens, hidden / 128]`` (rounded up),
            one for each 128 elements. They travel beside the rows, to ``received.scales``.
        quantize : "fp8_row", "fp8_block128", optional
            Rows of ``dtype`` travel as float8_e4m3fn (on CDNA3 float8_e4m3fnuz), divided by such factors on the way:
            the largest absolute value of a row, or of 128 elements, becomes the largest of the type. The same on all
            ranks. As for an x of fp8, the first call compiles.
        layout : "expanded", "compact"
            How rows lie: see `Received`.

        Raises
        ------
        InvalidExpertsError
            Tensors do not fit, there are too many tokens, or an expert's number is wrong.
        TooManyInFlightError
            `ExpertsConfig.in_flight` results are in use.
        GroupAbortedError
            The group is broken by an earlier call.
        """
        self._enter()
        layout = checks.check_layout(layout, self.config)
        tokens = checks.check_tokens(x, self.max_tokens, self.hidden)
        shape, dtypes = (tokens, self.hidden), (self.dtype, *checks.NARROW)
        checks.check_given("dispatch", "x", x, self.device, shape, dtypes)
        form = checks.form_of(x, x_scales, quantize, self.dtype)
        return self._dispatch(tokens, x, topk_ids, topk_weights, form, x_scales, quantize, layout)

    def _dispatch(
        self,
        tokens: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        form: Form,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "compact",
        rows: torch.Tensor | None = None,
    ) -> Received:
        """``rows``: where rows go, by default to the memory that was set aside for them."""
        memory, pairs = self._open(), (tokens, self.top_k)
        checks.check_given("dispatch", "topk_ids", topk_ids, self.device, pairs, IDS)
        if topk_weights is not None:
            checks.check_given("dispatch", "topk_weights", topk_weights, self.device, pairs, (torch.float32,))
        capturing = self._on_gpu and is_current_stream_capturing()
        if (DEBUGGING or simulator.ACTIVE) and not capturing:
            checks.check_numbers(topk_ids, self.num_experts)
        if all(self._in_use):
            raise TooManyInFlightError(self.config.in_flight)
        number, weighted = self._in_use.index(False), topk_weights is not None
        weights = "weights given" if weighted else "no weights"
        self._compare(f"dispatch() in slot {number}, layout={layout!r}, {weights}, of {x.dtype}, {form}")
        slot, tensors, scales = memory.slots[number], memory.layouts[number][layout], None
        if rows is not None:
            tensors = tensors._replace(rows=rows)
        narrow = x.dtype if quantize is None else checks.quantized_dtype()
        if form.SCALES:
            slot, tensors, scales = memory.narrow(number, layout, narrow if x_scales is None else BYTES, form.SCALES)
            if x_scales is not None:
                scales = scales._replace(given=x_scales.contiguous())
                x = x.contiguous().view(BYTES)
        self._launch(
            "dispatch",
            slot,
            x.contiguous(),
            scales,
            topk_ids.contiguous(),
            slot.weights if topk_weights is None else topk_weights.contiguous(),
            tensors,
            tokens,
            int(weighted),
            self.config.alignment if layout == "compact" else 0,
            form,
            self._extents,
        )
        self._in_use[number] = True
        results = self._results(tensors._replace(rows=tensors.rows.view(narrow)), scales, layout)
        return Received(self, number, layout, results, tokens, weighted, release=self._release)

    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add up what the experts have made of each token, and return it to the token's rank; ends ``received``.

        ``out[t]`` is the sum of ``weights[t, k] * y[the row of token t for its k-th expert]``, and 0 for a token
        without experts. Products and sums are formed in float32: on the ranks of the experts in the order of a token's
        choices; then, each rounded to ``dtype`` where it comes from another rank, in the order of ranks. Without
        weights, here or in the dispatch, rows are added as they are. Collective; does not block the host.

        Parameters
        ----------
        y : torch.Tensor
            Of the shape of ``received.rows``, of ``dtype``, for instance those themselves. Rows behind the last of an
            expert are not read.
        received : Received
            What `dispatch` returned, of the same `ExpertParallel`.
        topk_weights : torch.Tensor, optional
            float32 ``[tokens, top_k]``, in place of those of the dispatch; on all ranks, or on none. They take a step
            more than those.
        out : torch.Tensor, optional
            ``[tokens, hidden]`` of ``dtype``, contiguous, apart from ``y``. Without it the result is allocated.

        Raises
        ------
        InvalidExpertsError
            Tensors do not fit, or ``received`` is of another `ExpertParallel`.
        ReceivedUsedUpError
            ``received`` was combined or released before.
        GroupAbortedError
            The group is broken by an earlier call.
        """
        memory = self._enter()
        if not isinstance(received, Received) or received._owner is not self:
            what = "is of another one" if isinstance(received, Received) else "is none"
            raise InvalidExpertsError(
                f"combine() takes what dispatch() of the same ctx.experts() has returned, and {received!r:.80} {what}."
            )
        received._check_in_use("combine")
        tokens = received.num_tokens
        checks.check_given("combine", "y", y, self.device, tuple(received.rows.shape), (self.dtype,))
        if topk_weights is not None:
            pairs = (tokens, self.top_k)
            checks.check_given("combine", "topk_weights", topk_weights, self.device, pairs, (torch.float32,))
        if out is None:
            out = room_for(received, tokens, self.dtype)
        checks.check_given("combine", "out", out, self.device, (tokens, self.hidden), (self.dtype,))
        if not out.is_contiguous():
            raise InvalidExpertsError(f"combine() takes an out that is contiguous; its strides are {out.stride()}.")
        number = received._slot
        self._compare(f"combine() in slot {number}, weights {'not ' if topk_weights is None else ''}given")
        weights = DISPATCHED if received.weighted else UNWEIGHTED
        slot, tensors = memory.slots[number], memory.layouts[number][received.layout]
        self._launch(
            "combine",
            slot,
            y.contiguous(),
            slot.weights if topk_weights is None else topk_weights.contiguous(),
            tensors.places,
            out,
            (weights if topk_weights is None else GIVEN).value,
            self._extents,
        )
        bump_version(out)
        self._end(received, "combine()")
        return out

    def close(self) -> None:
        """Give the memory back. Local. A second call does nothing.

        The caller guarantees that no kernel of these calls runs any more, on any rank, and that no graph that has
        captured one will be replayed.
        """
        if self._memory is not None:
            self._memory.close()
            self._memory = None
            self._launches.clear()

    def __repr__(self) -> str:
        return (
            f"<ExpertParallel of {self.num_experts} experts on {self._members.size} ranks, {self.max_tokens} tokens of "
            f"{self.hidden} {self.dtype} and {self.top_k} choices at most>"
        )

    def _open(self) -> Memory:
        if self._memory is None:
            raise HeapClosedError("This ctx.experts() was closed. Make another one.")
        return self._memory

    def _enter(self) -> Memory:
        self._context.heap.check_open()
        memory = self._open()
        self._abort_flag.check()
        return memory

    def _compare(self, call: str) -> None:
        """In debug mode: that all ranks make the same call."""
        if DEBUGGING and not (self._on_gpu and is_current_stream_capturing()):
            compare_calls(self._members, f"ctx.experts: {call}")

    def _results(
        self, tensors: Layout, scales: Scales | None, layout: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        rows, factors = tensors.rows, None if scales is None else scales.placed
        if layout == "expanded":
            rows = rows.view(self.num_local_experts, self.capacity, self.hidden)
            factors = None if factors is None else factors.view(*rows.shape[:-1], -1)
        return rows, tensors.counts, tensors.offsets, factors

    def _places(self, received: Received) -> torch.Tensor:
        """int32 ``[ranks, max_tokens, top_k]``: which row each choice of each rank's tokens is; -1 for none here."""
        memory, e = self._open(), self._extents
        slot, tensors = memory.slots[received._slot], memory.layouts[received._slot][received.layout]
        if isinstance(e, FewTokens):
            # Of tokens that a rank has not got, too: they have no choices.
            return tensors.places.view(e.W, e.M, e.K).clone()
        there = torch.arange(e.M, device=self.device) < slot.tokens[:, None]
        return torch.where(there[:, :, None], tensors.places.view(e.W, e.M, e.K), -1)

    def _release(self, received: Received) -> None:
        self._enter()
        self._compare(f"release() of slot {received._slot}")
        self._context.device_barrier(self._group)
        self._end(received, "release()")

    def _end(self, received: Received, how: str) -> None:
        received._ended = how
        self._in_use[received._slot] = False

    def _launch(self, name: str, *args: Any, only_prepare: bool = False) -> None:
        """Enqueue on the current stream; compile first, if pointers are aligned as in no launch before."""
        kernel = self._kernels[name]
        given = (each.given if isinstance(each, Scales) else each for each in args)
        kinds = [(each.dtype, each.data_ptr() % 16) for each in given if isinstance(each, torch.Tensor)]
        # The form of the rows, or whose weights they are multiplied by: a constant of the kernel.
        key = (name, args[-2], *kinds)
        try:
            launch = self._launches.get(key)
            if launch is None:
                options: dict[str, Any] = leaving_room(NUM_WARPS * threads_per_warp()) if on_nvidia() else {}
                grid = (self._programs, 1, 1)
                self._launches[key] = launch = prepare(kernel, grid, *args, num_warps=NUM_WARPS, **options)
            if only_prepare:
                return
            launch(current_raw_stream(self._context.gpu_id) if self._on_gpu else None, addresses(args))
            if simulator.ACTIVE:
                # It is over, and so what has gone wrong in it is known.
                self._abort_flag.raise_recorded(describe_address)
        except BaseException as error:
            self._abort_flag.interrupted(name, error)
            raise


def room_for(received: Received, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Room for the result of a combine."""
    return received.rows.new_empty(tokens, received.rows.shape[-1], dtype=dtype)
