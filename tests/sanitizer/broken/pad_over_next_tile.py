"""Each program clears the padding after its tile. Only the last tile has one: after the others is the next tile.

Which of the two programs writes last is chance.
"""

import torch
import triton
import triton.language as tl
from program import command

import iris
from iris import DeviceContext

KIND = "race"
TILE, PAD, PROGRAMS = 32, 8, 3


@triton.jit
def send_padded(context_tensor, padded, TILE: tl.constexpr, PAD: tl.constexpr, BROKEN: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    pid = tl.program_id(0)
    peer = 1 - ctx.cur_rank
    offsets = pid * TILE + tl.arange(0, TILE)
    ctx.store(padded + offsets, 1 + offsets, peer)  # first
    padding = (pid + 1) * TILE + tl.arange(0, PAD)
    if BROKEN:
        last = padding >= 0
    else:
        last = padding >= tl.num_programs(0) * TILE
    ctx.store(padded + padding, 0, peer, mask=last)  # second


def main(ctx: iris.Iris, broken: bool) -> None:
    padded = ctx.full((PROGRAMS * TILE + PAD,), -1, dtype=torch.int32)
    ctx.barrier()
    send_padded[(PROGRAMS,)](ctx.get_device_context(), padded, TILE, PAD, broken)
    ctx.barrier()
    if not broken:
        assert padded.tolist() == [1 + i for i in range(PROGRAMS * TILE)] + [0] * PAD


if __name__ == "__main__":
    command(main)
