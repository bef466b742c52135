"""A pair of linear layers in the tensor parallel styles: results and all gradients are those of one process."""

import copy

import pytest
import torch
from covering import thorough

from integrations.models import Meshes, apply_tensor_parallelism, near, register

ROWS, FEATURES, INNER = 5, 12, 16


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.up, self.down = torch.nn.Linear(FEATURES, INNER), torch.nn.Linear(INNER, FEATURES)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


PLAN = {
    name: f"iris_{style}"
    for layer, style in (("up", "colwise"), ("down", "rowwise"))
    for name in (f"{layer}.weight", f"{layer}.bias", layer)
}


def compare(ctx, autocast, compiled, trained):
    register()
    whole = Pair().to(ctx.device)
    shared = apply_tensor_parallelism(copy.deepcopy(whole), Meshes(ctx, "shared", None).experts, PLAN)
    forward = shared
    if compiled:
        shared(torch.zeros(1, FEATURES, device=ctx.device))  # makes a context, which is no part of a graph
        forward = torch.compile(shared, fullgraph=True, backend="aot_eager")
    dtype = torch.bfloat16 if autocast else torch.float32
    for round in range(2):
        # Batches and their tokens: two dimensions before the features.
        x = torch.randn(2, ROWS, FEATURES, generator=torch.Generator().manual_seed(round)).to(ctx.device)
        found = []
        for module, run in ((shared, forward), (whole, whole)):
            module.zero_grad()
            given = x.clone().requires_grad_(trained)
            with torch.autocast(ctx.device.type, torch.bfloat16, enabled=autocast), torch.set_grad_enabled(trained):
                out = run(given)
            assert out.dtype == dtype
            if trained:
                (out.float() * x.cos()).sum().backward()
            found.append((out.float(), given.grad))
        near(found[0][0], found[1][0], dtype)
        if trained:
            near(found[0][1], found[1][1], dtype)
            for name, parameter in shared.named_parameters():
                near(parameter.grad.full_tensor(), whole.get_parameter(name).grad, dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("autocast", "compiled", "trained"),
    [
        (True, False, True),
        thorough(False, True, True),
        thorough(True, True, False),
        thorough(False, False, False),
    ],
)
def test_results_and_gradients(ranks, autocast, compiled, trained):
    ranks.run(compare, autocast, compiled, trained)
