"""The copy engines' part of all_gather_matmul: see `iris.ops.hopper.all_gather_matmul`.

Each rank sends all of its rows to its left neighbour, which uses them first, then to the next. So at a time each rank
sends to one other, and each receives from one. Where every chunk went to all peers before the next chunk, ranks drifted
apart, met at the same receiver, and half of the bandwidth was lost (docs/performance-lessons.md, "Copy engines").
"""

import torch

from iris.ops.buffers import Buffers
from iris.ops.counts import ARRIVED
from iris.ops.hopper.all_gather_matmul import start
from iris.runtime.launch import addresses, prepare


class Sender:
    """What goes with one workspace: a stream, and where a rank's rows of A go in the memory of its peers."""

    # As `iris.ops.workspaces` makes what this takes views of.
    @torch.inference_mode(False)
    def __init__(
        self, buffers: Buffers, rank: int, size: int, rows: int, depth: int, chunk: int, together: int
    ) -> None:
        device = buffers.data.device
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # For all calls: a stream that waits for one waits for what it was recorded behind by then.
            self._begun, self._sent = torch.cuda.Event(), torch.cuda.Event()
        args = (buffers.context_tensor, buffers.counts, size)
        self._args = addresses(args)
        # Before the first call: compiling must not keep a peer waiting.
        self._start = prepare(start, (1, 1, 1), *args, num_warps=1)
        self._epoch = buffers.counts[:1]
        self._jobs = []
        for distance in range(1, size):
            peer = (rank - distance) % size
            there = buffers.peer(peer).view(size, -1, depth)[rank, :rows]
            arrived = buffers.peer_counts(peer)[ARRIVED.value + rank * -(-rows // chunk) :]
            # Short chunks for the peer to which these rows are the last.
            step = chunk * (together if distance < size - 1 else 1)
            for number, begin in enumerate(range(0, rows, step)):
                part = slice(begin, begin + step)
                # All rows need no view of them, which takes the host a microsecond.
                self._jobs.append((part if step < rows else None, there[part], arrived[number : number + 1]))

    def send(self, a: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Enqueue the start on the current stream and behind it, on another, the copies.

        ``a``: ``[rows, depth]``, contiguous. ``kept``: where the rows are left besides, if anywhere.
        """
        if self._stream is None:
            self._start(None, self._args)
            self._copy(a, kept)
            return
        current = torch.cuda.current_stream()
        self._start(current.cuda_stream, self._args)
        self._begun.record(current)
        self._stream.wait_event(self._begun)
        # As `torch.cuda.stream` does for streams of one device, in a third of the time.
        torch.cuda.set_stream(self._stream)
        try:
            self._copy(a, kept)
            self._sent.record(self._stream)
        finally:
            torch.cuda.set_stream(current)

    def join(self) -> None:
        """What is enqueued on the current stream from here on comes behind the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._sent)

    def _copy(self, a: torch.Tensor, kept: torch.Tensor | None) -> None:
        for rows, there, word in self._jobs:
            there.copy_(a if rows is None else a[rows], non_blocking=True)
            word.copy_(self._epoch, non_blocking=True)
        if kept is not None:
            kept.copy_(a, non_blocking=True)
