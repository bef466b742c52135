"""How tests come to the examples that have a folder."""

import contextlib
import importlib
import sys
from pathlib import Path

import pytest

from iris.errors import TransformersMissingError
from iris.integrations import transformers_version

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))


def skip_without_packages(folder):
    """Of the examples one takes models of transformers, which not every machine has."""
    if folder == "20_mixture_of_experts":
        try:
            transformers_version.check()
        except TransformersMissingError as error:
            pytest.skip(str(error))


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
