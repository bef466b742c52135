"""A training step of a decoder whose weights are split among ranks: loss, gradients, optimizer.

Rows are split among the ranks outside of products, as those of prompts are. The logits stay split by columns: no rank
ever has those of the whole vocabulary. Parameters that all ranks have, gains, routers and the embedding, get a part of
their gradients on each rank, and these are added up after the backward pass.
"""

from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from iris.bench.model.cases import WIDER, Compared, Inputs, compared
from iris.bench.model.communication import Alone, Communication
from iris.bench.model.decoder import Decoder, Rotation
from iris.bench.model.dimensions import Share
from iris.bench.model.weights import Maker, part_of

# Parameters that all ranks have, by the last part of their names.
REPLICATED = ("embedding", "gain", "mlp_gain", "next_gain", "router")
# Elements of gradients that are added up at once with others.
SMALL = 1 << 20


class _CrossEntropy(torch.autograd.Function):
    """Of logits that are split by columns, ``[T, vocabulary / W]``; targets are int64 ``[T]``. The mean over tokens."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, share: Share, by: Communication) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        peaks = by.all_reduce(wide.max(1).values, ReduceOp.MAX)
        wide -= peaks[:, None]
        places = targets - share.rank * logits.shape[1]
        here = (places >= 0) & (places < logits.shape[1])
        places = places.clamp(0, logits.shape[1] - 1)[:, None]
        of_targets = wide.gather(1, places)[:, 0] * here
        sums, of_targets = by.all_reduce(torch.stack((wide.exp_().sum(1), of_targets)))
        wide /= sums[:, None]
        ctx.save_for_backward(wide.to(logits.dtype), places, here)
        return (sums.log() - of_targets).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, places, here = ctx.saved_tensors
        scaled = probabilities.scatter_add(1, places, -here[:, None].to(probabilities.dtype))
        return scaled.mul_(gradient / len(scaled)), None, None, None


def loss_of(decoder: Decoder, tokens: Tensor, *, rotation: Rotation, by: Communication) -> Tensor:
    """Of the next token of each, the mean, on all ranks: ``tokens`` are int64 ``[B, T + 1]``, the same on all ranks."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    rows = decoder.rows(inputs, caches=repeat(None, decoder.dimensions.layers), rotation=rotation, by=by)
    return _CrossEntropy.apply(by.all_gather_matmul(rows, decoder.head), targets, decoder.share, by)


def backward(decoder: Decoder, tokens: Tensor, *, rotation: Rotation, by: Communication) -> Tensor:
    """The loss, with its gradients in those of the parameters, which were None."""
    loss = loss_of(decoder, tokens, rotation=rotation, by=by)
    loss.backward()
    shared = [each for name, each in decoder.named_parameters() if name.rpartition(".")[2] in REPLICATED]
    gradients = [each.grad for each in shared if each.grad is not None]
    small = [each for each in gradients if each.numel() <= SMALL]
    together = by.all_reduce(torch.cat([each.flatten() for each in small]))
    for each, total in zip(small, together.split([each.numel() for each in small]), strict=True):
        each.copy_(total.view_as(each))
    for each in gradients:
        if each.numel() > SMALL:
            by.all_reduce(each)
    return loss.detach()


class Trainer:
    """Steps of AdamW, whose state has the dtype of the parameters, which several decoders may have."""

    def __init__(self, decoder: Decoder) -> None:
        self.optimizer = torch.optim.AdamW(decoder.requires_grad_(True).parameters(), lr=1e-5, fused=True)

    def step(self, decoder: Decoder, tokens: Tensor, *, rotation: Rotation, by: Communication) -> Tensor:
        """Returns the loss before it."""
        self.optimizer.zero_grad()
        loss = backward(decoder, tokens, rotation=rotation, by=by)
        self.optimizer.step()
        return loss


def gradients(decoder: Decoder, given: Inputs, by: Communication) -> dict[str, Tensor]:
    """Of all parameters, by name."""
    backward(decoder.requires_grad_(True), given.tokens, rotation=given.rotation, by=by)
    return {name: each.grad for name, each in decoder.named_parameters() if each.grad is not None}


def compare_gradients(maker: Maker, decoder: Decoder, given: Inputs, by: Communication) -> Compared:
    """Of ``decoder``, which ``maker`` has made: with those that one process has for the whole of it."""
    mine, of_one = gradients(decoder, given, by), []
    for dtype in (maker.dtype, WIDER[maker.dtype]):
        whole = maker.of(share=Share(), dtype=dtype)
        rotation = Rotation(*(each.to(dtype) for each in given.rotation))
        of_one.append(gradients(whole.decoder(), given._replace(rotation=rotation), Alone()))
    in_dtype, exact = (
        {name: part_of(each, name.rpartition(".")[2], maker.dimensions, maker.share) for name, each in found.items()}
        for found in of_one
    )

    def largest(found: dict[str, Tensor]) -> float:
        squares = [
            (found[name].to(right.dtype) - right).square().mean() / right.square().mean()
            for name, right in exact.items()
        ]
        return torch.stack(squares).sqrt().max().item()

    return compared(largest(mine), largest(in_dtype), maker.dtype)
