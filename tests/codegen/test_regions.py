"""Kernels that look for a tensor in several regions, which all ranks reach: how many there are is no constant then."""

import pytest

from codegen.offline import TARGETS, compile_for, one_of_each
from codegen.test_every_kernel import arguments_of
from iris.ccl.broadcast import broadcast
from iris.ccl.exchange import exchange
from iris.ccl.pull import pull
from iris.ccl.two_shot import two_shot
from iris.ccl.two_shot_direct import two_shot_direct

KERNELS = {
    "two_shot": two_shot,
    "two_shot direct": two_shot_direct,
    "exchange": exchange,
    "pull": pull,
    "broadcast": broadcast,
}
REGIONED = {
    f"{language} {name}": kernel if language == "triton" else kernel.gluon
    for name, kernel in KERNELS.items()
    for language in ("triton", "gluon")
}


@pytest.mark.parametrize(("target", "kernel"), one_of_each(TARGETS, [*REGIONED.values()]))
def test_tensors_are_found_in_several_regions(target, kernel):
    several, one = (len(compile_for(target, kernel, *arguments_of(kernel, regions=n)).text) for n in (3, 1))
    assert several > one
