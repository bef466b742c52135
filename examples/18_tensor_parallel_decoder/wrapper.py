"""Serves a decoder whose weights are split among the ranks: prompts, and tokens one by one in CUDA graphs."""

import functools

import torch

from iris.bench.model.communication import Communication
from iris.bench.model.decoder import rotations, visible
from iris.bench.model.weights import Maker
from iris.simulator import ACTIVE as SIMULATED


class Server:
    """Up to ``batch_sizes[-1]`` sequences of up to ``length`` tokens, which go on with the likeliest token each.

    A step of any number of sequences is a graph of the next larger one of ``batch_sizes``, which ascend. All graphs are
    there at once: they have one cache, one pool of memory, and the tokens and positions below, which a step reads and
    changes on the device. So the host only says which graph runs next.

    All ranks make the same calls in the same order, with the same tokens.

    Attributes
    ----------
    tokens, positions : torch.Tensor
        The last token of each sequence and its place in it, int64 ``[batch_sizes[-1]]``.
    logits : torch.Tensor
        Of which the last token is the largest, ``[batch_sizes[-1], vocabulary]``.
    """

    def __init__(self, maker: Maker, by: Communication, batch_sizes: list[int], length: int) -> None:
        self.decoder, self.by, self.batch_sizes, self.length = maker.decoder(), by, batch_sizes, length
        most, place = batch_sizes[-1], {"device": maker.device}
        self.caches = list(maker.empty_caches(most, length))
        self.rotation = rotations(maker.dimensions, length, maker.dtype, maker.device)
        self.tokens = torch.zeros(most, dtype=torch.int64, **place)
        self.positions = torch.zeros(most, dtype=torch.int64, **place)
        self.logits = torch.zeros(most, maker.dimensions.vocabulary, dtype=maker.dtype, **place)
        self._steps = {}
        # Tokens that the caches hold of a sequence, as the host counts them.
        self._longest = 0

    def capture(self) -> None:
        """Make the graphs, the largest first, in whose memory the others have room."""
        pool = None if SIMULATED else torch.cuda.graph_pool_handle()
        for size in reversed(self.batch_sizes):
            self.positions.zero_()
            # Nothing may be used for the first time in a graph.
            self.enqueue_step(size)
            self._steps[size] = functools.partial(self.enqueue_step, size)
            if not SIMULATED:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self.enqueue_step(size)
                self._steps[size] = graph.replay

    @torch.no_grad()
    def start(self, prompts: torch.Tensor) -> None:
        """Take in prompts, int64 ``[sequences, T]``, and find the first token after each. W divides their tokens."""
        count, length = prompts.shape
        most, num_ranks = self.batch_sizes[-1], self.decoder.share.num_ranks
        if count > most or length > self.length:
            raise ValueError(
                f"{count} prompts of {length} tokens are too much for a server of up to {most} sequences of up to "
                f"{self.length} tokens. Give it fewer, or make a larger one."
            )
        if count * length % num_ranks:
            raise ValueError(
                f"{count} prompts of {length} tokens cannot be dealt out evenly to {num_ranks} ranks. Pad them."
            )
        self._longest = length
        logits = self.decoder.prefill(prompts, caches=self._caches(count), rotation=self.rotation, by=self.by)
        # Rows of a graph that have no sequence write to the first place of their own caches.
        self.positions.zero_()
        self._take(logits, self.positions[:count].fill_(length))

    def step(self, sequences: int) -> None:
        """Take in the last token of each of the first so many sequences, and find the next one."""
        if self._longest == self.length:
            raise ValueError(
                f"The sequences have {self.length} tokens, and their caches no room for more. Make a longer server."
            )
        self._longest += 1
        self._steps[next(size for size in self.batch_sizes if size >= sequences)]()

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of each sequence, after which a step goes on."""
        self.positions.fill_(length)
        self._longest = length

    @torch.no_grad()
    def enqueue_step(self, size: int) -> None:
        """What a graph holds."""
        positions = self.positions[:size]
        logits = self.decoder.decode(
            self.tokens[:size],
            positions,
            caches=self._caches(size),
            rotation=self.rotation,
            by=self.by,
            mask=visible(positions, self.length, self.logits.dtype),
        )
        self._take(logits, positions.add_(1))

    def _take(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        self.logits[: len(positions)] = logits
        self.tokens[: len(positions)] = logits.argmax(dim=1)

    def _caches(self, sequences: int) -> list[torch.Tensor]:
        return [cache[:, :sequences] for cache in self.caches]
