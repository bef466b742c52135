"""The copy engines' part of all_gather_matmul: see `iris.ops.hopper.all_gather_matmul`.

Each rank sends all of its rows to its left neighbour, which uses them first, then to the next. So at a time each rank
sends to one other, and each receives from one. Where every chunk went to all peers before the next chunk, ranks drifted
apart, met at the same receiver, and half of the bandwidth was lost (docs/performance-lessons.md, "Copy engines").
"""

import torch

from iris.ops.buffers import Buffers
from iris.ops.counts import ARRIVED
from iris.ops.hopper.all_gather_matmul import start
from iris.runtime.copies import copier
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
            # For all calls: a stream that waits for one waits for what was enqueued before its last record.
            self._begun, self._sent = torch.cuda.Event(), torch.cuda.Event()
            self._copy_on_stream = copier()
        args = (buffers.context_tensor, buffers.counts, size)
        self._args = addresses(args)
        # Before the first call: compiling must not keep a peer waiting.
        self._start = prepare(start, (1, 1, 1), *args, num_warps=1)
        self._epoch = buffers.counts[:1]
        # Which rows go where, and the word after them: in the simulator as tensors. For the driver as bytes: where
        # they begin in A, to which address they go, how many they are, and the word's address.
        self._jobs: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        self._moves: list[tuple[int, int, int, int]] = []
        for distance in range(1, size):
            peer = (rank - distance) % size
            there = buffers.peer(peer).view(size, -1, depth)[rank, :rows]
            arrived = buffers.peer_counts(peer)[ARRIVED.value + rank * -(-rows // chunk) :]
            # Short chunks for the peer to which these rows are the last.
            step = chunk * (together if distance < size - 1 else 1)
            for number, begin in enumerate(range(0, rows, step)):
                part = slice(begin, begin + step)
                place, word = there[part], arrived[number : number + 1]
                if self._stream is None:
                    self._jobs.append((part, place, word))
                self._moves.append((begin * depth * place.itemsize, place.data_ptr(), place.nbytes, word.data_ptr()))

    def send(self, a: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Enqueue the start on the current stream and after it, on another, the copies.

        ``a``: ``[rows, depth]``, contiguous. ``kept``: where the rows are left besides, if anywhere.
        """
        if self._stream is None:
            self._start(None, self._args)
            self._copy(a, kept)
            return
        current, copy, stream = torch.cuda.current_stream(), self._copy_on_stream, self._stream.cuda_stream
        self._start(current.cuda_stream, self._args)
        self._begun.record(current)
        self._stream.wait_event(self._begun)
        first, epoch = a.data_ptr(), self._epoch.data_ptr()
        for offset, place, size, word in self._moves:
            copy(place, first + offset, size, stream)
            copy(word, epoch, self._epoch.itemsize, stream)
        if kept is not None and kept.is_contiguous():
            copy(kept.data_ptr(), first, a.nbytes, stream)
        elif kept is not None:
            with torch.cuda.stream(self._stream):
                kept.copy_(a)
        self._sent.record(self._stream)

    def join(self) -> None:
        """What is enqueued on the current stream from here on comes after the copies."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._sent)

    def _copy(self, a: torch.Tensor, kept: torch.Tensor | None) -> None:
        for rows, there, word in self._jobs:
            there.copy_(a[rows])
            word.copy_(self._epoch)
        if kept is not None:
            kept.copy_(a)
