"""Explains a barrier that timed out: who is late, and whether ranks launch different grids or count differently.

It reads the flags of one rank, int32 or int64 ``[programs, num_ranks]``: ``flags[p, r]`` is the last epoch in which
program p of rank r arrived (`iris.language.barrier`). Ranks that call the same barriers are never more than one epoch
apart, as no rank passes a barrier that another has not reached.
"""

from collections.abc import Sequence

import numpy as np

from iris.errors import names


def explain(
    flags: np.ndarray, program: int, epoch: int, own: int | None, arrived: Sequence[int], ranks: Sequence[int]
) -> str:
    """Who has arrived, who has not, and the likely reason, in sentences.

    Parameters
    ----------
    flags
        This rank's flags, as above, read after the wait was given up. One row, if only that of ``program`` is known.
    program
        The row of the program that gave up first.
    epoch
        What it waited for.
    own
        The column of this rank; None if its flag is not kept there.
    arrived
        The columns of the ranks that had arrived when it gave up; of those that it had yet to wait for, by now.
    ranks
        The global ranks, by column.
    """
    # After a wait that was given up, this program and its peers go on to their next barriers. This rank's own column
    # says how many epochs past `epoch` that was, for each of its programs. Differences wrap, as epochs do.
    wanted = np.full(len(flags), epoch, flags.dtype)
    beyond = 0
    if own is not None:
        overshoot = flags[program, own] - wanted
        wanted, beyond = flags[:, own] - overshoot, max(0, int(overshoot[0]))
    # By how many epochs each flag is ahead of the one waited for.
    lead = flags - wanted[:, None]
    sentences = []
    if len(arrived):
        sentences.append(f"{_are([ranks[column] for column in arrived])} arrived.")
    for column, rank in enumerate(ranks):
        now, ahead = flags[program, column], lead[program, column]
        if column in arrived:
            if ahead > beyond + 1:
                sentences.append(f"Rank {rank} is at epoch {now}, {ahead} ahead. {_DIFFERENT_EPOCHS}")
        elif ahead >= 0:
            sentences.append(f"Rank {rank} had not arrived, and has come since.")
        elif (lead[:, column] >= 0).any():
            sentences.append(_partly(rank, lead[:, column] >= 0))
        elif ahead < -1:
            sentences.append(f"Rank {rank} is at epoch {now}, {-ahead} behind. {_DIFFERENT_EPOCHS}")
        else:
            never = " (it never was in this barrier)" if now == 0 else ", the one before"
            sentences.append(f"Rank {rank} has not arrived: it is at epoch {now}{never}.")
    return " ".join(sentences)


_DIFFERENT_EPOCHS = (
    "So the ranks count differently: they give other `epoch=`, share these flags with another barrier, or one has "
    "passed a barrier whose wait was given up."
)


def _are(ranks: Sequence[int]) -> str:
    text = names(ranks)
    return f"{text[0].upper()}{text[1:]} {'has' if len(ranks) == 1 else 'have'}"


def _partly(rank: int, there: np.ndarray) -> str:
    """The sentence for a rank of which some programs have arrived and others have not."""
    count, programs = int(there.sum()), len(there)
    if not there[:count].all():
        missing = np.flatnonzero(~there).tolist()
        return f"Rank {rank} has arrived with other programs, of {programs}, than {missing}."
    which = "program 0" if count == 1 else f"programs 0 to {count - 1}"
    return (
        f"Rank {rank} has arrived with {which} only, and this rank launched {programs}: the ranks have launched "
        f"different grids, or rank {rank} has no room for all of its programs at once."
    )
