"""Whose rank a command is: torchrun's, if it has started the command as one, or nobody's.

A rank may run a command, and the command inherits the rank's environment. As that rank it would wait for ranks that are
busy with something else. So it forgets the rank, and starts ranks of its own.
"""

import contextlib
import os
from pathlib import Path

from iris.log import logger

# What torchrun tells a rank, besides all that begins with TORCHELASTIC_.
_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


def forget_callers_rank() -> None:
    """For a command that may be a rank of any launcher: forget the rank if a rank of torchrun has started this one.

    The agent of torchrun, which starts ranks, does not have their variables; a rank has them.
    """
    if "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        mine = {f"{name}={os.environ.get(name)}".encode() for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "RANK")}
        with contextlib.suppress(OSError):  # another user's
            if mine <= set(Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")):
                _forget()


def forget_other_launchers() -> None:
    """For a command whose ranks must find each other's files, which they do under torchrun alone."""
    if "RANK" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        _forget()


def _forget() -> None:
    logger.warning("The environment is that of rank %s. This command has ranks of its own.", os.environ["RANK"])
    for name in [name for name in os.environ if name in _OF_A_RANK or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
