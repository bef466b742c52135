"""Which combinations of a test's parameters run: every one with IRIS_TEST_ALL=1, otherwise a fixed sample of them."""

import itertools
import os

EVERYTHING = os.environ.get("IRIS_TEST_ALL") == "1"


def covering(*axes):
    """Combinations of the axes' values: all with IRIS_TEST_ALL=1, otherwise a `sample`."""
    return list(itertools.product(*axes)) if EVERYTHING else sample(*axes)


def sample(*axes):
    """A fixed sample of combinations in which every two values of any two axes meet."""
    everything = list(itertools.product(*axes))
    # Greedy: take the combination that shows most pairs not yet seen. Deterministic, and close to the largest two axes'
    # product, which no pairwise sample can go below.
    positions = list(itertools.combinations(range(len(axes)), 2)) or [(0, 0)]

    def pairs(combination):
        return {(i, j, combination[i], combination[j]) for i, j in positions}

    unseen = set().union(*map(pairs, everything))
    sample = []
    while unseen:
        best = max(everything, key=lambda combination: len(pairs(combination) & unseen))
        sample.append(best)
        unseen -= pairs(best)
    return sample
