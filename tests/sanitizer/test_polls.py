"""Loops of a kernel's own that look at what nobody raises, or where no tensor is: found at once, for what they are."""

import contextlib

import pytest
import torch
import triton
import triton.language as tl

from iris import DeviceContext
from iris.errors import IrisError

PLAIN, VOLATILE, OF_THE_CONTEXT, ADDITION, SWAP, KEPT, SEVERAL, ADDITION_OF_THE_CONTEXT = range(8)


@triton.jit
def poll(context_tensor, flags, first, HOW: tl.constexpr):
    ctx = DeviceContext.initialize(context_tensor)
    flag = flags + first
    if HOW == 0:
        while tl.load(flag) != 77:
            pass
    elif HOW == 1:
        while tl.load(flag, volatile=True) != 77:
            pass
    elif HOW == 2:
        while ctx.load(flag, ctx.cur_rank) != 77:
            pass
    elif HOW == 3:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 77:
            pass
    elif HOW == 4:
        while tl.atomic_cas(flag, 77, 0, sem="acquire", scope="sys") != 77:
            pass
    elif HOW == 5:
        found = tl.load(flag)
        while found != 77:
            found = tl.load(flag)
    elif HOW == 7:
        while ctx.atomic_add(flag, 0, ctx.cur_rank, sem="acquire", scope="sys") != 77:
            pass
    else:
        while tl.sum(tl.load(flag + tl.arange(0, 4))) != 77 * 4:
            pass


def work(ctx, on_heap, how, first):
    flags = (ctx if on_heap else torch).zeros(8, dtype=torch.int32)
    with contextlib.suppress(IrisError):
        poll[(1,)](ctx.get_device_context(), flags, first, how)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", range(8))
@pytest.mark.parametrize("on_heap", [True, False])
@pytest.mark.parametrize("first, kind", [(2, "deadlock"), (1 << 20, "bounds"), (1 << 40, "bounds")])
def test_a_poll_that_nobody_ends(ranks, on_heap, how, first, kind):
    if how in (OF_THE_CONTEXT, ADDITION_OF_THE_CONTEXT) and not on_heap:
        kind = "bounds"
    _, findings = ranks.run_sanitized(work, on_heap, how, first)
    assert {finding.kind for finding in findings} == {kind}


@triton.jit
def count_down(x, counts, N: tl.constexpr):
    """Looks at the same words often, and ends by itself."""
    left = N
    while left > tl.load(counts):
        left -= 1
    tl.store(x, left)


def counted(ctx):
    x, counts = torch.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    count_down[(1,)](x, counts, 500)
    assert x.item() == 0


@pytest.mark.ranks(1)
def test_who_looks_often_and_ends_by_itself_is_not_stuck(ranks):
    _, findings = ranks.run_sanitized(counted)
    assert findings == []
