"""Which combinations of a test's parameters run: every one with IRIS_TEST_ALL=1, otherwise a fixed sample of them.

But for tests that play all of theirs on each number of ranks: a mistake shows with one value, or where two meet, and
rarely where three do, and all combinations of seven parameters take hours there.
"""

import heapq
import itertools
import os

EVERYTHING = os.environ.get("IRIS_TEST_ALL") == "1"
RANKS = (1, 2, 3, 4, 5, 8)


def covering(*axes, ranks=None):
    """Combinations of the axes' values: all with IRIS_TEST_ALL=1, otherwise a `sample`.

    ``ranks``: the fixture, of a test that runs with all `RANKS` then, and plays these by itself. Their number is one
    more axis of a sample in which any three values meet, and these are the combinations for the number here.
    """
    if not EVERYTHING:
        return sample(*axes)
    if ranks is None:
        return list(itertools.product(*axes))
    numbers = sorted({*RANKS, ranks.num_ranks})  # under torchrun there may be any number
    return [case for number, *case in sample(numbers, *axes, together=3) if number == ranks.num_ranks]


def sample(*axes, together=2):
    """A fixed sample of combinations in which any so many values of different axes meet."""
    combinations = list(itertools.product(*axes))
    positions = list(itertools.combinations(range(len(axes)), min(together, len(axes))))
    shown = [{tuple((i, combination[i]) for i in at) for at in positions} for combination in combinations]
    unseen = set().union(*shown)
    # Greedy: take the combination that shows most of what has not been seen, the first of them. Close to the product of
    # the largest two axes (or three), which no such sample can go below. What one shows only gets less, so of those
    # whose numbers are out of date only those are looked at again that might be first.
    queue = [(-len(each), number) for number, each in enumerate(shown)]
    heapq.heapify(queue)
    sample = []
    while unseen:
        counted, number = queue[0]
        new = -len(shown[number] & unseen)
        heapq.heapreplace(queue, (new, number))
        if new == counted:
            sample.append(combinations[number])
            unseen -= shown[number]
    return sample
