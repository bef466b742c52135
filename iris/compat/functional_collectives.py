"""Functional collectives with gradients, as torch.compile traces them.

`all_gather_tensor_autograd` and `reduce_scatter_tensor_autograd` of `torch.distributed._functional_collectives` are
there in torch 2.9 to 2.13. Where one is gone, its call raises `MissingPartError`: the public collectives write into a
tensor, and have no gradient. A `torch.autograd.Function` around those is no way out: it is right in eager mode, but its
gradients were wrong when torch 2.11 compiled it.
"""

from iris.compat.parts import function

PURPOSE = "compile a training step with torch's collectives"

all_gather = function("torch.distributed._functional_collectives:all_gather_tensor_autograd", PURPOSE)
"""``all_gather(rows, 0, group)``: the rows of all ranks, by rank."""

reduce_scatter = function("torch.distributed._functional_collectives:reduce_scatter_tensor_autograd", PURPOSE)
"""``reduce_scatter(rows, "sum", 0, group)``: this rank's part of the sum of all ranks' rows."""
