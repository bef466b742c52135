"""Launches without the Python part of Triton's launcher, for launchers of different versions and vendors."""

import pytest

from iris.compat.triton_jit import launcher
from iris.runtime.launch import prepare

GRID = (4, 1, 1)


class Spread:
    """Calls its C function with the arguments one by one, as Triton 3.6 does."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self):
        self.python_calls, self.launches = 0, []
        self.launch = lambda *given: self.launches.append(given)

    def __call__(self, x, y, z, stream, function, *args):
        self.python_calls += 1
        self.launch(x, y, z, stream, function, False, True, None, None, *args)

    def expected(self, stream, args):
        return (*GRID, stream, "function", False, True, None, None, "metadata", None, None, None, *args)


class Packed(Spread):
    """With the arguments as one tuple, as Triton 3.9 does."""

    def __call__(self, x, y, z, stream, function, metadata, *more):
        self.python_calls += 1
        self.launch(x, y, z, stream, function, metadata, *more[:3], "signature", more[3:])

    def expected(self, stream, args):
        return (*GRID, stream, "function", "metadata", None, None, None, "signature", args)


class WithScratch(Spread):
    """Needs memory of its own for every launch."""

    global_scratch_size = 128


class Plain(Spread):
    """Does not say which C function it calls."""

    def __init__(self):
        super().__init__()
        self._launch = self.__dict__.pop("launch")

    def __call__(self, x, y, z, stream, function, *args):
        self.python_calls += 1
        self._launch(x, y, z, stream, function, False, True, None, None, *args)


@pytest.mark.parametrize("last", [True, (64, 32, 16)], ids=["a number", "a tuple as long as the arguments"])
@pytest.mark.parametrize(("kind", "python_calls"), [(Spread, 0), (Packed, 0), (WithScratch, 2), (Plain, 2)])
def test_what_a_launcher_is_given(kind, python_calls, last):
    run = kind()
    launch = launcher(run, GRID, "function", "metadata", (1, 2, last))
    assert run.launches == [], "nothing is launched before it is asked for"
    run.python_calls = 0
    launch(7, (3, 4, last))
    launch(8, (5, 6, last))
    assert run.launches == [run.expected(7, (3, 4, last)), run.expected(8, (5, 6, last))]
    assert run.python_calls == python_calls


def test_no_program_is_left_out_of_a_cluster():
    with pytest.raises(ValueError, match="12 programs are not clusters of 8"):
        prepare(None, (12, 1, 1), cluster=8)
