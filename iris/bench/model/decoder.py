"""A decoder whose weights are split among ranks, as serving engines build it.

Each rank has its heads of the attention, its columns of the MLP's first product and its rows of the second, and its
columns of the last product, which makes the logits. What ranks exchange is left to a `Communication`, which every call
is given, so that one model can be run with one and with another.

*A prompt* is long: its rows are split among the ranks outside of products (sequence parallelism), so each layer has two
all-gathers, with a product after them, and two reduce-scatters after a product. *A step* has a row for each sequence,
which all ranks have, so each layer has two all-reduces, with the residual and RMSNorm after them.

In the place of the MLP, or beside it, may be a mixture of experts, of which each rank has E / W (`Experts`). Of a
prompt each rank's rows go to their experts and back. Of a step each rank makes a part of the sums that the second
all-reduce adds up.

Keys and values are kept in a static cache, ``[2, sequences, kv_heads / W, length, head_dim]`` of each layer, so that a
step can be captured in a CUDA graph. Where its tokens stand is on the device.
"""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention

from iris.bench.model.communication import Communication
from iris.bench.model.dimensions import Dimensions, Share
from iris.bench.model.experts import Experts, swiglu


class Rotation(NamedTuple):
    """Rotary positions: the factors of elements, and of those that they turn with, ``[..., 1, head_dim]``."""

    cosines: Tensor
    sines: Tensor

    def turn_(self, x: Tensor) -> None:
        """Turn ``x [..., heads, head_dim]`` in place: an element of the first half with that of the second."""
        others = x.roll(x.shape[-1] // 2, -1)
        x.mul_(self.cosines).addcmul_(others, self.sines)


def rotations(dimensions: Dimensions, length: int, dtype: torch.dtype, device: torch.device) -> Rotation:
    """Of the positions 0 to ``length`` - 1, ``[length, 1, head_dim]``."""
    half = dimensions.head_dim // 2
    speeds = dimensions.rope_base ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angles = torch.arange(length, dtype=torch.float64, device=device)[:, None, None] * speeds
    cosines, sines = angles.cos(), angles.sin()
    return Rotation(torch.cat((cosines, cosines), -1).to(dtype), torch.cat((-sines, sines), -1).to(dtype))


class Step(NamedTuple):
    """Where the tokens of a step stand, one of each sequence.

    ``sequences``, ``positions``: int64 ``[B]``. ``rotation``: of these positions. ``mask``: what is added to scores,
    ``[B, 1, 1, length]``; None if all sequences fill their caches.
    """

    sequences: Tensor
    positions: Tensor
    rotation: Rotation
    mask: Tensor | None


def normalised(rows: Tensor, gain: Tensor, dimensions: Dimensions) -> Tensor:
    return rms_norm(rows, gain.shape, gain, dimensions.eps)


def parameter(weight: Tensor | None) -> torch.nn.Parameter | None:
    """Of a weight that has none yet; that of another decoder is the same one in both."""
    if weight is None or isinstance(weight, torch.nn.Parameter):
        return weight
    return torch.nn.Parameter(weight, requires_grad=False)


class LayerWeights(NamedTuple):
    """A rank's part of a layer; `iris.bench.model.weights` makes it.

    ``qkv``: ``[hidden, (heads + 2 kv_heads) / W * head_dim]``, the queries first and the values last. ``o``:
    ``[heads / W * head_dim, hidden]``. ``gate_up``: ``[hidden, 2 intermediate / W]``, and ``down``:
    ``[intermediate / W, hidden]``; None where there are only `Experts`. ``mlp_gain``: of the norm before the MLP.
    ``next_gain``: of the norm after it, which is the first of the next layer. Both ``[hidden]``.
    """

    qkv: Tensor
    o: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    mlp_gain: Tensor
    next_gain: Tensor


class Layer(torch.nn.Module):
    """Attention, and MLP or experts or both. Rows come normalised, and leave so."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_gain: Tensor
    next_gain: Tensor

    def __init__(
        self, dimensions: Dimensions, weights: LayerWeights, share: Share, experts: Experts | None = None
    ) -> None:
        super().__init__()
        self.experts = experts
        self.dimensions = dimensions
        self.heads, self.kv_heads = dimensions.heads // share.num_ranks, dimensions.kv_heads // share.num_ranks
        for name, weight in weights._asdict().items():
            self.register_parameter(name, parameter(weight))

    def prefill(
        self, rows: Tensor, residual: Tensor, *, cache: Tensor | None, rotation: Rotation, by: Communication
    ) -> tuple[Tensor, Tensor]:
        """Of prompts of one length: ``rows`` and ``residual`` are this rank's ``[B * T / W, hidden]``.

        Returns the next layer's. Without a cache they have gradients.
        """
        attended = self.attend_to_prompts(by.all_gather_matmul(rows, self.qkv), cache, rotation)
        residual = residual + by.matmul_reduce_scatter(attended, self.o)
        rows = normalised(residual, self.mlp_gain, self.dimensions)
        residual = residual + self.mlp_of_prompts(rows, by)
        return normalised(residual, self.next_gain, self.dimensions), residual

    def decode(
        self, rows: Tensor, residual: Tensor, *, cache: Tensor, step: Step, by: Communication
    ) -> tuple[Tensor, Tensor]:
        """Of one token of each sequence: ``rows`` and ``residual`` are ``[B, hidden]``, the same on all ranks.

        Returns the next layer's; ``residual`` is lost.
        """
        eps = self.dimensions.eps
        attended = self.attend_to_cache(rows @ self.qkv, cache, step)
        rows, residual = by.all_reduce_rms_norm(attended @ self.o, residual, self.mlp_gain, eps)
        return by.all_reduce_rms_norm(self.mlp_of_step(rows, by), residual, self.next_gain, eps)

    def mlp_of_prompts(self, rows: Tensor, by: Communication) -> Tensor:
        """Of this rank's rows."""
        parts = []
        if self.gate_up is not None:
            inside = swiglu(by.all_gather_matmul(rows, self.gate_up))
            parts.append(by.matmul_reduce_scatter(inside, self.down))
        if self.experts is not None:
            parts.append(by.mixture(rows, self.experts))
        return functools.reduce(torch.add, parts)

    def mlp_of_step(self, rows: Tensor, by: Communication) -> Tensor:
        """Of rows that all ranks have: what is to be added up over the ranks."""
        parts = []
        if self.gate_up is not None:
            parts.append(swiglu(rows @ self.gate_up) @ self.down)
        if self.experts is not None:
            parts.append(by.mixture_of_replicas(rows, self.experts))
        return functools.reduce(torch.add, parts)

    def attend_to_prompts(self, qkv: Tensor, cache: Tensor | None, rotation: Rotation) -> Tensor:
        """Causal attention of each prompt, which is as long as ``rotation``. A cache gets its keys and values."""
        rows, length, head_dim = qkv.shape[0], len(rotation.cosines), self.dimensions.head_dim
        by_head = qkv.view(-1, length, self.heads + 2 * self.kv_heads, head_dim)
        rotation.turn_(by_head[:, :, : self.heads + self.kv_heads])
        queries, keys, values = by_head.transpose(1, 2).split([self.heads, self.kv_heads, self.kv_heads], 1)
        if cache is not None:
            cache[0, :, :, :length] = keys
            cache[1, :, :, :length] = values
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).reshape(rows, self.heads * head_dim)

    def attend_to_cache(self, qkv: Tensor, cache: Tensor, step: Step) -> Tensor:
        """Attention of one token of each sequence to its cache, into which the token's key and value go first."""
        rows, head_dim = qkv.shape[0], self.dimensions.head_dim
        by_head = qkv.view(rows, -1, head_dim)
        step.rotation.turn_(by_head[:, : self.heads + self.kv_heads])
        cache[:, step.sequences, :, step.positions] = by_head[:, self.heads :].view(rows, 2, self.kv_heads, head_dim)
        # Queries that share a head of keys are rows of one product, so nothing is copied for each of them.
        queries = by_head[:, : self.heads].reshape(rows, self.kv_heads, -1, head_dim)
        attended = scaled_dot_product_attention(queries, cache[0], cache[1], attn_mask=step.mask)
        return attended.reshape(rows, self.heads * head_dim)


class Ends(NamedTuple):
    """What a rank has outside of layers.

    ``embedding``: ``[vocabulary, hidden]``. ``gain``: of the first norm, ``[hidden]``. ``head``: ``[hidden,
    vocabulary / W]``, which makes logits.
    """

    embedding: Tensor
    gain: Tensor
    head: Tensor


Compiler = Callable[[Callable], Callable]


class Decoder(torch.nn.Module):
    """The whole model. ``layers``: each is taken once a call, so one call may be given those that are only made then.

    ``compiler``: what the methods of a layer go through, once for all layers; None: they are called as they are.
    """

    embedding: Tensor
    gain: Tensor
    head: Tensor

    def __init__(
        self,
        dimensions: Dimensions,
        ends: Ends,
        layers: Iterable[Layer],
        share: Share,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__()
        self.dimensions, self.share = dimensions, share
        for name, weight in ends._asdict().items():
            self.register_parameter(name, parameter(weight))
        listed = torch.nn.ModuleList(layers) if isinstance(layers, list) else layers
        self.layers = cast(Iterable[Layer], listed)
        self._prefill = compiler(Layer.prefill) if compiler else Layer.prefill
        self._decode = compiler(Layer.decode) if compiler else Layer.decode

    def prefill(self, tokens: Tensor, *, caches: Iterable[Tensor], rotation: Rotation, by: Communication) -> Tensor:
        """Logits after the last token of each prompt, ``[B, vocabulary]``, on all ranks.

        ``tokens``: int64 ``[B, T]``, the same on all ranks, whose number divides B * T. ``caches``: a layer's each,
        which gets the keys and values of all tokens. ``rotation``: of `rotations`.
        """
        (prompts, length), share = tokens.shape, self.share
        rows = self.rows(tokens, caches=caches, rotation=rotation, by=by)
        last = torch.arange(1, prompts + 1, device=tokens.device) * length - 1
        # Each rank sends a row for each prompt, and that of the one that has the last token is taken.
        of_this = (last - share.rank * len(rows)).clamp(0, len(rows) - 1)
        of_all = by.all_gather(rows[of_this]).view(share.num_ranks, prompts, -1)
        return self._logits(of_all[last // len(rows), torch.arange(prompts, device=tokens.device)], by)

    def rows(self, tokens: Tensor, *, caches: Iterable[Tensor | None], rotation: Rotation, by: Communication) -> Tensor:
        """As `prefill`, but for what it returns: the normalised rows of this rank's tokens, ``[B * T / W, hidden]``."""
        residual = embedding(self.share.of(tokens.flatten(), 0), self.embedding)
        rows = normalised(residual, self.gain, self.dimensions)
        of_prompts = Rotation(*(each[: tokens.shape[1]] for each in rotation))
        layers = iter(self.layers)
        for cache in caches:
            # Without a name, so that a layer that is only made here is gone before the next one is made.
            rows, residual = self._prefill(next(layers), rows, residual, cache=cache, rotation=of_prompts, by=by)
        return rows

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        caches: Iterable[Tensor],
        rotation: Rotation,
        by: Communication,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Logits after one token of each sequence, ``[B, vocabulary]``, on all ranks.

        ``tokens``, ``positions``: int64 ``[B]``, the same on all ranks. ``mask``: as `visible` makes it; without, all
        of the cache is attended to.
        """
        of_tokens = Rotation(*(each[positions] for each in rotation))
        step = Step(torch.arange(len(tokens), device=tokens.device), positions, of_tokens, mask)
        residual = embedding(tokens, self.embedding)
        rows = normalised(residual, self.gain, self.dimensions)
        layers = iter(self.layers)
        for cache in caches:
            rows, residual = self._decode(next(layers), rows, residual, cache=cache, step=step, by=by)
        return self._logits(rows, by)

    def _logits(self, rows: Tensor, by: Communication) -> Tensor:
        of_all = by.all_gather(rows @ self.head).view(self.share.num_ranks, len(rows), -1)
        return of_all.transpose(0, 1).reshape(len(rows), -1)


def visible(positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The mask of a step, with caches of ``length``: 0 up to each token's position, and minus infinity after it."""
    later = torch.arange(length, device=positions.device) > positions[:, None]
    zeros = torch.zeros(later.shape, dtype=dtype, device=positions.device)
    return zeros.masked_fill(later, -torch.inf)[:, None, None]
