"""Sums of floats of every width, whose elements are their own flags."""

import itertools

import pytest
import torch

from codegen.offline import TARGETS, compile_for, one_of_each
from codegen.test_every_kernel import arguments_of
from iris.ccl.kernel_launch import INTEGERS
from iris.ccl.one_shot import one_shot
from iris.ccl.two_shot_direct import two_shot_direct
from iris.ccl.two_shot_push import two_shot_push

KERNELS = [kernel for each in (two_shot_direct, one_shot, two_shot_push) for kernel in (each, each.gluon)]
WIDTHS = {"f8E5M2": torch.float8_e5m2, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
# Those in which elements of up to so many bytes travel.
WORDS = {4: "i32", 8: "i64"}
CASES = [*itertools.product(KERNELS, WIDTHS)]


@pytest.mark.parametrize(("target", "case"), one_of_each(TARGETS, CASES))
def test_messages_are_integers_and_results_are_not(target, case):
    kernel, name = case
    tensor = torch.zeros(4096, dtype=WIDTHS[name])
    # The slots of two_shot_direct have the type of what goes straight to results.
    slots = tensor if "two_shot_direct" in kernel.fn.__name__ else tensor.view(INTEGERS[tensor.itemsize])
    code = compile_for(target, kernel, *arguments_of(kernel, input=tensor, output=tensor, slots=slots)).ttgir
    assert f"!tt.ptr<{name}>" in code and f"!tt.ptr<{WORDS[max(4, tensor.itemsize)]}>" in code
