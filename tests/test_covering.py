"""What `make test` leaves of all combinations of a test's parameters: every value is in it."""

import itertools
from types import SimpleNamespace

import conftest
import pytest
from covering import EVERYTHING, covering, sample

AXES = ["triton", "gluon"], [1, 2, 3], [False, True], ["load", "store", "get", "put"]


@pytest.mark.parametrize("together", [1, 2, 3])
def test_any_so_many_values_meet_in_a_sample(together):
    def met(cases):
        return {
            tuple((axis, case[axis]) for axis in axes)
            for case in cases
            for axes in itertools.combinations(range(len(AXES)), together)
        }

    everything = list(itertools.product(*AXES))
    found = sample(*AXES, together=together)
    assert met(found) == met(everything) and len(found) < len(everything)
    assert found == sample(*AXES, together=together), "the same each time"


def test_what_does_not_exist_is_replaced_by_what_does():
    def exists(language, count, flag, operation):
        return language == "triton" or operation == "put"

    found = covering(*AXES, where=exists)
    assert all(exists(*case) for case in found)
    assert all({case[axis] for case in found} == set(values) for axis, values in enumerate(AXES))
    assert not EVERYTHING or found == [case for case in itertools.product(*AXES) if exists(*case)]


class Item:
    """A test case as pytest has it. ``marks``: the names that each `parametrize` gives."""

    path, originalname = "test_file.py", "test"

    def __init__(self, marks, thorough=False, **params):
        self.marks, self.thorough, self.callspec = marks, thorough, SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        assert name == "thorough"
        return self.thorough or None

    def iter_markers(self, name):
        return [SimpleNamespace(args=(names,)) for names in self.marks]


def deselected(items, monkeypatch, everything=False):
    """What is left out of these, which are those that run then."""
    monkeypatch.setattr(conftest, "SAMPLED", not everything)
    left = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    conftest.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)
    return left


@pytest.mark.parametrize("everything", [False, True])
def test_what_is_thorough_runs_where_everything_does(everything, monkeypatch):
    """Otherwise it counts as deselected, and not as skipped."""
    items = [Item(["name"], thorough, name=name) for name, thorough in (("quick", False), ("slow", True))]
    left = deselected(items, monkeypatch, everything)
    assert [each.callspec.params["name"] for each in left] == ([] if everything else ["slow"])
    assert [each.callspec.params["name"] for each in items] == (["quick", "slow"] if everything else ["quick"])


@pytest.mark.parametrize(
    ("marks", "wanted"),
    [(["name", "hopper"], 3), (["name, hopper"], 6), ([("name", "hopper")], 6)],
    ids=["apart", "together", "together as a tuple"],
)
def test_parameters_that_are_given_together_are_one(marks, wanted, monkeypatch):
    """Numbers of ranks are a parameter, too."""
    cases = itertools.product([2, 3], ["first", "second", "third"], [False, True])
    items = [Item(marks, ranks=ranks, name=name, hopper=hopper) for ranks, name, hopper in cases]
    left = deselected(items, monkeypatch)
    assert len(items) == wanted and len(items) + len(left) == 12
    given = [each.callspec.params for each in items]
    assert {each["ranks"] for each in given} == {2, 3} and {each["hopper"] for each in given} == {False, True}
    assert {each["name"] for each in given} == {"first", "second", "third"}
