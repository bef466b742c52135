"""Pictures of many rows: whose a row is can be read."""

from itertools import pairwise

import pytest
from covering import thorough

from iris.tracing import picture
from iris.tracing.host_clocks import HostClock
from iris.tracing.timeline import RAIL, Event, Timeline
from iris.world.rail import Transfer

pyplot = pytest.importorskip("matplotlib.pyplot", reason="pictures need matplotlib")


def event(rank, program, began, transfer=None):
    form, sent = ("rail", sum(transfer.sent)) if transfer else ("named", 0)
    name = transfer.kind if transfer else "compute"
    return Event(
        rank, program, 1, name, form, began, began + 9, None, None, "", "", sent, 0, 0, 0, 0, 0, False, transfer
    )


def timeline(hosts, each, programs):
    """Each rank sends two messages to those of other hosts with its local rank, and computes in so many programs."""
    size, events = hosts * each, []
    for rank in range(size):
        others = tuple(other for other in range(rank % each, size, each) if other != rank)
        for turn in range(2 * (hosts > 1)):
            nbytes = tuple(1000 * (turn + other) for other in others)
            events.append(event(rank, RAIL, 20 * turn, Transfer("all_to_all_v", "", "", others, nbytes, (), ())))
        events += [event(rank, program, 5 + program) for program in range(programs)]
    clocks = {rank: HostClock(f"{rank // each}", f"h{rank // each}") for rank in range(size)} if hosts > 1 else {}
    return Timeline(events, [], dict.fromkeys(range(size), "cpu"), {}, {}, clocks)


def labels_of(shown, folder, monkeypatch):
    """From above, each with where it begins and ends."""
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    picture.draw(shown, folder / "t.png")
    monkeypatch.undo()
    (figure,) = figures
    found = [(label.get_window_extent(), label.get_text()) for label in figure.axes[0].get_yticklabels()]
    pyplot.close(figure)
    return [(text, place.y0, place.y1) for place, text in sorted(found, key=lambda each: -each[0].y0)]


SIZES = [(1, 2, 3), thorough(2, 2, 2), thorough(2, 8, 4), (3, 8, 30), thorough(8, 8, 1), thorough(16, 8, 2)]


@pytest.mark.parametrize(("hosts", "each", "programs"), SIZES)
def test_labels_leave_each_other_room(hosts, each, programs, tmp_path, monkeypatch):
    labels = labels_of(timeline(hosts, each, programs), tmp_path, monkeypatch)
    assert labels[0][0].startswith("rank 0") and len(labels) >= min(hosts * each, 32)
    for (_, begin, _), (_, _, end) in pairwise(labels):
        assert end <= begin + 1


def test_labels_say_how_many_programs_are_shown(tmp_path, monkeypatch):
    each = [[text for text, *_ in labels_of(timeline(1, 2, n), tmp_path, monkeypatch)] for n in (1, 12, 30)]
    assert each == [
        ["rank 0, program 0", "rank 1, program 0"],
        ["rank 0, 12 programs", "rank 1, 12 programs"],
        ["rank 0, 15 of 30 programs", "rank 1, 15 of 30 programs"],
    ]


def test_labels_say_what_a_rail_has_sent(tmp_path, monkeypatch):
    few = [text for text, *_ in labels_of(timeline(2, 2, 1), tmp_path, monkeypatch)]
    assert few[:3] == ["rank 0 on h0, rail: 5 kB to 2", "rank 0 on h0, program 0", "rank 1 on h0, rail: 7 kB to 3"]
    some = [text for text, *_ in labels_of(timeline(3, 1, 1), tmp_path, monkeypatch)]
    assert some[0] == "rank 0 on h0, rail: 3 kB to 1, 5 kB to 2"
    many = [text for text, *_ in labels_of(timeline(5, 1, 1), tmp_path, monkeypatch)]
    assert many[0] == "rank 0 on h0, rail: 24 kB to 4 ranks"
