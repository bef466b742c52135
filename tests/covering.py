"""Which combinations of a test's parameters run: every one with IRIS_TEST_ALL=1, otherwise a fixed sample of them.

The sample of `make test` has every value, but of the numbers of ranks those up to four. It leaves out what is marked
`thorough`: `conftest.pytest_collection_modifyitems`. On GPUs, where tests take less time, any two values meet in it: a
mistake shows with one value, or where two meet, and rarely where three do.

Tests that play all of theirs on each number of ranks have samples with IRIS_TEST_ALL=1 too, with any two or three: all
combinations of seven parameters take hours there.
"""

import heapq
import itertools
import os

import pytest

EVERYTHING = os.environ.get("IRIS_TEST_ALL") == "1"
UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID" in os.environ
# Whether tests have the sample of `make test`, which is for the CPU.
SAMPLED = not (EVERYTHING or UNDER_TORCHRUN)
# Values that meet in a sample.
TOGETHER = 1 if SAMPLED else 2
RANKS = (1, 2, 3, 4, 5, 8)


def thorough(*values, **more):
    """A case of `pytest.mark.parametrize` that the sample leaves to ``IRIS_TEST_ALL=1`` and to GPUs."""
    return pytest.param(*values, marks=pytest.mark.thorough, **more)


def covering(*axes, ranks=None, where=None):
    """Combinations of the axes' values: all with IRIS_TEST_ALL=1, otherwise a `sample`.

    ``ranks``: the fixture, of a test that runs with all `RANKS` then, and plays these by itself. Their number is one
    more axis of a sample in which any three values meet, and these are the combinations for the number here.

    ``where``: called with a combination, says whether it exists.
    """
    if not EVERYTHING:
        return sample(*axes, where=where)
    if ranks is None:
        return [case for case in itertools.product(*axes) if where is None or where(*case)]
    assert where is None
    numbers = sorted({*RANKS, ranks.num_ranks})  # under torchrun there may be any number
    return [case for number, *case in sample(numbers, *axes, together=3) if number == ranks.num_ranks]


def sample(*axes, together=TOGETHER, where=None):
    """A fixed sample of combinations in which any so many values of different axes meet."""
    combinations = [case for case in itertools.product(*axes) if where is None or where(*case)]
    positions = list(itertools.combinations(range(len(axes)), min(together, len(axes))))
    # Every rank of a pool that imports a test comes by here: of single values there is a short way.
    single = together == 1
    shown = [
        set(enumerate(combination)) if single else {tuple((i, combination[i]) for i in at) for at in positions}
        for combination in combinations
    ]
    return [combinations[number] for number in few_that_show_all(shown)]


def few_that_show_all(shown):
    """The numbers of some of these sets, which together have the elements of all: a fixed choice."""
    unseen = set().union(*shown)
    # Greedy: take the set that shows most of what has not been seen, the first of them. Close to the product of the
    # largest two axes (or three), which no such sample can go below. What one shows only gets less, so of those whose
    # numbers are out of date only those are looked at again that might be first.
    queue = [(-len(each), number) for number, each in enumerate(shown)]
    heapq.heapify(queue)
    chosen = []
    while unseen:
        counted, number = queue[0]
        new = -len(shown[number] & unseen)
        heapq.heapreplace(queue, (new, number))
        if new == counted:
            chosen.append(number)
            unseen -= shown[number]
    return chosen
