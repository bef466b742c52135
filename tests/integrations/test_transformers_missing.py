"""What is said where transformers is missing, or is none that Iris fits; and that nothing else of Iris needs it."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import iris
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


def test_nothing_else_imports_it():
    """So that `import iris` takes no longer for it, and works without it."""
    root = Path(iris.__file__).parent
    importing = re.compile(r"^\s*(?:import|from) (?:transformers|iris\.integrations\.transformers)\b", re.MULTILINE)
    found = {file for file in root.rglob("*.py") if importing.search(file.read_text())}
    assert found and all(file.is_relative_to(root / "integrations" / "transformers") for file in found)
