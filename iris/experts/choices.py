"""Numbers of rows and of tokens' choices of experts, on the rank of the experts: from one to the other.

For gradients. *Places* say which row a choice is, int32 ``[ranks, max_tokens, top_k]``, -1 where its expert is on
another rank (`Calls.choices`). A token's choices of one expert, if there are several, are one row. Each function is a
launch or two, where torch's operators would be ten: a backward pass waits for the host.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from iris import simulator
from iris.language.dependent_launch import gdc_wait
from iris.runtime.launch import enqueue

# Comparisons of a program at once, of each choice with those of its token; and choices where none are compared.
COMPARISONS, CHOICES = 1024, 1024
# Programs, which go through all tokens by turns: launches of other numbers of tokens are of one grid.
PROGRAMS, SIMULATED_PROGRAMS = 128, 2


@triton.jit
def choices_of(begin, tokens, K, TOKENS: tl.constexpr, TOP_K: tl.constexpr):
    """Where the choices of the tokens from ``begin`` on are, ``[TOKENS, TOP_K]``, and which of them there are."""
    token, k = begin + tl.arange(0, TOKENS), tl.arange(0, TOP_K)
    return token[:, None] * K + k[None, :], (token < tokens)[:, None] & (k < K)[None, :]


# A number of tokens may be 1, and is no constant then.
@triton.jit(do_not_specialize=["tokens"])
def add_up_choices(of_rows, places, of_choices, tokens, K, TOKENS: tl.constexpr, TOP_K: tl.constexpr):
    """``of_rows``: float32, written where a choice is. ``places``, ``of_choices``: ``[tokens, K]``, K <= TOP_K."""
    gdc_wait()
    for begin in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        at, mask = choices_of(begin, tokens, K, TOKENS=TOKENS, TOP_K=TOP_K)
        place = tl.load(places + at, mask=mask, other=-1)
        number = tl.load(of_choices + at, mask=mask, other=0)
        same = place[:, :, None] == place[:, None, :]
        # Choices of one row all store the same sum.
        tl.store(of_rows + place, tl.sum(tl.where(same, number[:, None, :], 0), axis=2), mask=place >= 0)


@triton.jit(do_not_specialize=["choices"])
def take_of_rows(of_choices, of_rows, places, choices, BLOCK: tl.constexpr):
    """``of_choices``, ``places``: ``[choices]``."""
    gdc_wait()
    for begin in range(tl.program_id(0) * BLOCK, choices, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        place = tl.load(places + at, mask=at < choices, other=-1)
        tl.store(of_choices + at, tl.load(of_rows + place, mask=place >= 0, other=0), mask=at < choices)


@triton.jit(do_not_specialize=["tokens"])
def count_once(weights, ids, tokens, K, TOKENS: tl.constexpr, TOP_K: tl.constexpr):
    """``weights``: float32, ``ids``: ``[tokens, K]``, K <= TOP_K."""
    gdc_wait()
    k = tl.arange(0, TOP_K)
    for begin in range(tl.program_id(0) * TOKENS, tokens, tl.num_programs(0) * TOKENS):
        at, mask = choices_of(begin, tokens, K, TOKENS=TOKENS, TOP_K=TOP_K)
        expert = tl.load(ids + at, mask=mask, other=-1)
        before = (expert[:, :, None] == expert[:, None, :]) & (k[None, None, :] < k[None, :, None])
        tl.store(weights + at, (tl.sum(before.to(tl.int32), axis=2) == 0).to(tl.float32), mask=mask)


def sums_of_rows(of_choices: torch.Tensor, places: torch.Tensor, rows: int) -> torch.Tensor:
    """What the choices of each row add up to: float32 ``[ranks, max_tokens, top_k]`` → ``[rows]``, 0 where none is."""
    of_rows = of_choices.new_zeros(rows)
    _enqueue_by_tokens(add_up_choices, of_rows, places.contiguous(), of_choices.contiguous())
    return of_rows


def numbers_of_choices(of_rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The number of each choice's row: float32 ``[rows]`` → like ``places``, contiguous; 0 of those of other ranks."""
    of_choices = places.new_empty(places.shape, dtype=torch.float32)
    choices = places.numel()
    _enqueue(take_of_rows, places.device, of_choices, of_rows.contiguous(), places.contiguous(), choices, CHOICES)
    return of_choices


def first_choices(topk_ids: torch.Tensor) -> torch.Tensor:
    """As `iris.experts.functional.first_choices`, which torch can trace."""
    weights = topk_ids.new_empty(topk_ids.shape, dtype=torch.float32)
    if topk_ids.numel():
        _enqueue_by_tokens(count_once, weights, topk_ids.contiguous())
    return weights


def _enqueue_by_tokens(kernel: Any, written: torch.Tensor, *given: torch.Tensor) -> None:
    """``given``: ``[..., K]``, contiguous."""
    K = given[0].shape[-1]
    _enqueue(kernel, written.device, written, *given, given[0].numel() // K, K, *shape_of(K))


@functools.cache
def shape_of(top_k: int) -> tuple[int, int]:
    """Tokens of a program at once, and the power of two that a token's choices fit."""
    together = triton.next_power_of_2(top_k)
    return max(1, COMPARISONS // together**2), together


def _enqueue(kernel: Any, device: torch.device, *args: Any) -> None:
    programs = SIMULATED_PROGRAMS if simulator.ACTIVE else PROGRAMS
    enqueue(kernel, (programs, 1, 1), device.index, *args)
