"""What the process from which ranks are forked does for all of them.

It imports the modules of tests that pytest has imported by then: some come with torch's compiler, which takes seconds.
And it rewrites the kernels that the simulator will run. The process knows no arguments but its environment, and reads
them there when it imports this.
"""

import contextlib
import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
GIVEN = "IRIS_TEST_MODULES_OF_RANKS"


@contextlib.contextmanager
def handed_over() -> Iterator[None]:
    """What is started meanwhile finds in its environment where to import from, and what."""
    loaded = list(sys.modules.items())
    names = [name for name, module in loaded if TESTS in Path(getattr(module, "__file__", None) or "/").parents]
    os.environ[GIVEN] = json.dumps({"path": sys.path, "names": [name for name in names if name not in _OF_PYTEST]})
    try:
        yield
    finally:
        del os.environ[GIVEN]


_OF_PYTEST = ("conftest", "rank_pool", __name__)

if given := os.environ.pop(GIVEN, None):
    given = json.loads(given)
    sys.path[:] = given["path"]
    for name in given["names"]:
        # One that cannot be imported here, a rank imports when it needs it, and says why it cannot.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    from iris.compat.interpreter import InterpretedFunction
    from iris.simulator.kernels import rewritten

    for each in gc.get_objects():
        if issubclass(type(each), InterpretedFunction):
            with contextlib.suppress(Exception):
                rewritten(each)
