"""The process from which ranks are forked: a copy of pytest's own, with all that the tests have imported.

A new process would import it again: torch, Triton, the library and the modules of tests take seconds. The copy also
rewrites the kernels that the simulator will run, once for all ranks. It is made before any test runs, and so has
nothing of a test in it.
"""

import contextlib
import faulthandler
import gc
import os
import resource
import sys
import threading
import traceback
from multiprocessing import forkserver, util
from unittest import mock


def start() -> None:
    """From now on `multiprocessing` forks processes of its context "forkserver" from such a copy."""
    # It would start a Python that runs a command.
    with mock.patch.object(util, "spawnv_passfds", _run_in_copy):
        forkserver.ensure_running()


def _run_in_copy(executable, arguments, files) -> int:
    """Run the command, the last of the arguments, in a copy of this process. Returns the number of its process."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    process = os.fork()
    if process:
        return process
    try:
        _leave_pytest(files)
        import torch.distributed.tensor  # noqa: F401, which torch.testing imports at its first use

        _rewrite_kernels()
        exec(arguments[-1], {})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # nothing that pytest does at its end


def _leave_pytest(files) -> None:
    """Of its files only these stay open; what is printed, and errors that nobody catches, go where Python's go."""
    faulthandler.disable()
    begin = 3
    for file in sorted(map(int, files)):
        os.closerange(begin, file)
        begin = file + 1
    os.closerange(begin, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sys.stdout, sys.stderr = (open(file, "w", buffering=1, closefd=False) for file in (1, 2))
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__


def _rewrite_kernels() -> None:
    from iris.compat.interpreter import InterpretedFunction
    from iris.simulator.kernels import rewritten

    gc.unfreeze()  # what is frozen is not among the objects
    for each in gc.get_objects():
        if issubclass(type(each), InterpretedFunction):
            with contextlib.suppress(Exception):  # a rank that launches it says why
                rewritten(each)
    gc.freeze()
