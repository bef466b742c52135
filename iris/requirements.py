"""Triton must be there before anything else of Iris can be imported: importing this module checks it."""

import sys

from iris.errors import TritonMissingError


def check() -> None:
    """Raise `TritonMissingError` unless Triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise TritonMissingError(str(error)) from error


try:
    check()
except TritonMissingError:
    # `python -m iris` still runs, since its `info` is to say what is missing. Python imports the package before its
    # __main__, so the command line runs from here, and ends the process. "-m" is Python's own mark, while it looks for
    # the module that the option names (documented with sys.argv).
    if sys.argv[:1] == ["-m"]:
        from iris.__main__ import main

        main()
    raise
