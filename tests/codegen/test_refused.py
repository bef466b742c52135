"""What the simulator refuses, as Triton compiles it for no GPU, is what Triton refuses."""

import pytest
import torch
from simulator.refused_kernels import REFUSED
from triton.compiler.errors import CompilationError

from codegen.offline import assembly_for


@pytest.mark.parametrize("kernel", [kernel for kernel, _ in REFUSED], ids=lambda kernel: kernel.__name__)
def test_kernels_that_the_simulator_refuses_do_not_compile(kernel):
    out = torch.zeros(8, dtype=torch.int32)
    # Of a function that is no kernel it is said before anything is compiled.
    with pytest.raises((CompilationError, RuntimeError)):
        assembly_for("sm_90", kernel, out, 5, True)
    if kernel.__name__ != "calls_python":
        assert assembly_for("sm_90", kernel, out, 5, False)
