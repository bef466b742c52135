"""How near a product has to be to the exact one: as near as the same through torch.

The same means that it is rounded where the operation rounds it, and nowhere else. What is left to differ is the order
of float32's sums, which is little beside the roundings of fp16 and bf16: so one rounding too many shows.
"""

from typing import NamedTuple

import torch

GATHERS = ("all_gather_matmul", "matmul_all_gather")
# The mean error may be so much larger than torch's. Of results of float32 the order of sums is most of it.
FACTOR = {torch.float16: 1.05, torch.bfloat16: 1.05, torch.float32: 2}


class Product(NamedTuple):
    """What a rank multiplies: of all_gather_matmul the rows of all. And its scales, or None."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor | None
    scale_b: torch.Tensor | None

    def formed_in(self, dtype, of=torch.positive):
        """The product of ``of`` both matrices, formed in ``dtype``."""
        total = of(self.a.to(dtype)) @ of(self.b.to(dtype))
        if self.scale_a is not None:
            total = total * self.scale_a.to(dtype)[:, None]
        return total if self.scale_b is None else total * self.scale_b.to(dtype)

    def rounded_to(self, dtype, bias=None):
        """Summed in float32 and rounded once: by torch's product of that dtype, where there is one."""
        if self.a.dtype == dtype and self.scale_a is self.scale_b is None:
            return torch.mm(self.a, self.b) if bias is None else torch.addmm(bias, self.a, self.b)
        total = self.formed_in(torch.float32)
        return (total if bias is None else total + bias).to(dtype)


class Roundings(NamedTuple):
    """What is rounded besides the result, and parts that travel."""

    before_bias: bool
    own_part: bool

    @classmethod
    def of(cls, name, algorithm):
        # On Hopper a warp adds the bias to products that others have left in shared memory.
        before_bias = algorithm == ("hopper" if name in GATHERS else "vendor")
        # In Triton a rank's own part is still in registers when those of the peers are added to it.
        return cls(before_bias, own_part=algorithm != "triton")


def whole(name, products):
    """Of all ranks: matmul_reduce_scatter leaves each some rows of it."""
    return torch.cat(products) if name in GATHERS else sum(products)


def through_torch(name, products, bias, dtype, roundings):
    """The `whole` of the ranks' products, plus bias."""
    inside, after = (None, bias) if roundings.before_bias else (bias, None)
    if name in GATHERS:
        result = torch.cat([product.rounded_to(dtype, inside) for product in products])
    else:
        parts = [product.rounded_to(dtype).float() for product in products]
        if not roundings.own_part:
            share = -(-len(parts[0]) // len(parts))
            for rank, product in enumerate(products):
                rows = slice(rank * share, (rank + 1) * share)
                parts[rank][rows] = product.formed_in(torch.float32)[rows]
        total = sum(parts)
        result = (total if inside is None else total + inside).to(dtype)
    return result if after is None else result + after


def assert_as_near(actual, exact, torchs, sizes, bits):
    """``sizes``: sums of the products' absolute values. ``bits``: that products, or sums, have while they are formed.

    The largest error may be twice torch's. Their root mean square, which every rounding adds to, may be what a single
    element makes of it that another order of sums rounds the other way.
    """
    formed = 4 * 2.0**-bits * sizes.max()
    ours, theirs = (result.double() - exact for result in (actual, torchs))
    worst, allowed = ours.abs().max(), 2 * theirs.abs().max() + formed
    assert worst <= allowed, f"an error of {worst:.3g}, where {allowed:.3g} is allowed"
    unit = torch.finfo(actual.dtype).eps * exact.abs().max()
    mean, torchs_mean = (errors.square().mean().sqrt() for errors in (ours, theirs))
    allowed = torch.hypot(FACTOR[actual.dtype] * torchs_mean, unit / exact.numel() ** 0.5) + formed
    assert mean <= allowed, f"errors of {mean:.3g} on average, where {allowed:.3g} is allowed"
