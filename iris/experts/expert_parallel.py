"""`ExpertParallel`: dispatch and combine of one layer's shape, as the host calls them."""

from collections.abc import Callable
from typing import Literal, overload

import torch
import torch.distributed as dist
from triton import next_power_of_2

from iris import simulator
from iris.ccl.chunks import programs_beside_rails
from iris.ccl.protocols import CollectivesContext
from iris.errors import InvalidExpertsError, MismatchedCollectiveError, PendingCallError
from iris.experts import checks
from iris.experts.calls import Calls
from iris.experts.config import ExpertsConfig
from iris.experts.kernels import choose
from iris.experts.memory import Memory, extents
from iris.experts.over_hosts import CallsOverHosts
from iris.experts.pending import PendingCall
from iris.experts.received import Received
from iris.experts.statistics import Statistics
from iris.operators.graph_break import methods_break_graph

# Programs of a launch in the simulator.
SIMULATED_PROGRAMS = 4


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
    device : torch.device
    config : ExpertsConfig
    num_local_experts, first_expert : int
        This rank's.
    capacity : int
        Rows of an expert at most.
    quantized_dtype : torch.dtype
        What ``quantize`` makes of rows: float8_e4m3fn; on CDNA3 float8_e4m3fnuz.
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
        closed: Callable[["ExpertParallel"], object],
    ) -> None:
        """``closed``: called when it has been closed."""
        workspace = context._workspace(group)
        self._members, self._closed = workspace.group, closed
        # Of ranks on several hosts: these, and what reaches the others of them.
        spanning = context._spanning.get(group)
        if spanning is not None:
            self._members = spanning.group
        members, hosts = self._members, 1 if spanning is None else len(spanning.hosts)

        def check() -> tuple:
            self.config = checks.check_config(config)
            self.dtype = checks.check_dtype(dtype)
            found = checks.sizes(
                members.size, hosts, num_experts=num_experts, hidden=hidden, max_tokens=max_tokens, top_k=top_k
            )
            return found, str(self.dtype), repr(self.config), context.get_cu_count()

        asked = members.agree(check, "set memory aside for experts")
        if any(each[:3] != asked[0][:3] for each in asked):
            each = "; ".join(f"rank {rank}: {said[:3]}" for rank, said in zip(members.ranks, asked, strict=True))
            raise MismatchedCollectiveError(f"The ranks do not ask ctx.experts() for the same: {each}.")
        for name, number in asked[0][0].items():
            setattr(self, name, number)
        # So many send, and as many receive: two on each multiprocessor, unless there are to be fewer of these.
        programs = SIMULATED_PROGRAMS if simulator.ACTIVE else next_power_of_2(min(each[3] for each in asked)) // 2
        if self.config.num_sms is not None:
            programs = max(1, min(self.config.num_sms // 2, programs))
        elif hosts > 1 and not simulator.ACTIVE:
            programs = min(programs, programs_beside_rails(min(each[3] for each in asked)) or programs)
        # A host has its share of the experts, and its ranks what all ranks of their rails dispatch.
        sizes = self.num_experts // hosts, self.top_k, self.max_tokens * hosts, self.hidden
        # So few that each may have the warps of two. (Measured with 16 of 132 multiprocessors.)
        alone = self.config.num_sms is not None and 8 * programs <= min(each[3] for each in asked)
        all_sizes = extents(workspace.group.size, *sizes, self.dtype, programs, alone)
        of_layer = choose(self.config, all_sizes, self.dtype)
        self.device = context.device
        self.num_local_experts = of_layer.LOCAL
        self.first_expert = members.rank * self.num_local_experts
        self.capacity = members.size * self.max_tokens
        # After a barrier of its ranks a released slot is free: made here, since its first call meets.
        context.device_barrier(group)
        self.quantized_dtype = checks.quantized_dtype()
        if spanning is None:
            memory = Memory(workspace, of_layer, self.dtype, self.config)
            self._calls = Calls(context, group, members, memory, of_layer, self.dtype, self.config)
        else:
            found: list[Memory] = []
            # On all hosts, or on none.
            members.agree(
                lambda: found.append(Memory(workspace, of_layer, self.dtype, self.config)),
                "set memory aside for experts",
            )
            memory = found[0]
            self._calls = CallsOverHosts(context, group, spanning, memory, of_layer, self.dtype, self.config)
        self.nbytes = memory.mapping.size

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "expanded",
        num_tokens: torch.Tensor | None = None,
        async_op: Literal[False] = False,
    ) -> Received: ...

    @overload
    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "expanded",
        num_tokens: torch.Tensor | None = None,
        async_op: Literal[True],
    ) -> PendingCall[Received]: ...

    def dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        x_scales: torch.Tensor | None = None,
        quantize: str | None = None,
        layout: str = "expanded",
        num_tokens: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> "Received | PendingCall[Received]":
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
            Rows of ``dtype`` travel as float8_e4m3fn (on CDNA3 float8_e4m3fnuz), quantized with such factors: the
            largest absolute value of a row, or of 128 elements, becomes the largest of the type. The same on all ranks.
            As for an x of fp8, the first call compiles.
        layout : "expanded", "compact"
            How rows lie: see `Received`.
        num_tokens : torch.Tensor, optional
            int32 ``[1]``: on the device, how many tokens there are, the first ones of ``x``; at most as many as that
            has, and at least none. For graphs, of which each replay has another number. `combine` writes as many rows
            of its result, and leaves the others as they are. A rank may give it where others do not. The first call
            with it compiles.
        async_op : bool
            Enqueue what sends alone, and return a `PendingCall`, whose ``wait()`` enqueues what receives and returns
            the result. The same on all ranks. The first such call compiles.

        Raises
        ------
        InvalidExpertsError
            Tensors do not fit, there are too many tokens, or an expert's number is wrong.
        TooManyInFlightError
            `ExpertsConfig.in_flight` results are in use.
        GroupAbortedError
            The group is broken by an earlier call.
        """
        return self._calls.dispatch(x, topk_ids, topk_weights, x_scales, quantize, layout, num_tokens, async_op)

    @overload
    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        async_op: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        async_op: Literal[True],
    ) -> PendingCall[torch.Tensor]: ...

    def combine(
        self,
        y: torch.Tensor,
        received: Received,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        async_op: bool = False,
    ) -> "torch.Tensor | PendingCall[torch.Tensor]":
        """Add up what the experts have made of each token, and return it to the token's rank; ends ``received``.

        ``out[t]`` is the sum of ``weights[t, k] * y[the row of token t for its k-th expert]``, and 0 for a token
        without experts. Products and sums are formed in float32: on the ranks of the experts in the order of a token's
        choices; then, each rounded to ``dtype`` where it comes from another rank, in the order of ranks. Without
        weights, here or in the dispatch, rows are added as they are. Collective; does not block the host.

        Parameters
        ----------
        y : torch.Tensor
            Of the shape of ``received.rows``, of ``dtype``, for instance those themselves. Rows after the last of an
            expert are not read.
        received : Received
            What `dispatch` returned, of the same `ExpertParallel`.
        topk_weights : torch.Tensor, optional
            float32 ``[tokens, top_k]``, in place of those of the dispatch; on all ranks, or on none. They take a step
            more than those.
        out : torch.Tensor, optional
            ``[tokens, hidden]`` of ``dtype``, contiguous, apart from ``y``. Without it the result is allocated.
        bias : torch.Tensor, or a pair of them, optional
            ``[tokens, hidden]`` of ``dtype`` each, added to the result, in float32, before it is rounded: after the
            sum of all ranks, the first one first. For a residual, or what a shared expert has made. A rank may have
            one where others have none. It may be ``out``, in the same memory. The first call with one compiles.
        async_op : bool
            As of `dispatch`; ``wait()`` returns the result. ``received`` ends with the call, its memory with the wait.

        Raises
        ------
        InvalidExpertsError
            Tensors do not fit, ``out`` overlaps ``y`` or lies across ``bias``, or ``received`` is of another
            `ExpertParallel`, or a `PendingCall`.
        ReceivedUsedUpError
            ``received`` was combined or released before.
        GroupAbortedError
            The group is broken by an earlier call.
        """
        return self._calls.combine(y, received, topk_weights, out, bias, async_op)

    def statistics(self) -> Statistics:
        """What this rank's kernels have counted, on the device. Local; waits for nothing.

        The tensors are those that kernels add to, so a program may set them to zero, by their streams' order.

        Raises
        ------
        InvalidExpertsError
            They were not asked for by `ExpertsConfig.statistics`.
        HeapClosedError
            The `ExpertParallel` was closed.
        """
        found = self._calls.open_memory().statistics
        if found is None:
            raise InvalidExpertsError(
                "statistics() has nothing to show: kernels count only with ExpertsConfig(statistics=True), which costs "
                "time. Make the experts with it."
            )
        return found

    def close(self) -> None:
        """Give the memory back. Local. A second call does nothing.

        The caller guarantees that no kernel of these calls runs any more, on any rank, and that no graph that has
        captured one will be replayed.

        Raises
        ------
        PendingCallError
            Nobody has waited for a call with ``async_op=True``. It stays open.
        """
        if self._calls.pending:
            raise PendingCallError(
                f"close() comes before wait() of {' and '.join(self._calls.pending.values())}, with async_op=True: "
                "what other ranks have sent was not received. Wait for each of them first. Where a handle is lost, "
                "closing the context gives the memory back."
            )
        self._close()

    def _close(self) -> None:
        """Whatever is not waited for: a later wait() says that it was closed."""
        if self._calls.close():
            self._closed(self)

    def __repr__(self) -> str:
        return (
            f"<ExpertParallel of {self.num_experts} experts on {self._members.size} ranks, {self.max_tokens} tokens of "
            f"{self.hidden} {self.dtype} and {self.top_k} choices at most>"
        )
