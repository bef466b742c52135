"""What is said where transformers is missing, or is none that Iris fits; and that nothing else of Iris needs it."""

import importlib.metadata
import subprocess

import pytest
from preloaded import LIMIT_S, python

from iris.errors import TransformersMissingError
from iris.integrations import transformers_version


@pytest.mark.parametrize(
    ("version", "fits"), [("5.24.0", True), ("5.31.2", True), ("5.23.4", False), ("6.0.0", False), (None, False)]
)
def test_versions(monkeypatch, version, fits):
    def installed(name):
        assert name == "transformers"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    if fits:
        transformers_version.check()
        return
    with pytest.raises(TransformersMissingError, match=f"{version or 'not installed'}.*pip install 'transformers>=5"):
        transformers_version.check()


def test_iris_does_not_import_it():
    program = "import sys, iris, iris.integrations; assert 'transformers' not in sys.modules"
    subprocess.run([*python(), "-c", program], check=True, timeout=LIMIT_S)
