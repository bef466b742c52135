"""The launch of the kernel, and the memory that its calls share; and the same with a collective in its middle."""

import math

import torch
import torch.distributed as dist
import triton
from arguments import check_contiguous, check_dtype
from kernel import PAD, combine_shares, flash_decode, flash_decode_share

import iris

# Bytes of a program's query heads, of which it has the sums in registers; and of one head, rounded up to a power of
# two, as a matrix product has at least 16.
QUERIES = 32 << 10
HEAD = QUERIES // 16
# Into so many chunks is a share cut at most: one program combines them.
MOST_CHUNKS = 32


class FlashDecode:
    """Attention of one token a sequence over keys and values of which every rank holds a share. Made collectively.

    Its calls are for one stream, one after the other. ``fused=False``: the kernels that a collective stands between.
    """

    def __init__(
        self, ctx: iris.Iris, batch: int, heads: int, kv_heads: int, dim: int, capacity: int, dtype: torch.dtype,
        fused: bool = True,
    ) -> None:  # fmt: skip
        """``capacity``: positions for which a rank's share of a sequence has room."""
        check_dtype(dtype)
        if heads % kv_heads:
            raise ValueError(f"There are {heads} heads, which is no multiple of {kv_heads} heads of keys and values.")
        head = triton.next_power_of_2(dim) * dtype.itemsize
        if head > HEAD:
            raise ValueError(
                f"A head of {dim} takes {head} bytes in {dtype}, rounded up to a power of two, and a program has room "
                f"for {HEAD}. Give a dim of up to {HEAD // dtype.itemsize}, or a narrower dtype."
            )
        W = ctx.get_num_ranks()
        self.ctx, self.fused = ctx, fused
        self.queries, self.keys = (dtype, batch, heads, dim), (dtype, batch, kv_heads, capacity, dim)
        # The query heads that use one head of keys and values, in equal groups that a program has room for. Of the
        # narrowest heads these are 128: it has their scores in registers too.
        sharing, most = heads // kv_heads, QUERIES // max(head, 256)
        self.group = max(n for n in range(1, most + 1) if sharing % n == 0)
        self.shared, self.dim = sharing // self.group, dim
        self.pairs, self.groups = batch * heads // self.group, heads // self.group
        self.programs = 4 if iris.simulator.ACTIVE else ctx.get_cu_count()
        # The more bytes are on their way, the better the memory is used. NVIDIA's multiprocessors have shared memory
        # for two steps of 32 KiB of keys and as many of values, AMD's for one of 16; and for 32 of weights, 256 bytes a
        # head of 128. Of the widest heads a product's 16 positions are 32 KiB: those AMD's do not fetch ahead, and take
        # keys and values one after the other.
        step = 16384 if torch.version.hip else 32768
        self.block = 16 if iris.simulator.ACTIVE else max(16, min(256 // dtype.itemsize, step // head))
        stages = 3 if not torch.version.hip else 2 if self.block * head <= step else 1
        self.options = dict(num_warps=8, num_stages=stages)
        self.chunks = self._chunks(capacity)
        rows, row = self.pairs * self.group, dim + PAD.value
        self.epochs = ctx.zeros(self.programs, dtype=torch.int64)
        self.ended = ctx.zeros(self.pairs, dtype=torch.int64)
        self.partial = torch.empty(rows * self.chunks, row, device=ctx.device)
        if fused:
            self.arrived = ctx.zeros(2, self.pairs, dtype=torch.int64)
            self.gathered = ctx.empty(2, W * rows, row, dtype=torch.float32)
        else:
            self.share = torch.zeros(rows, row, device=ctx.device)
            self.gathered = torch.empty(W * rows, row, device=ctx.device)
        # A peer may send before this rank calls: all memory must be there, and all counts 0.
        ctx.barrier()

    def _chunks(self, capacity: int) -> int:
        """Into how many chunks a share is cut, to keep all programs busy. Each has a price of its own, and a block."""
        most = min(MOST_CHUNKS, math.ceil(capacity / self.block))

        def time(chunks: int) -> float:
            return math.ceil(self.pairs * chunks / self.programs) * (1 / chunks + 0.02)

        return min(range(1, max(1, most) + 1), key=time)

    def __call__(
        self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """``out = softmax(q k^T / sqrt(dim)) v`` over all ranks' positions, on every rank.

        Enqueued on the current stream; can be captured. All contiguous. ``q``, ``out``: ``[batch, heads, dim]``, the
        same on all ranks. ``k``, ``v``: ``[batch, kv_heads, capacity, dim]``, this rank's. ``lengths``: int32
        ``[batch]``, how many of these positions each sequence has, from none to ``capacity``; nobody looks.
        """
        ctx, W = self.ctx, self.ctx.get_num_ranks()
        check_contiguous(
            ctx.device, out=(out, *self.queries), q=(q, *self.queries), k=(k, *self.keys), v=(v, *self.keys),
            lengths=(lengths, torch.int32, len(q)),
        )  # fmt: skip
        counts, inputs = (self.epochs, self.ended), (q, k, v, lengths)
        # The kernel's exponentials are to the base of 2.
        numbers = (self.pairs, k.shape[2], math.log2(math.e) / math.sqrt(self.dim))
        tiles = (self.group, self.dim, self.groups, self.shared, self.chunks, self.block)
        grid = (self.programs,)
        if self.fused:
            flash_decode[grid](
                ctx.get_device_context(), *counts, self.arrived, self.partial, self.gathered, *inputs, out,
                *numbers, W, *tiles, **self.options,
            )  # fmt: skip
        else:
            flash_decode_share[grid](
                ctx.get_device_context(), *counts, self.partial, self.share, *inputs, *numbers, *tiles, **self.options
            )
            dist.all_gather_into_tensor(self.gathered, self.share)
            combine_shares[(self.pairs,)](self.gathered, out, self.pairs, W, self.group, self.dim)
