"""A device context is initialised in the order of either language, by place and by name."""

import pytest
import torch

from language import initialise_kernels

FORMS = range(9)


def initialised(ctx, language):
    kernel = getattr(initialise_kernels, f"{language}_initialise")
    seen = torch.zeros(3, dtype=torch.int32, device=ctx.device)
    rank, size = ctx.cur_rank, ctx.num_ranks
    for form in FORMS:
        # A kernel may ask for fewer ranks than there are.
        number = size if form in (1, 4, 5) else rank + 1
        for traced in (False, True):
            kernel[(1,)](ctx.get_device_context(), seen.zero_(), rank, number, form, traced)
            on = traced and form not in (0, 8)
            assert seen.tolist() == [10 + rank, 20 + number, int(on)], (language, form, traced)
    ctx.barrier()


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_tracing_stands_after_the_ranks_or_before_them(ranks, language):
    ranks.run(initialised, language)
