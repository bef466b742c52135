"""The launch of the kernel, and the memory that its calls share; and the same with a collective in its middle."""

import math

import torch
import torch.distributed as dist
import triton
from kernel import PAD, combine_shares, flash_decode, flash_decode_share

import iris


class FlashDecode:
    """Attention of one token a sequence over keys and values of which every rank holds a share. Made collectively.

    Its calls are for one stream, one behind the other. ``fused=False``: the kernels that a collective stands between.
    """

    def __init__(
        self, ctx: iris.Iris, batch: int, heads: int, kv_heads: int, dim: int, capacity: int, dtype: torch.dtype,
        fused: bool = True,
    ) -> None:  # fmt: skip
        """``capacity``: positions for which a rank's share of a sequence has room."""
        if heads % kv_heads:
            raise ValueError(f"There are {heads} heads, which is no multiple of {kv_heads} heads of keys and values.")
        on_gpu, W = ctx.device.type == "cuda", ctx.get_num_ranks()
        self.ctx, self.fused = ctx, fused
        self.pairs, self.group, self.dim, self.kv_heads = batch * kv_heads, heads // kv_heads, dim, kv_heads
        self.programs = ctx.get_cu_count() if on_gpu else 4
        self.block = self._block(dim * dtype.itemsize) if on_gpu else 16
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

    def _block(self, row: int) -> int:
        """Positions that a program takes at a time: what its multiprocessor has shared memory for, of keys and values.

        The more bytes are on their way, the better the memory is used. NVIDIA's has room for two steps of 64 KiB, AMD's
        for one of 32.
        """
        tile, row = 16384 if torch.version.hip else 32768, triton.next_power_of_2(row)
        # Of many query heads to one of keys and values: what they have themselves, from 32 KiB on, leaves less.
        queries = max(16, triton.next_power_of_2(self.group)) * row
        return max(16, min(128, tile * 32768 // max(32768, queries) // row))

    def _chunks(self, capacity: int) -> int:
        """Into how many chunks a share is cut, to keep all programs busy. Each has a price of its own, and a block."""
        # One program combines the chunks of a pair, in its registers.
        most = min(16384 // (self.group * self.dim), math.ceil(capacity / self.block))

        def time(chunks: int) -> float:
            return math.ceil(self.pairs * chunks / self.programs) * (1 / chunks + 0.02)

        return min(range(1, max(1, most) + 1), key=time)

    def __call__(
        self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """``out = softmax(q k^T / sqrt(dim)) v`` over all ranks' positions, on every rank.

        Enqueued on the current stream; can be captured. All contiguous. ``q``, ``out``: ``[batch, heads, dim]``, the
        same on all ranks. ``k``, ``v``: ``[batch, kv_heads, capacity, dim]``, this rank's. ``lengths``: int32
        ``[batch]``, how many of these positions each sequence has, which may be none.
        """
        ctx, W = self.ctx, self.ctx.get_num_ranks()
        counts, inputs = (self.epochs, self.ended), (q, k, v, lengths)
        # The kernel's exponentials are to the base of 2.
        numbers = (self.pairs, k.shape[2], math.log2(math.e) / math.sqrt(self.dim))
        tiles = (self.group, self.dim, self.kv_heads, self.chunks, self.block)
        grid, options = (self.programs,), dict(num_warps=8, num_stages=2 if torch.version.hip else 3)
        if self.fused:
            flash_decode[grid](
                ctx.get_device_context(), *counts, self.arrived, self.partial, self.gathered, *inputs, out,
                *numbers, W, *tiles, **options,
            )  # fmt: skip
        else:
            flash_decode_share[grid](
                ctx.get_device_context(), *counts, self.partial, self.share, *inputs, *numbers, *tiles, **options
            )
            dist.all_gather_into_tensor(self.gathered, self.share)
            combine_shares[(self.pairs,)](self.gathered, out, self.pairs, W, self.group, self.dim)
