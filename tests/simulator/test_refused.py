"""What Triton's compiler refuses of the Python in a kernel is refused in the simulator, and what to do is said."""

import pytest
import torch
import triton
import triton.language as tl

import iris.simulator  # noqa: F401
from simulator.refused_kernels import REFUSED


@pytest.mark.parametrize(("kernel", "said"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_does_not_compile_is_refused_where_it_is_reached(kernel, said):
    """As by the compiler, which looks at no branch that a constexpr condition excludes."""
    out = torch.zeros(8, dtype=torch.int32)
    kernel[(1,)](out, 5, False)
    assert out.tolist() == [1] * 5 + [0] * 3
    with pytest.raises(TypeError, match=said):
        kernel[(1,)](out, 5, True)


def within(value):
    @triton.jit
    def kernel(out):
        tl.store(out, value)

    return kernel


def test_variables_of_functions_around_a_kernel_are_constants_too():
    out = torch.zeros(1, dtype=torch.int32)
    within(tl.constexpr(7))[(1,)](out)
    assert out.item() == 7
    with pytest.raises(TypeError, match="the global value, which does not compile"):
        within(7)[(1,)](out)


def test_what_the_compiler_is_told_to_allow_is_allowed(monkeypatch):
    monkeypatch.setattr(triton.knobs.compilation, "allow_non_constexpr_globals", True)
    out = torch.zeros(1, dtype=torch.int32)
    within(7)[(1,)](out)
    assert out.item() == 7
