"""A layer of experts of the library's parts: `ctx.experts`, and `iris.ops.grouped_mm` between its two calls."""

import torch

import iris
from iris.experts import ExpertsConfig, Received

LAYOUT = "compact"
# Rows and columns of a weight that share a factor, as in DeepSeek-V3.
BLOCK = 128


class MixtureOfExperts:
    """``E`` experts, of which each rank has E / W: ``down(silu(gate(x)) * up(x))``, for tokens with ``top`` each.

    Made collectively; blocks the host. A call is collective and enqueued on the current stream, and can be captured
    after a first one. Ranks may have different numbers of tokens, up to ``max_tokens``.

    Attributes
    ----------
    experts : iris.experts.ExpertParallel
    up : torch.Tensor
        ``[E / W, 2 wide, hidden]``, gates first; not initialised.
    down : torch.Tensor
        ``[E / W, hidden, wide]``; not initialised.
    narrow_up, factors : torch.Tensor
        ``up`` of fp8, as `quantise` has made it.
    """

    def __init__(
        self, ctx: iris.Iris, max_tokens: int, hidden: int, wide: int, num_experts: int, top: int, dtype: torch.dtype
    ) -> None:
        self.experts = ctx.experts(
            num_experts=num_experts,
            hidden=hidden,
            max_tokens=max_tokens,
            top_k=top,
            dtype=dtype,
            config=ExpertsConfig(in_flight=1, layouts=(LAYOUT,)),
        )
        local, place = self.experts.num_local_experts, {"device": ctx.device}
        self.up = torch.empty(local, 2 * wide, hidden, dtype=dtype, **place)
        self.down = torch.empty(local, hidden, wide, dtype=dtype, **place)
        self.narrow_up = torch.empty(self.up.shape, dtype=self.experts.quantized_dtype, **place)
        self.factors = torch.empty(local, -(-2 * wide // BLOCK), -(-hidden // BLOCK), **place)

    def quantise(self) -> None:
        """For calls with ``fp8``: make `narrow_up` of `up`."""
        for expert, weight in enumerate(self.up):
            self.narrow_up[expert], self.factors[expert] = by_blocks(weight, self.narrow_up.dtype)

    def __call__(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        gates: torch.Tensor,
        out: torch.Tensor | None = None,
        fp8: bool = False,
    ) -> torch.Tensor:
        """``[T, hidden]`` of this rank's tokens ``[T, hidden]``, with their experts and float32 gates, ``[T, top]``.

        ``fp8``: tokens travel as fp8 with a factor for each 128 elements, and are multiplied with weights of fp8. What
        is made of them goes on in the dtype, and comes back in it.
        """
        received = self.dispatch(x, chosen, gates, fp8)
        return self.experts.combine(self.apply(received), received, out=out)

    def dispatch(self, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor, fp8: bool) -> Received:
        return self.experts.dispatch(x, chosen, gates, quantize="fp8_block128" if fp8 else None, layout=LAYOUT)

    def apply(self, received: Received) -> torch.Tensor:
        """What this rank's experts make of their rows."""
        return self.multiply(received.rows, received.scales, offs=received.offsets[1:], counts=received.counts)

    def multiply(self, rows: torch.Tensor, scales: torch.Tensor | None = None, **groups: torch.Tensor) -> torch.Tensor:
        """The same of rows, and of their factors where they are of fp8; ``groups``: as `iris.ops.grouped_mm` has it."""
        up, factors = (self.up, None) if scales is None else (self.narrow_up, self.factors)
        inside = iris.ops.grouped_mm(
            rows,
            up.transpose(1, 2),
            scale_a=scales,
            scale_b=factors,
            activation="silu_and_mul",
            out_dtype=self.down.dtype,
            **groups,
        )
        return iris.ops.grouped_mm(inside, self.down.transpose(1, 2), **groups)


def by_blocks(matrix: torch.Tensor, dtype: torch.dtype, rows: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """``[M, N]`` as fp8, and float32 factors of blocks of so many rows and 128 columns."""
    M, N = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -N % BLOCK, 0, -M % rows))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
    factors = (blocks.abs().amax(dim=(1, 3)) / torch.finfo(dtype).max).clamp(min=1e-12)
    narrow = (blocks / factors[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    return narrow[:M, :N].to(dtype), factors


def from_blocks(narrow: torch.Tensor, factors: torch.Tensor, rows: int = BLOCK) -> torch.Tensor:
    """What they stand for, float32."""
    M, N = narrow.shape
    each = factors.repeat_interleave(rows, dim=0)[:M].repeat_interleave(BLOCK, dim=1)[:, :N]
    return narrow.float() * each
