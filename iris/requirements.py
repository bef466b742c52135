"""Triton must be there before anything else of Iris can be imported: the package checks it first."""

import sys

from iris.errors import TritonMissingError


def check() -> None:
    """Raise `TritonMissingError` unless Triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise TritonMissingError(str(error)) from error


def runs_command() -> bool:
    """Whether Python imports the package for ``python -m iris``, before its `__main__`.

    "-m" is Python's own mark, while it looks for the module that the option names (documented with sys.argv).
    """
    return sys.argv[:1] == ["-m"]
