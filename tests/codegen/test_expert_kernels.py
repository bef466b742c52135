"""Kernels of expert parallelism move rows by 16 bytes, in every form, and take no more registers than they may."""

import re

import pytest
import torch

from codegen import test_every_kernel as every
from codegen.collective_arguments import INT32
from codegen.expert_arguments import COUNTED, TWO_BIASES, forms
from codegen.offline import TARGETS, by_turns, compile_for, one_of_each
from codegen.test_grouped_kernels import spilled
from iris.experts import choices
from iris.experts.combine import combine
from iris.experts.dispatch import dispatch
from iris.experts.memory import extents
from iris.experts.routing import RECEIVE, SEND
from iris.experts.token_rows import DISPATCHED, GIVEN, UNWEIGHTED
from iris.runtime import launch

FORMS = ("as it is", *forms("sm_90"))
PHASES = {"sends": SEND.value, "receives": RECEIVE.value}
WEIGHTS = {"unweighted": UNWEIGHTED, "dispatched": DISPATCHED, "given": GIVEN}


def of_form(form, target):
    return every.arguments_of(dispatch, **forms(target).get(form, {}))


def weighted(name):
    return every.arguments_of(combine, WEIGHTS=WEIGHTS[name].value)


def in_halves(kernel, phase):
    return every.arguments_of(kernel, PHASE=PHASES[phase])


def counted():
    """How many tokens there are is on the device."""
    return every.arguments_of(dispatch, num_tokens=INT32)


def with_statistics(kernel):
    return every.arguments_of(kernel, statistics=COUNTED)


def biased():
    return every.arguments_of(combine, WEIGHTS=DISPATCHED.value, bias=TWO_BIASES)


def wide(code, way, target, nbytes=16):
    """Accesses of so many bytes to global memory."""
    if target.startswith("gfx"):
        words = {4: "", 8: "x2", 16: "x4"}[nbytes]
        return re.findall(rf"(?:global|buffer)_{way}_dword{words}\b", code)
    words = {4: "", 8: "v2.", 16: "v4."}[nbytes]
    return re.findall(rf"{dict(load='ld', store='st')[way]}\.global\.{words}b32", code)


@pytest.mark.parametrize(("target", "form"), one_of_each(TARGETS, FORMS))
def test_rows_are_sent_and_placed_by_16_bytes(target, form):
    code = compile_for(target, dispatch, *of_form(form, target), num_warps=4).text
    # Read and stored to peers; read again and stored to places.
    assert len(wide(code, "load", target)) >= 2
    assert len(wide(code, "store", target)) >= (1 if form.startswith("by ") else 2)


@pytest.mark.parametrize(("target", "name"), one_of_each(TARGETS, [*WEIGHTS, "biases"]))
def test_rows_are_added_up_by_16_bytes(target, name):
    arguments = biased() if name == "biases" else weighted(name)
    code = compile_for(target, combine, *arguments, num_warps=4).text
    # A token's rows here, and what another rank has sent; and two biases.
    assert len(wide(code, "load", target)) >= 9 + 2 * (name == "biases")
    assert wide(code, "store", target)


def of_choices(kernel, top_k):
    numbers, ids = torch.empty(8192, top_k), torch.zeros(8192, top_k, dtype=torch.int32)
    if kernel is choices.take_of_rows:
        return (numbers, numbers, ids, ids.numel(), choices.CHOICES)
    tensors = (numbers, ids, numbers) if kernel is choices.add_up_choices else (numbers, ids)
    return (*tensors, len(ids), top_k, *choices.shape_of(top_k))


CHOICES = [
    (choices.add_up_choices, 8),
    (choices.add_up_choices, 24),
    (choices.count_once, 8),
    (choices.take_of_rows, 8),
]


@pytest.mark.parametrize(("target", "case"), one_of_each(TARGETS, CHOICES))
def test_choices_are_compared_in_registers(target, case):
    kernel, top_k = case
    compiled = compile_for(target, kernel, *of_choices(kernel, top_k), num_warps=4)
    assert not target.startswith("sm") or not spilled(compiled)


def test_a_launch_is_for_any_number_of_tokens(monkeypatch):
    """Another one would be compiled in a backward pass, while other ranks wait."""
    prepared = {}
    monkeypatch.setattr(launch, "_prepared", prepared)
    monkeypatch.setattr(launch, "prepare", lambda *arguments, **options: lambda stream, arguments: None)
    for tokens in (1, 2, 16, 37):
        choices.first_choices(torch.zeros(tokens, 3, dtype=torch.int64))
    assert len(prepared) == 1


def alone(kernel):
    """On two ranks, of programs that have a multiprocessor each."""
    sizes = {"num_experts": 256, "top_k": 8, "max_tokens": 4096, "hidden": 7168, "dtype": torch.bfloat16}
    return every.arguments_of(kernel, EXTENTS=extents(2, **sizes, programs=8, alone=True))


@pytest.mark.parametrize(
    ("kernel", "arguments", "warps"),
    by_turns(
        [
            (combine, biased(), 4),
            (dispatch, of_form("by block", "sm_90"), 4),
            (combine, alone(combine), 8),
            (dispatch, alone(dispatch), 8),
        ]
    ),
)
def test_programs_leave_room_for_others(kernel, arguments, warps):
    """One that sends and one that receives are on each multiprocessor, or one with as many warps as both."""
    assert 8 * every.registers_of_a_warp(kernel, arguments, warps, maxnreg=192) <= every.MOST_REGISTERS
