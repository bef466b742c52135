"""The launch of the kernel, and the memory that its calls share; and the same with torch.distributed."""

import math

import torch
import torch.distributed as dist
import triton
from arguments import check_contiguous, check_dtype
from kernel import attention, ring_attention

import iris

# Bytes of a tile of queries, and of one head, rounded up to a power of two, as a matrix product has at least 16 rows.
QUERIES = 32 << 10
HEAD = QUERIES // 16


def capability(device: torch.device) -> tuple[int, int]:
    return (9, 0) if iris.simulator.ACTIVE else torch.cuda.get_device_capability(device)


class Attention:
    """What all forms share. ``length``: of a chunk, of which each rank has two."""

    def __init__(
        self, ctx: iris.Iris, heads: int, length: int, dim: int, dtype: torch.dtype, causal: bool = True
    ) -> None:
        check_dtype(dtype)
        head = triton.next_power_of_2(dim) * dtype.itemsize
        if head > HEAD:
            raise ValueError(
                f"A head of {dim} takes {head} bytes in {dtype}, rounded up to a power of two, and a program has room "
                f"for {HEAD}. Give a dim of up to {HEAD // dtype.itemsize}, or a narrower dtype."
            )
        self.ctx, self.heads, self.length, self.dim, self.causal = ctx, heads, length, dim, causal
        self.expected = (dtype, heads, 2, length, dim)
        self.rank, self.num_ranks = ctx.get_rank(), ctx.get_num_ranks()
        self.scale = math.log2(math.e) / math.sqrt(dim)  # the kernel's exponentials are to the base of 2
        # Tiles of keys and values of 32 KiB each, of which a multiprocessor of NVIDIA's holds two pairs and the
        # queries; half of that and one pair on AMD's; and of weights 32 KiB, 256 bytes a query of 128. Of the widest
        # heads a product's 16 rows are 32 KiB: those AMD's do not fetch ahead, and take keys and values one after the
        # other. Compiled for Blackwell, two pairs take 2 KiB more than there are, so one pair.
        step = 16384 if torch.version.hip else 32768
        self.block_m = 16 if iris.simulator.ACTIVE else min(128, QUERIES // head)
        self.block_n = 16 if iris.simulator.ACTIVE else max(16, min(256 // dtype.itemsize, step // head))
        self.tiles = 2 * math.ceil(length / self.block_m)
        if torch.version.hip:
            stages = 2 if self.block_n * head <= step else 1
        else:
            stages = 2 if capability(ctx.device) >= (10, 0) else 3
        self.options = dict(num_warps=8, num_stages=stages)

    def check(self, **tensors: torch.Tensor) -> None:
        """That they are ``[heads, 2, length, dim]``, contiguous."""
        check_contiguous(self.ctx.device, **{name: (tensor, *self.expected) for name, tensor in tensors.items()})

    def attend(self, q, k, v, out, state, first: int, steps: int, stride_owner: int) -> None:
        last = first + steps == self.num_ranks
        attention[(self.heads * self.tiles,)](
            q, k, v, out, *state, self.rank, first, steps, stride_owner, self.length, self.scale,
            self.num_ranks, self.dim, self.causal, first == 0, last, self.block_m, self.block_n, **self.options,
        )  # fmt: skip


class RingAttention(Attention):
    """In one kernel. Made collectively; its calls are for one stream, one after the other."""

    def __init__(
        self, ctx: iris.Iris, heads: int, length: int, dim: int, dtype: torch.dtype, causal: bool = True
    ) -> None:
        super().__init__(ctx, heads, length, dim, dtype, causal)
        W, multiprocessors = self.num_ranks, ctx.get_cu_count()
        if multiprocessors < 2 and not iris.simulator.ACTIVE:
            raise ValueError("Some programs send while others attend, and this GPU has one multiprocessor.")
        self.programs = 4 if iris.simulator.ACTIVE else multiprocessors
        # The more ranks, the less there is to compute while a block travels.
        self.senders = 0 if W == 1 else min(32, 4 * W, self.programs // 2)
        self.slots = min(heads, 2 * math.ceil(self.programs / self.tiles))
        self.blocks = ctx.empty(self.slots, max(1, W - 1), 2, 2, length, dim, dtype=dtype)
        counts = dict(dtype=torch.int64)
        self.arrived, self.freed = ctx.zeros(self.slots, W, 2, **counts), ctx.zeros(self.slots, **counts)
        self.tickets, self.epochs = ctx.zeros(1, **counts), ctx.zeros(self.programs, **counts)
        # A neighbour may send before this rank calls: all memory must be there, and all counts 0.
        ctx.barrier()

    def __call__(self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """``out = softmax(q k^T / sqrt(dim)) v`` for this rank's queries and the keys and values of all ranks.

        Enqueued on the current stream; can be captured. All are ``[heads, 2, length, dim]``, contiguous: of rank r
        chunks r and 2 W - 1 - r of the sequence.
        """
        self.check(out=out, q=q, k=k, v=v)
        ring_attention[(self.programs,)](
            self.ctx.get_device_context(), self.epochs, self.tickets, self.arrived, self.freed, self.blocks,
            q, k, v, out, self.heads, self.length, self.scale, self.num_ranks, self.dim, self.causal, self.slots,
            self.senders, 64 if self.block_m > 16 else 16, self.block_m, self.block_n, **self.options,
        )  # fmt: skip


class GatherThenAttend(Attention):
    """All keys and values first, by torch.distributed."""

    def __init__(
        self, ctx: iris.Iris, heads: int, length: int, dim: int, dtype: torch.dtype, causal: bool = True
    ) -> None:
        super().__init__(ctx, heads, length, dim, dtype, causal)
        size = (self.num_ranks * heads, 2, length, dim)
        self.k, self.v = (torch.zeros(size, device=ctx.device, dtype=dtype) for _ in "kv")
        self.state = [torch.empty(1, device=ctx.device)] * 3

    def __call__(self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.check(out=out, q=q, k=k, v=v)
        dist.all_gather_into_tensor(self.k, k)
        dist.all_gather_into_tensor(self.v, v)
        self.alone(out, q)

    def alone(self, out: torch.Tensor, q: torch.Tensor) -> None:
        """With keys and values that have been gathered before."""
        stride_owner = self.heads * 2 * self.length * self.dim
        self.attend(q, self.k, self.v, out, self.state, 0, self.num_ranks, stride_owner)


class SendAndAttend(Attention):
    """Around the ring by messages of torch.distributed: a kernel for each step, beside the messages of the next."""

    def __init__(
        self, ctx: iris.Iris, heads: int, length: int, dim: int, dtype: torch.dtype, causal: bool = True
    ) -> None:
        super().__init__(ctx, heads, length, dim, dtype, causal)
        self.blocks = torch.empty(2, 2, heads, 2, length, dim, device=ctx.device, dtype=dtype)
        rows = (heads, 2, length)
        self.state = [torch.empty(size, device=ctx.device) for size in [(*rows, dim), rows, rows]]

    def __call__(self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.check(out=out, q=q, k=k, v=v)
        left, right = (self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks
        for step in range(self.num_ranks):
            messages, following = [], self.blocks[step % 2]
            if step < self.num_ranks - 1:
                sends = [dist.P2POp(dist.isend, block, right) for block in (k, v)]
                receives = [dist.P2POp(dist.irecv, block, left) for block in following]
                messages = dist.batch_isend_irecv(sends + receives)
            self.attend(q, k, v, out, self.state, step, 1, 0)
            for message in messages:
                message.wait()
            k, v = following
