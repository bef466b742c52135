"""Random weights and caches of decoders: what a rank has of them is a part of what one process would have.

All are made of whole matrices from a seed of their own, on the device, rounded to the model's dtype. So a model that
does not fit one GPU can be computed there by one process, layer by layer (`one_by_one`), also in a wider dtype.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from iris.bench.model.decoder import Decoder, Ends, Layer, LayerWeights
from iris.bench.model.dimensions import Dimensions, Share
from iris.bench.model.experts import Experts, ExpertWeights, draw_preferences

# Seeds: of a layer's weights, of its cache, of what is outside of layers, and of experts, so many to a layer at most.
WEIGHTS, CACHE, ENDS, EXPERTS = (1_000_000 * kind for kind in (1, 2, 3, 5))
EXPERTS_OF_A_LAYER = 1000


def part_of(whole: Tensor, name: str, dimensions: Dimensions, share: Share) -> Tensor:
    """A rank's part of a parameter, by its name, or of the parameter's gradient."""
    d = dimensions
    # Split one by one, as each rank has its heads of queries, of keys and of values.
    columns = {
        "qkv": [d.heads * d.head_dim, d.kv_heads * d.head_dim, d.kv_heads * d.head_dim],
        "gate_up": [d.intermediate, d.intermediate],
        "head": [d.vocabulary],
    }
    if name in columns:
        return torch.cat([share.of(each, 1) for each in whole.split(columns[name], 1)], 1)
    return share.of(whole, 0) if name in ("o", "down", "experts_up", "experts_down") else whole


class Maker:
    """Makes parts of one model.

    ``rounded``: the dtype that values are rounded to. ``dtype``: what they have then, the same or a wider one.
    """

    def __init__(
        self, dimensions: Dimensions, share: Share, rounded: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dimensions, self.share = dimensions, share
        self._rounded, self.dtype, self.device = rounded, dtype, device

    def of(
        self, dimensions: Dimensions | None = None, share: Share | None = None, dtype: torch.dtype | None = None
    ) -> "Maker":
        """Makes the same with other dimensions, another share, or in another dtype."""
        return Maker(
            dimensions or self.dimensions, share or self.share, self._rounded, dtype or self.dtype, self.device
        )

    def _random(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def _own(self, part: Tensor) -> Tensor:
        """As it is rounded, in memory of its own, so that nothing keeps the whole."""
        return part.to(self._rounded).to(self.dtype).clone(memory_format=torch.contiguous_format)

    def _matrix(self, name: str, generator: torch.Generator, *shape: int) -> Tensor:
        """Such that a product has the size of what is multiplied; of this rank."""
        whole = torch.randn(shape, generator=generator, device=self.device).mul_(shape[0] ** -0.5)
        return self._own(part_of(whole, name, self.dimensions, self.share))

    def _gain(self, generator: torch.Generator) -> Tensor:
        return self._own(1 + 0.1 * torch.randn(self.dimensions.hidden, generator=generator, device=self.device))

    def layer(self, number: int) -> Layer:
        d, generator = self.dimensions, self._random(WEIGHTS + number)
        of_heads = d.heads * d.head_dim
        weights = LayerWeights(
            qkv=self._matrix("qkv", generator, d.hidden, of_heads + 2 * d.kv_heads * d.head_dim),
            o=self._matrix("o", generator, of_heads, d.hidden),
            gate_up=self._matrix("gate_up", generator, d.hidden, 2 * d.intermediate) if d.intermediate else None,
            down=self._matrix("down", generator, d.intermediate, d.hidden) if d.intermediate else None,
            mlp_gain=self._gain(generator),
            next_gain=self._gain(generator),
        )
        return Layer(d, weights, self.share, self._experts(number) if d.experts else None)

    def _experts(self, number: int) -> Experts:
        """Of a layer. They are made one by one, as all of a layer take much memory."""
        d, first = self.dimensions, EXPERTS + EXPERTS_OF_A_LAYER * number
        here = self.share.of(torch.arange(d.experts), 0).tolist()
        shapes = (2 * d.expert_intermediate, d.hidden), (d.hidden, d.expert_intermediate)
        up, down = (torch.empty(len(here), *shape, dtype=self.dtype, device=self.device) for shape in shapes)
        for place, expert in enumerate(here):
            generator = self._random(first + expert)
            for to, shape in zip((up[place], down[place]), shapes, strict=True):
                made = torch.randn(shape, generator=generator, device=self.device).mul_(shape[1] ** -0.5)
                to.copy_(made.to(self._rounded))
        router = self._matrix("router", self._random(first + d.experts), d.hidden, d.experts)
        return Experts(d, ExpertWeights(router, up, down, self._preferences), self.share)

    @functools.cached_property
    def _preferences(self) -> Tensor:
        """The same in all layers."""
        return draw_preferences(self.dimensions.experts, self._random(EXPERTS - 1))

    def ends(self) -> Ends:
        d, generator = self.dimensions, self._random(ENDS)
        embedding = torch.randn(d.vocabulary, d.hidden, generator=generator, device=self.device)
        head = self._matrix("head", generator, d.hidden, d.vocabulary)
        return Ends(self._own(embedding), self._gain(generator), head)

    def decoder(self) -> Decoder:
        return Decoder(self.dimensions, self.ends(), list(self._layers()), self.share)

    def one_by_one(self) -> Decoder:
        """For one call, which makes each layer when it comes to it, and lets go of it then."""
        return Decoder(self.dimensions, self.ends(), self._layers(), self.share)

    def _layers(self) -> Iterator[Layer]:
        return map(self.layer, range(self.dimensions.layers))

    def empty_caches(self, sequences: int, length: int) -> Iterator[Tensor]:
        """A cache for each layer, one by one. Places that nobody has written are zeros, so a mask can hide them."""
        d = self.dimensions
        shape = (2, sequences, d.kv_heads // self.share.num_ranks, length, d.head_dim)
        return (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(d.layers))

    def full_caches(self, sequences: int, length: int) -> Iterator[Tensor]:
        """The same, with random keys and values."""
        d = self.dimensions
        shape = (2, sequences, d.kv_heads, length, d.head_dim)
        for number in range(d.layers):
            values = torch.randn(shape, generator=self._random(CACHE + number), device=self.device)
            yield self._own(self.share.of(values, 2))
