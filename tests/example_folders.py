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


# Those with models of transformers, which not every machine has.
OF_TRANSFORMERS = {"19_fsdp_tensor_parallel_training", "20_mixture_of_experts"}


def skip_without_packages(folder):
    if folder in OF_TRANSFORMERS:
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
