"""As many ranks as a host may have: those of a token fill a word of bits, and a shift past its end finds its sign."""

import pytest
import torch
import triton
import triton.language as tl

import iris.simulator
from iris.experts.combine import load_sums
from iris.experts.kernel_arguments import Slot
from iris.experts.memory import extents
from iris.language.barrier import LANES

DEVICE = "cpu" if iris.simulator.ACTIVE else "cuda"
MOST, H = LANES.value, 8


@triton.jit
def sums_of_others(slot, bits, found, rank, PEERS: tl.constexpr, EXTENTS: tl.constexpr):
    """``found``: ``[W - 1 + 2 PEERS, H]``, what combine loads of each other rank, and of those that it looks ahead."""
    columns = tl.arange(0, EXTENTS.BLOCK)
    for first in range(0, EXTENTS.W - 1 + PEERS, PEERS):
        sums = load_sums(slot, tl.load(bits), rank, 0, columns=columns, first=first, PEERS=PEERS, EXTENTS=EXTENTS)
        for each in tl.static_range(PEERS):
            tl.store(found + (first + each) * EXTENTS.H + columns, sums[each])


@pytest.mark.parametrize("size", [2, MOST - 3, MOST - 2, MOST - 1, MOST])
@pytest.mark.parametrize("rank", [0, 1, -1])
def test_sums_are_those_of_ranks_that_there_are(size, rank):
    rank %= size
    sizes = extents(size, size, 1, 1, H, torch.float32, programs=1)
    # Ranks have sent their numbers. What comes after is no sum.
    partials = (
        torch.arange(1, size + 5, dtype=torch.float32, device=DEVICE)[:, None, None].expand(-1, 1, H).contiguous()
    )
    bits = torch.tensor([(1 << size) - 1]).to(torch.int32).to(DEVICE)
    found = torch.full((size + 4, H), torch.nan, device=DEVICE)
    slot = Slot(**dict.fromkeys(Slot._fields) | {"partials": partials})
    sums_of_others[(1,)](slot, bits, found, rank, 2, sizes)
    others = [1.0 + each for each in range(size) if each != rank]
    read = found[: (size + 2) // 2 * 2, 0].tolist()
    assert read == others + [0.0] * (len(read) - len(others))
