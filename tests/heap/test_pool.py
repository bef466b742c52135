"""Memory that is handed out in the order of streams, here by streams that write down what waits for what."""

import pytest
import torch

from iris.heap.mapping import create
from iris.heap.pool import Pool, is_handed_out
from iris.world import Group

ROOM, KIB = 64 << 10, 1 << 10


class Stream:
    """The part of `torch.cuda.Stream` that a pool uses: its events say of which stream they are, and never happen.

    A capture is ``"under way"``, or ``"about to begin"``: before the next event that is recorded. None: there is none.
    """

    def __init__(self, name):
        self.name, self.waits, self.capture = name, [], None
        self.cuda_stream = name

    def record_event(self):
        if self.capture is not None:
            self.capture = "under way"
        return Event(self.name, self.capture is not None)

    def wait_event(self, event):
        assert not event.captured, f"stream {self.name} joins the capture on stream {event.of}"
        self.waits.append(event.of)


class Event:
    def __init__(self, of, captured):
        self.of, self.captured = of, captured

    def query(self):
        assert not self.captured, f"the capture on stream {self.of} becomes invalid"
        return False


@pytest.fixture
def pool(monkeypatch):
    """On stream `pool.stream`."""
    pool = Pool(torch.device("cpu"))
    pool.stream, pool.other, pool.third = map(Stream, ("first", "other", "third"))
    pool._streams = {stream.cuda_stream: stream for stream in (pool.stream, pool.other, pool.third)}
    monkeypatch.setattr(pool, "_current", lambda: pool.stream.cuda_stream)
    monkeypatch.setattr(
        "iris.cuda_graphs.capture.is_capturing", lambda handle: pool._streams[handle].capture == "under way"
    )
    pool.add(create(Group(None), ROOM, torch.device("cpu")))
    return pool


def bytes_of(pool, size):
    return pool.empty(size, torch.uint8)


def test_a_stream_has_what_it_gave_back_at_once(pool):
    first = bytes_of(pool, 5 * KIB)
    place, view = first.data_ptr(), first[7:]
    del first
    second = bytes_of(pool, 5 * KIB)
    assert second.data_ptr() != place and is_handed_out(view)  # which a view keeps
    del view
    third = bytes_of(pool, 5 * KIB - 3)
    assert third.data_ptr() == place and third.shape == (5 * KIB - 3,) and not pool.stream.waits


def test_others_get_it_when_nothing_else_is_left_and_wait(pool):
    taken = [bytes_of(pool, ROOM // 4) for _ in range(3)]
    places = [each.data_ptr() for each in taken]
    taken.clear()
    pool.stream = pool.other
    fresh = bytes_of(pool, ROOM // 4)
    assert fresh.data_ptr() not in places and not pool.other.waits
    # Neighbours have joined: half of the memory is in one piece.
    half = bytes_of(pool, ROOM // 2)
    assert half.data_ptr() in places and pool.other.waits == ["first"]


def test_further_streams_hold_it_back(pool):
    tensor = bytes_of(pool, KIB)
    place = tensor.data_ptr()
    for stream in (pool.other, pool.other, pool.stream):
        pool.record_stream(tensor[1:], stream)
    del tensor
    assert bytes_of(pool, KIB).data_ptr() == place and pool.stream.waits == ["other"]
    # Once: what the next one has comes after that.
    assert bytes_of(pool, KIB).data_ptr() == place and pool.stream.waits == ["other"]
    elsewhere = torch.empty(4)
    pool.record_stream(elsewhere, pool.other)
    assert not is_handed_out(elsewhere)


def test_without_room_memory_is_torchs_and_is_lacking(pool):
    assert pool.lacking(ROOM, torch.uint8) == 0
    assert pool.lacking(ROOM, torch.float32) == 3 * ROOM
    most = [bytes_of(pool, ROOM // 2) for _ in range(3)]
    assert is_handed_out(most[2]) and most[2].numel() == ROOM // 2
    assert pool.lacking(1, torch.uint8) == ROOM // 2 + KIB
    del most[0]
    # What is lacking is what was in use together, and not what is in use now.
    assert pool.lacking(1, torch.uint8) == ROOM // 2 + KIB
    pool.add(create(Group(None), ROOM, torch.device("cpu")))
    assert pool.size == 2 * ROOM and pool.lacking(1, torch.uint8) == 0
    # Enough in all, and no room in one piece.
    wide = bytes_of(pool, ROOM)
    wider = bytes_of(pool, ROOM - KIB)
    assert pool.lacking(1, torch.uint8) >= ROOM - KIB
    assert wide.numel() + wider.numel() == 2 * ROOM - KIB


def test_a_program_that_repeats_itself_waits_for_no_stream(pool):
    streams = pool.stream, pool.other

    def step():
        """On each stream sizes one after the other, of which each could have the memory of the one before."""
        held = []
        for pool.stream in streams:
            for size in (ROOM // 2, ROOM // 4):
                tensor = bytes_of(pool, size)
                del tensor
            held += [bytes_of(pool, ROOM // 4) for _ in range(2)]

    step()
    step()
    assert streams[0].waits and streams[1].waits
    pool.add(create(Group(None), pool.lacking(ROOM // 4, torch.uint8), torch.device("cpu")))
    step()
    for stream in streams:
        stream.waits.clear()
    step()
    assert pool.size == 2 * ROOM and not streams[0].waits and not streams[1].waits


def test_room_in_pieces_that_are_too_small_is_lacking(pool):
    pool.add(create(Group(None), ROOM, torch.device("cpu")))
    for size in (ROOM // 2, ROOM // 4):
        bytes_of(pool, size)
    held = [bytes_of(pool, size) for size in (3 * ROOM // 4, ROOM // 2)]
    assert pool.lacking(ROOM // 2, torch.uint8) == 0
    held.append(bytes_of(pool, ROOM // 2))  # of two quarters, of which one had been in use
    assert all(block.region for block in pool._blocks.values())
    assert pool.lacking(ROOM // 4, torch.uint8) == ROOM // 2


def test_sizes_that_never_come_again_take_twice_their_room_at_most(pool):
    for size in range(KIB, ROOM, KIB):
        bytes_of(pool, size)
    assert pool.lacking(ROOM, torch.uint8) == ROOM


def test_memory_of_graphs_stays_with_them(pool, monkeypatch):
    tensor = bytes_of(pool, KIB)
    place = tensor.data_ptr()
    capturing = True
    monkeypatch.setattr(pool, "_capturing", lambda: capturing)
    captured = bytes_of(pool, KIB)
    assert is_handed_out(captured) and captured.data_ptr() != place
    used = pool.empty(0, torch.uint8)
    pool.record_stream(captured, pool.other)  # which is torch's to know
    del captured, used, tensor  # the last one does not know of the capture
    capturing = False
    kept = bytes_of(pool, KIB)
    assert kept.data_ptr() == place
    capturing = True
    kept = None  # in a capture that may use it
    capturing = False
    assert bytes_of(pool, KIB).data_ptr() != place


@pytest.mark.parametrize("capture", ["under way", "about to begin"])
def test_what_a_captured_stream_used_waits_for_the_end_of_the_capture(pool, capture):
    tensor = bytes_of(pool, KIB)
    place = tensor.data_ptr()
    for stream in (pool.other, pool.third):
        pool.record_stream(tensor, stream)
    del tensor
    pool.other.capture = capture
    meanwhile = [bytes_of(pool, KIB) for _ in range(3)]
    assert place not in [each.data_ptr() for each in meanwhile] and not pool.stream.waits
    pool.other.capture = None
    assert bytes_of(pool, KIB).data_ptr() == place and pool.stream.waits == ["third", "other"]


@pytest.mark.parametrize("capture", ["under way", "about to begin"])
def test_a_captured_stream_gives_nothing_back_before_the_end_of_the_capture(pool, capture):
    streams, places = (pool.other, pool.third), {}
    taker = pool.stream
    for pool.stream in streams:
        taken = [bytes_of(pool, ROOM // 4) for _ in range(2)]
        places[pool.stream.name] = [each.data_ptr() for each in taken]
        taken.clear()
    pool.stream, pool.other.capture = taker, capture
    first, second = bytes_of(pool, ROOM // 2), bytes_of(pool, ROOM // 2)
    assert first.data_ptr() in places["third"] and pool.place_of(second) is None and set(taker.waits) == {"third"}
    pool.other.capture = None
    assert bytes_of(pool, ROOM // 2).data_ptr() in places["other"] and taker.waits[-1] == "other"


def test_names_say_what_is_there(pool):
    tensor = bytes_of(pool, KIB)
    mapping = pool._regions[0].mapping
    offset = tensor.data_ptr() - mapping.bases[0]
    assert mapping.owner().describe_offset(offset + 5) == "uint8[1024] of a process group's memory, byte 5"
    assert "where no tensor is" in mapping.owner().describe_offset(ROOM - 1)
