"""Whose memory an address is in, while memory comes and goes."""

import numpy as np
import pytest
import torch

from iris.heap import host, mapping
from iris.sanitizer.events import PRIVATE
from iris.sanitizer.spaces import Spaces
from iris.world import Group

SIZE = 1 << 16


def create(size=SIZE):
    return mapping.create(Group(None), size, torch.device("cpu"))


@pytest.fixture
def space_at():
    """The space that an address is in, and the offset there."""
    spaces = Spaces(rank=3)

    def look(address):
        (spans,) = spaces.spans(np.array([address]), size=4)
        assert spans.ends - spans.begins == [4]
        return spans.space, int(spans.begins[0])

    return look


def test_closed_memory_is_shared_until_its_last_tensor_is_gone(space_at):
    shared = create()
    address = shared.bases[0] + 40
    tail = shared.buffer[8:]
    assert space_at(address) == ((shared.name, 0), 40)
    shared.close()
    create()
    assert space_at(address) == ((shared.name, 0), 40)
    del tail
    assert space_at(address) == ((PRIVATE, 3), address)


def test_new_memory_may_lie_where_other_memory_was(monkeypatch, space_at):
    """Also where the older one's object is still held, as a workspace's is while a larger one takes its place."""
    begins = iter([5 * SIZE, 4 * SIZE])
    monkeypatch.setattr(host, "share", lambda *_: ([next(begins)], None))
    older = create()
    assert space_at(5 * SIZE) == ((older.name, 0), 0)
    older.close()
    newer = create(2 * SIZE)
    assert space_at(4 * SIZE) == ((newer.name, 0), 0)
    assert space_at(5 * SIZE + 8) == ((newer.name, 0), SIZE + 8)
    assert space_at(6 * SIZE) == ((PRIVATE, 3), 6 * SIZE)
