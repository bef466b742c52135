"""Kernels of expert parallelism move rows by 16 bytes, in every form, and take no more registers than they may."""

import re

import pytest

from codegen import test_every_kernel as every
from codegen.expert_arguments import forms
from codegen.offline import TARGETS, by_turns, compile_for, one_of_each
from iris.experts.combine import DISPATCHED, GIVEN, UNWEIGHTED, combine
from iris.experts.dispatch import dispatch

FORMS = ("as it is", *forms("sm_90"))
WEIGHTS = {"unweighted": UNWEIGHTED, "dispatched": DISPATCHED, "given": GIVEN}


def of_form(form, target):
    return every.arguments_of(dispatch, **forms(target).get(form, {}))


def weighted(name):
    return every.arguments_of(combine, WEIGHTS=WEIGHTS[name].value)


def wide(code, way, target):
    """Accesses of 16 bytes to global memory."""
    if target.startswith("gfx"):
        return re.findall(rf"(?:global|buffer)_{way}_dwordx4", code)
    return re.findall(rf"{dict(load='ld', store='st')[way]}\.global\.v4\.b32", code)


@pytest.mark.parametrize(("target", "form"), one_of_each(TARGETS, FORMS))
def test_rows_are_sent_and_placed_by_16_bytes(target, form):
    code = compile_for(target, dispatch, *of_form(form, target), num_warps=4).text
    # Read and stored to peers; read again and stored to places.
    assert len(wide(code, "load", target)) >= 2
    assert len(wide(code, "store", target)) >= (1 if form.startswith("by ") else 2)


@pytest.mark.parametrize(("target", "name"), one_of_each(TARGETS, [*WEIGHTS]))
def test_rows_are_added_up_by_16_bytes(target, name):
    code = compile_for(target, combine, *weighted(name), num_warps=4).text
    assert len(wide(code, "load", target)) >= 9 and wide(code, "store", target)


@pytest.mark.parametrize("kernel", by_turns([dispatch, combine]))
def test_programs_leave_room_for_others(kernel):
    """One that sends and one that receives are on each multiprocessor."""
    of_both_kinds = 2 * 4 * every.registers_of_a_warp(kernel, every.arguments_of(kernel), 4, maxnreg=192)
    assert of_both_kinds <= every.MOST_REGISTERS
