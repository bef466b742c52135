"""Fused operations of `hopper_product` and copy engines: no multiprocessor moves data over the link.

All of a call's kernels are on the caller's stream, all of its copies on another; a copy of data is followed, on the same
stream, by that of one word, the epoch, to where the receiver waits for it. Copies of a stream follow each other (CUDA
C++ Programming Guide, "Streams"), so the word is there when the data are. Ranks send to their right, or left, neighbour
first, then to the next, all in the same order: each link carries one stream at a time in each direction, which gives
up to twice the bandwidth of sending here and there.

all_gather_matmul: each rank's rows of A go to the left neighbour, which uses them first, then to the next. Over the link,
each rank: W - 1 times its ``[m, K]`` out, in one step.

matmul_all_gather: the rows of the product go to all peers, a chunk at a time, each when it has been computed. Over the
link, each rank: W - 1 times its ``[M, N]`` out, in one step.

matmul_reduce_scatter: each rank computes the rows of its peers first, which go to their owners chunk by chunk; its own
rows come last, and what has come is added to them. Over the link, each rank: (W - 1) / W times M N elements out, in one
step. matmul_all_reduce goes on: the sums go to all peers, chunk by chunk. Twice that, in two steps.

The counts are those of `iris.ops.counts`. ``counts[0]`` is the call's epoch. ``ready[r]``: rank r's memory may be
written in this call, since its stream is past the last one; every rank waits for all before its first copy. ``arrived``
has a word for each chunk of each rank, set by the copy behind the chunk; then a count of tiles for each chunk of this
rank's product, and a word for each chunk of each rank's sums. Words hold epochs, which only rise, so none is ever reset.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from iris.language.context import DeviceContext
from iris.launch import addresses, prepare
from iris.ops.buffers import Buffers
from iris.ops.counts import ARRIVED, triton_counts

await_ready, begin, end, follow_predecessor = (
    triton_counts.await_ready, triton_counts.begin, triton_counts.end, triton_counts.follow_predecessor,
)  # fmt: skip


@triton.jit
def begin_call(context_tensor, counts, W: tl.constexpr):
    """One program: the next epoch, and a word to each peer, that this rank's memory may be written."""
    follow_predecessor()
    end(counts, begin(DeviceContext.initialize(context_tensor, num_ranks=W), counts))


@triton.jit
def await_peers(context_tensor, counts, W: tl.constexpr):
    """One program: until every rank's memory may be written."""
    follow_predecessor()
    await_ready(DeviceContext.initialize(context_tensor, num_ranks=W), counts, tl.load(counts))


@triton.jit(do_not_specialize=["word", "times"])
def await_count(context_tensor, counts, word, times, W: tl.constexpr):
    """One program: until ``arrived[word]`` has been counted ``times`` in each call, this one included."""
    follow_predecessor()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    ctx.wait(counts + ARRIVED + word, tl.load(counts) * times, cmp="reached")


class Moves:
    """The stream of copies that goes with one workspace, and small kernels on both streams, ready to be launched."""

    def __init__(self, buffers: Buffers, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        device = buffers.data.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived = [buffers.peer_counts(peer)[ARRIVED.value :] for peer in range(size)]
        self._epoch = buffers.counts[:1]
        self._front = (buffers.context_tensor, buffers.counts)
        # All before the first call: compiling must not keep a peer waiting.
        self._begin = prepare(begin_call, (1, 1, 1), *self._front, size, num_warps=1)
        self._await_peers = prepare(await_peers, (1, 1, 1), *self._front, size, num_warps=1)
        self._await_count = prepare(await_count, (1, 1, 1), *self._front, 0, 1, size, num_warps=1)

    def begin(self) -> None:
        """Enqueue the beginning of a call: on the caller's stream, and for the copies."""
        self._launch(self._begin, self.size)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with self.beside():
            self._launch(self._await_peers, self.size)

    def await_count(self, word: int, times: int) -> None:
        self._launch(self._await_count, word, times, self.size)

    def send(self, source: torch.Tensor, peer: int, there: torch.Tensor, word: int) -> None:
        """Enqueue, on the stream of copies, the copy of ``source`` and behind it that of the epoch to ``peer``."""
        with self.beside():
            there.copy_(source, non_blocking=True)
            self._arrived[peer][word : word + 1].copy_(self._epoch, non_blocking=True)

    def beside(self) -> Any:
        """What is enqueued here goes on the stream of copies."""
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def end(self) -> None:
        """The caller's stream goes on behind the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def peers(self) -> list[int]:
        """In the order in which this rank's left neighbours use its rows; the right ones are the reverse."""
        return [(self.rank - distance) % self.size for distance in range(1, self.size)]

    def _launch(self, kernel: Callable[..., None], *numbers: int) -> None:
        stream = None if self._stream is None else torch.cuda.current_stream().cuda_stream
        kernel(stream, addresses((*self._front, *numbers)))


Product = Callable[[int, int], None]
"""Enqueues the product of so many parts of rows, from one on."""


def all_gather_matmul(moves: Moves, a: torch.Tensor, there: list[torch.Tensor], chunk: int, product: Product) -> None:
    """``there``: where this rank's rows go on each rank, ``[m, K]``."""
    rank, size, rows = moves.rank, moves.size, len(a)
    chunks = -(-rows // chunk)
    moves.begin()
    for peer in moves.peers():
        for number in range(chunks):
            part = slice(number * chunk, (number + 1) * chunk)
            moves.send(a[part], peer, there[peer][part], rank * chunks + number)
    product(rank, size)
    moves.end()


def matmul_all_gather(
    moves: Moves, own: torch.Tensor, there: list[torch.Tensor], chunk: int, tiles: int, product: Product
) -> None:
    """``own``: this rank's rows of the result; ``there``: the same on each rank. ``tiles``: of a chunk."""
    rank, size = moves.rank, moves.size
    chunks = -(-len(own) // chunk)
    moves.begin()
    product(0, 1)
    send_chunks(moves, own, there, chunk, chunks, tiles, counted=chunks * size, told=rank * chunks)
    for peer in moves.peers():
        moves.await_count(peer * chunks + chunks - 1, 1)
    moves.end()


def send_chunks(
    moves: Moves, own: torch.Tensor, there: list[torch.Tensor], chunk: int, chunks: int, tiles: int, counted: int,
    told: int,
) -> None:  # fmt: skip
    """Each chunk of ``own`` to every peer, when the kernel has counted its tiles. The last ones may be empty."""
    for number in range(chunks):
        part = slice(number * chunk, (number + 1) * chunk)
        with moves.beside():
            moves.await_count(counted + number, tiles)
        for peer in moves.peers():
            moves.send(own[part], peer, there[peer][part], told + number)


def matmul_reduce(
    moves: Moves,
    sent: torch.Tensor,
    parts: list[torch.Tensor],
    own: torch.Tensor | None,
    there: list[torch.Tensor],
    chunk: int,
    tiles: int,
    product: Product,
    sums: Product,
) -> None:
    """``sent``: the products of all rows, ``[W, share, N]``; ``parts``: where this rank's go on each rank.

    ``own``: this rank's sums, which go to all, to ``there`` on each rank; None if they stay.
    """
    rank, size, share = moves.rank, moves.size, sent.shape[1]
    chunks = -(-share // chunk)
    moves.begin()
    product((rank + 1) % size, size - 1)
    for peer in reversed(moves.peers()):
        for number in range(chunks):
            part = slice(number * chunk, (number + 1) * chunk)
            with moves.beside():
                moves.await_count((size + peer) * chunks + number, tiles)
            moves.send(sent[peer, part], peer, parts[peer][part], rank * chunks + number)
    sums(rank, 1)
    if own is not None:
        counted, told = (size + rank) * chunks, (2 * size + rank) * chunks
        send_chunks(moves, own, there, chunk, chunks, tiles, counted, told)
        for peer in moves.peers():
            moves.await_count((2 * size + peer) * chunks + chunks - 1, 1)
    moves.end()
