"""The memory of dispatch and combine, made once, and the launches with what has to stand between them."""

import torch
import triton
from arguments import check_contiguous, check_dtype
from kernel import combine, dispatch, grouped_gemm

import iris

# Pairs that a program counts at a time. Tokens and columns that it sends at a time, 32 KiB of bfloat16, and fetches.
PAIRS = 64
SEND_T, SEND_H = 8, 2048
FETCH_T, FETCH_H = 4, 1024
BLOCK_M, BLOCK_N = 128, 256
# A program compares all experts with all: a block in Triton has up to 2^20 elements.
MOST_EXPERTS = 1024


class ExpertParallel:
    """E experts, of which each rank has E / W, for at most ``num_tokens`` tokens of each rank, ``top`` experts each.

    Made collectively; blocks the host. `dispatch`, `apply` and `combine` are enqueued on the current stream, in this
    order, and can be captured; on one stream, or in one graph, at a time. Ranks may have different numbers of tokens.
    """

    def __init__(
        self, ctx: iris.Iris, num_tokens: int, hidden: int, num_experts: int, top: int, dtype: torch.dtype
    ) -> None:
        W, device = ctx.get_num_ranks(), ctx.device
        check_dtype(dtype)
        if num_experts % W:
            raise ValueError(f"{num_experts} experts cannot be dealt out evenly to {W} ranks.")
        if num_experts > MOST_EXPERTS:
            raise ValueError(f"There are {num_experts} experts, and dispatch takes up to {MOST_EXPERTS}.")
        self.ctx, self.num_experts, self.local, self.top = ctx, num_experts, num_experts // W, top
        self.programs = 4 if iris.simulator.ACTIVE else ctx.get_cu_count()
        pairs = num_tokens * top
        # As many rows as come when all tokens choose the experts of one rank alone.
        self.inbox = ctx.empty(W * pairs, hidden, dtype=dtype)
        self.results = ctx.empty(W * pairs, hidden, dtype=dtype)
        self.table = ctx.zeros(W, num_experts, dtype=torch.int32)
        self.counted = ctx.zeros(W, dtype=torch.int32)
        self.tallied = ctx.zeros(1, dtype=torch.int32)
        # This rank's own: epochs and counts by program, and of each pair its place.
        self.epochs = torch.zeros(self.programs, dtype=torch.int32, device=device)
        self.tallies = torch.empty(self.programs, num_experts, dtype=torch.int32, device=device)
        self.order, self.rows = torch.empty(2, pairs, dtype=torch.int32, device=device)
        # Of the last dispatch, whose rows `combine` fetches.
        self.tokens = 0
        # The first call's counts may come early, but not before the zeros are there.
        ctx.barrier()

    @staticmethod
    def room(num_ranks: int, num_tokens: int, hidden: int, num_experts: int, top: int, dtype: torch.dtype) -> int:
        """Bytes of heap that one needs."""
        return num_ranks * (2 * num_tokens * top * hidden * dtype.itemsize + 4 * num_experts) + (16 << 10)

    def dispatch(self, x: torch.Tensor, experts: torch.Tensor) -> None:
        """Each row of ``x``, ``[T, H]``, to the inboxes of its ``experts``, ``[T, top]`` of int32, both contiguous.

        Experts are numbers from 0 to E - 1, rank by rank, and a token may have one of them twice. -1 is no expert: a
        token that is dropped there goes nowhere, and gets nothing from there. They are on the device, so nobody looks
        whether they are such numbers: with another one, rows are stored into memory that is somebody else's.
        """
        T, H, W = len(x), self.inbox.shape[1], self.ctx.get_num_ranks()
        if T * self.top > len(self.order):
            raise ValueError(f"x has {T} tokens, and there is room for {len(self.order) // self.top}.")
        check_contiguous(
            self.ctx.device, x=(x, self.inbox.dtype, T, H), experts=(experts, torch.int32, T, self.top)
        )  # fmt: skip
        self.tokens = T
        dispatch[(self.programs,)](
            self.ctx.get_device_context(), x, experts, self.inbox, self.order, self.rows, self.tallies, self.tallied,
            self.table, self.counted, self.epochs, T, H, W, self.num_experts,
            triton.next_power_of_2(self.num_experts), self.top, PAIRS,
            SEND_T, min(SEND_H, triton.next_power_of_2(H)), num_warps=8,
        )  # fmt: skip
        # What the peers have stored here is visible to what comes next on this stream.
        self.ctx.device_barrier()

    def apply(self, weights: torch.Tensor) -> None:
        """What is in the inbox times this rank's ``weights``, ``[E / W, H, H]``, contiguous."""
        H = self.inbox.shape[1]
        check_contiguous(self.ctx.device, weights=(weights, self.inbox.dtype, self.local, H, H))
        mine = self.table[:, self.ctx.get_rank() * self.local :][:, : self.local]
        multiply(self.results, self.inbox, weights, mine, self.programs)

    def combine(self, out: torch.Tensor, experts: torch.Tensor, gates: torch.Tensor) -> None:
        """``out``, ``[T, H]``: the sums of each row's results times its ``gates``, float32 ``[T, top]``; contiguous.

        ``T`` and ``experts``: those of the last `dispatch`.
        """
        T, H = self.tokens, self.inbox.shape[1]
        check_contiguous(
            self.ctx.device, out=(out, self.inbox.dtype, T, H), experts=(experts, torch.int32, T, self.top),
            gates=(gates, torch.float32, T, self.top),
        )  # fmt: skip
        block = min(FETCH_H, triton.next_power_of_2(H))
        # In front of the loads: the peers' results are there.
        self.ctx.device_barrier()
        combine[(triton.cdiv(T, FETCH_T) * triton.cdiv(H, block),)](
            self.ctx.get_device_context(), self.results, experts, self.rows, gates, out, T, H,
            self.ctx.get_num_ranks(), self.local, self.top, FETCH_T, block, num_warps=4,
        )  # fmt: skip
        # Who still loads here has not sent its next counts, and this rank's next results come behind those.


def multiply(
    results: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, programs: int
) -> None:
    """``rows`` by expert, each expert's times its ``weights``; ``counts``: ``[W, E / W]``, from each rank."""
    W, local = counts.shape
    grouped_gemm[(programs,)](
        rows, weights, results, counts, counts.stride(0), rows.shape[1], W, local, triton.next_power_of_2(local),
        BLOCK_M, BLOCK_N, 128 // rows.itemsize, num_warps=8, num_stages=2 if torch.version.hip else 3,
    )  # fmt: skip
