"""How tests come to the examples that have a folder."""

import contextlib
import importlib
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))


@contextlib.contextmanager
def imported(folder):
    """The example's benchmark, whose neighbours have the names that those of other examples have."""
    mine = {"kernel", "wrapper", "benchmark", "autograd"}
    for name in mine & set(sys.modules):
        del sys.modules[name]
    sys.path.insert(0, str(EXAMPLES / folder))
    try:
        yield importlib.import_module("benchmark")
    finally:
        sys.path.remove(str(EXAMPLES / folder))
