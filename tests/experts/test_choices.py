"""Numbers of rows and of choices, from one to the other: as torch's operators would have them."""

import pytest
import torch

from experts.layers import digits
from iris.experts import choices, functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS, TOKENS, ROWS = 3, 37, 500


def places(top_k):
    """Each choice in a row of its own, or in that of the token's first choice, or on another rank."""
    rows = torch.randperm(ROWS)[: RANKS * TOKENS * top_k].view(RANKS, TOKENS, top_k).int()
    kind = digits(rows.shape, top_k, 0, 3)
    rows = torch.where(kind == 1, rows[..., :1], rows)
    return torch.where(kind == 2, -1, rows).to(DEVICE)


@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_choices_of_a_row_are_added_up(top_k):
    where = places(top_k)
    numbers = torch.arange(where.numel(), dtype=torch.float32, device=DEVICE).view(where.shape)
    expected = torch.zeros(ROWS, device=DEVICE)
    expected.index_add_(0, where[where >= 0].long(), numbers[where >= 0])
    assert torch.equal(choices.sums_of_rows(numbers, where, ROWS), expected)


@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_a_choice_has_the_number_of_its_row(top_k):
    where, of_rows = places(top_k), torch.arange(1.0, ROWS + 1, device=DEVICE)
    expected = torch.where(where >= 0, where + 1.0, 0.0)
    assert torch.equal(choices.numbers_of_choices(of_rows, where), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 3), (1, 1), (TOKENS, 3), (700, 8)])
def test_an_expert_that_is_chosen_again_does_not_count(dtype, tokens, top_k):
    ids = digits((tokens, top_k), tokens, -1, 5).to(DEVICE, dtype)
    assert torch.equal(choices.first_choices(ids), functional.first_choices(ids))
