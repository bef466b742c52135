"""Arguments of kernels in NamedTuples: bound by name, and what the JIT and a launch see of their fields."""

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from iris import simulator
from iris.ops.kernel_arguments import Epilogue, Matrix, Tiling, by_name, matrix
from iris.ops.matmul_all_gather import matmul_all_gather
from iris.runtime.launch import addresses


def test_arguments_are_in_the_order_of_parameters():
    names = matmul_all_gather.arg_names
    given = {name: f"the {name}" for name in reversed(names)}
    assert by_name(matmul_all_gather, **given) == tuple(f"the {name}" for name in names)


@pytest.mark.parametrize("more", [{}, {"biass": None}])
def test_each_parameter_has_an_argument(more):
    given = dict.fromkeys(set(matmul_all_gather.arg_names) - {"epilogue"})
    with pytest.raises(TypeError, match=re.escape(f"no parameters {list(more)}, and is given no arguments for ['epi")):
        by_name(matmul_all_gather, **given, **more)


def test_a_launch_gives_addresses_in_the_place_of_tensors(monkeypatch):
    monkeypatch.setattr(simulator, "ACTIVE", False)
    x = torch.zeros(4, 8)
    assert addresses((matrix(x), Epilogue(x, None, None), 5)) == ((x.data_ptr(), 8, 1), (x.data_ptr(), None, None), 5)


def kernel(a, epilogue, n, TILING: tl.constexpr):
    pass


def test_fields_are_specialised_as_arguments_are():
    """But ``do_not_specialize`` does not reach them: what is under it is an argument of its own."""
    jitted = triton.runtime.jit.JITFunction(kernel, do_not_specialize=["a", "n"])
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(jitted.signature, jitted.params, backend)
    x = torch.zeros(64)
    _, (a, epilogue, n, tiling), _ = bind(Matrix(x, 64, 1), Epilogue(x, None, None), 1, Tiling(16, 16, 16))
    assert a == (("*fp32", "i32", "constexpr"), ("D", "D", 1))
    assert epilogue == (("*fp32", "constexpr", "constexpr"), ("D", None, None))
    assert n == ("i32", None)
    assert tiling == ("constexpr", Tiling(16, 16, 16))
