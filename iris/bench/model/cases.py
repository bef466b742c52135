"""What is measured of a decoder, on which data, and what one process has for it.

One process makes the whole model, layer by layer, so one GPU does for any model. The largest error of a sequence's
logits, relative to them, may be twice that of one process in the same dtype: the order of sums differs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from iris.bench.model.communication import Alone, Communication
from iris.bench.model.decoder import Decoder, Rotation, rotations
from iris.bench.model.dimensions import Share
from iris.bench.model.weights import Maker

MODES = ("decode", "prefill", "train")
# In which one process computes what results in a dtype are compared with.
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
# The seed of tokens.
TOKENS = 4_000_000


class Case(NamedTuple):
    """What is measured. ``sequences`` of ``context`` tokens: prompts, or caches whose last token a step adds."""

    mode: str
    sequences: int
    context: int

    @property
    def tokens(self) -> int:
        """That one call takes in."""
        return self.sequences * (1 if self.mode == "decode" else self.context)

    def tokens_of_rank(self, num_ranks: int) -> int:
        """That a rank has outside of products; those of a step all ranks have."""
        return self.tokens if self.mode == "decode" else self.tokens // num_ranks

    def problem(self, num_ranks: int) -> str:
        """Why so many ranks cannot share it, in words; empty if they can."""
        if self.mode != "decode" and self.tokens % num_ranks:
            return f"{num_ranks} ranks cannot share the {self.tokens} tokens of {self.sequences} prompts"
        return ""


class Inputs(NamedTuple):
    """Of a case. ``tokens`` and ``positions`` are the same on all ranks; ``caches`` are a rank's part."""

    tokens: Tensor
    positions: Tensor
    caches: Any
    rotation: Rotation


def inputs(case: Case, maker: Maker) -> Inputs:
    """A training step has a token more of each sequence, the last to be predicted."""
    device, dimensions, sequences = maker.device, maker.dimensions, case.sequences
    generator = torch.Generator(device).manual_seed(TOKENS + sequences)
    shape = {"decode": (sequences,), "prefill": (sequences, case.context), "train": (sequences, case.context + 1)}
    tokens = torch.randint(dimensions.vocabulary, shape[case.mode], generator=generator, device=device)
    positions = torch.full((sequences,), case.context - 1, device=device)
    caches = maker.full_caches if case.mode == "decode" else maker.empty_caches
    rotation = rotations(dimensions, case.context, maker.dtype, device)
    return Inputs(tokens, positions, caches(sequences, case.context), rotation)


@torch.no_grad()
def logits(case: Case, decoder: Decoder, given: Inputs, by: Communication) -> Tensor:
    if case.mode == "prefill":
        return decoder.prefill(given.tokens, caches=given.caches, rotation=given.rotation, by=by)
    return decoder.decode(given.tokens, given.positions, caches=given.caches, rotation=given.rotation, by=by)


def of_one_process(case: Case, maker: Maker) -> tuple[Tensor, Tensor]:
    """The logits that one process has for a model that ``maker`` has a part of: in its dtype, and in a wider one."""
    of_dtypes = []
    for dtype in (maker.dtype, WIDER[maker.dtype]):
        whole = maker.of(share=Share(), dtype=dtype)
        of_dtypes.append(logits(case, whole.one_by_one(), inputs(case, whole), Alone()))
    in_dtype, wide = of_dtypes
    return in_dtype, wide


class Compared(NamedTuple):
    """Errors of results, and what is wrong with them, in words, if anything is: as `iris.bench.model.measure.Row`."""

    error: float
    error_of_one: float
    reason: str


def compared(error: float, error_of_one: float, dtype: torch.dtype) -> Compared:
    allowed = 2 * error_of_one + torch.finfo(dtype).eps
    wrong = f"wrong result: an error of {error:.3g}, and {allowed:.3g} is allowed"
    return Compared(error, error_of_one, "" if error <= allowed else wrong)


def compare(result: Tensor, of_one: Tensor, exact: Tensor) -> Compared:
    """Logits ``[sequences, vocabulary]`` of the ranks, and of one process in the same dtype and in a wider one."""

    def largest(logits: Tensor) -> float:
        squares = (logits.to(exact.dtype) - exact).square().mean(1) / exact.square().mean(1)
        return squares.sqrt().max().item()

    return compared(largest(result), largest(of_one), result.dtype)
