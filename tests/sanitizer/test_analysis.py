"""The order in which notes are gone through: nobody acquires what has not been released yet."""

import numpy as np

from iris.simulator.sanitizer.analysis import Analysis
from iris.simulator.sanitizer.events import READ, WRITE, Accessed, Known, Launched, Met, Place, Spans, Synchronised

DATA = Spans(("heap", 2), np.array([64]), np.array([128]))
FLAG = Spans(("heap", 2), np.array([0]), np.array([4]))


def begin(kernel):
    return [Known(0, Place(kernel, "program.py", 1, kernel)), Launched(1)]


def store_and_signal(number):
    flag = Synchronised(number, 1, 1, 0, FLAG, WRITE, releases=True, acquires=False, scope="sys")
    return [Accessed(1, 1, 0, DATA, WRITE), flag]


def wait_and_load(number):
    flag = Synchronised(number, 1, 1, 0, FLAG, READ, releases=False, acquires=True, scope="sys")
    return [flag, Accessed(1, 1, 0, DATA, READ)]


def test_ranks_that_come_from_a_meeting_of_some_may_release_before_others_acquire():
    meeting = Met(("some", 0), (0, 1))
    notes = {
        0: [meeting, *begin("send"), *store_and_signal(1)],
        1: [meeting],
        2: [*begin("receive"), *wait_and_load(2)],
    }
    assert Analysis(notes).run() == []


def test_a_wait_that_ended_before_the_signal_orders_nothing():
    notes = {0: [*begin("send"), *store_and_signal(2)], 1: [], 2: [*begin("receive"), *wait_and_load(1)]}
    (finding,) = Analysis(notes).run()
    assert finding.kind == "race"


def test_what_lies_behind_a_meeting_that_never_was_is_gone_through():
    meeting = Met(("both", 0), (0, 1))
    notes = {0: [meeting, *begin("send"), *store_and_signal(2)], 1: [], 2: [*begin("receive"), *wait_and_load(1)]}
    (finding,) = Analysis(notes).run()
    assert finding.kind == "race"
