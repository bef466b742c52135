"""A launch that was prepared for tensors at one place serves others so aligned, wherever their storages begin."""

import pytest
import torch

# More than goes by words of 4 bytes (`iris.ccl.one_hop`), and not a multiple of anything.
COUNT = 70_001
ITEM = 4


def at(begin, skipped, count):
    """Zeros, float32, after ``skipped`` others of a storage that begins ``begin`` bytes after a multiple of 16."""
    memory = bytearray(ITEM * (count + skipped) + 32)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    whole = torch.frombuffer(memory, dtype=torch.float32, offset=(begin - address) % 16, count=count + skipped)
    return whole[skipped:].zero_()


def moved(ctx, name):
    """All tensors begin at multiples of 16; their storages do so, or not, by turns."""
    size, me, kinds = ctx.num_ranks, ctx.cur_rank, [(0, 0), (12, 1), (8, 2), (4, 3), (0, 4)]
    for call, (begin, skipped) in enumerate(kinds * 2):
        sent = torch.arange(COUNT * size, dtype=torch.float32) * size + 0.25 * call
        whole, part = at(begin, skipped, COUNT * size), at(begin, skipped, COUNT)
        assert not whole.data_ptr() % 16 and not part.data_ptr() % 16
        if name == "all_gather":
            part.copy_(sent[:COUNT] + me)
            ctx.ccl.all_gather(whole, part)
            assert torch.equal(whole, torch.cat([sent[:COUNT] + rank for rank in range(size)]))
        elif name == "all_to_all":
            given = at(begin, skipped, COUNT * size).copy_(sent + me)
            ctx.ccl.all_to_all(whole, given)
            assert torch.equal(whole, torch.cat([sent.view(size, -1)[me] + rank for rank in range(size)]))
        elif name == "broadcast":
            whole.copy_(sent + me)
            ctx.ccl.broadcast(whole, size - 1)
            assert torch.equal(whole, sent + size - 1)
        else:
            given = at(begin, skipped, COUNT * size).copy_(sent)
            ctx.ccl.scatter(part, given if me == 0 else None, 0)
            assert torch.equal(part, sent.view(size, -1)[me])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver's memory begins at multiples of more")
@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "broadcast", "scatter"])
def test_storages_that_begin_anywhere(ranks, name):
    ranks.run(moved, name)
