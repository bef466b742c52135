"""Files of other nodes' ranks come to rank 0 through a store, whole; and nobody waits for a command that is gone."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from conftest import UNDER_TORCHRUN

from iris.tracing import between_nodes
from iris.tracing.between_nodes import FileExchange

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="has a store of its own")


@pytest.fixture
def connect():
    """Connects to a store, once more each time."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    return lambda: dist.TCPStore(
        "127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(between_nodes, "PART", 7)
    monkeypatch.setattr(between_nodes, "BEAT_S", 0.05)


def send(connect, rank, files, failed=False):
    """As the command of another node; returns its thread."""

    def run():
        with FileExchange(connect(), rank) as exchange:
            exchange.send(files, failed)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def files_of(folder, rank):
    """Of two contexts, and of no bytes, less than a part, parts, and more."""
    found = {}
    for number, size in enumerate((0, 5, 14, 40)):
        found[f"rank{rank}.{number}.npz"] = bytes((13 * rank + 7 * number + i) % 256 for i in range(size))
        (folder / f"rank{rank}.{number}.npz").write_bytes(found[f"rank{rank}.{number}.npz"])
    return found


def test_all_files_of_all_ranks_arrive(connect, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    expected, threads = {}, []
    for rank in (2, 3):
        expected |= files_of(tmp_path / "there", rank)
        threads.append(send(connect, rank, sorted((tmp_path / "there").glob(f"rank{rank}.*")), failed=rank == 3))
    time.sleep(0.1)  # the program of rank 0 takes longer
    with FileExchange(connect(), 0) as exchange:
        exchange.take([2, 3], tmp_path / "here", failed=False)
    for thread in threads:
        thread.join()
    assert {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()} == expected
    store = connect()
    assert not any(store.check([f"{rank}/{what}"]) for rank in (2, 3) for what in ("files", "part/0", "part/1"))


def test_of_a_rank_that_is_gone_there_is_what_has_come_whole(connect, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "rank1.0.npz").write_bytes(b"whole")
    (tmp_path / "rank1.1.npz").write_bytes(b"will not be read to its end")
    monkeypatch.setattr(between_nodes, "_parts", lambda _: iter([b"whole", b"will no"]))
    thread = send(connect, 1, [tmp_path / "rank1.0.npz", tmp_path / "rank1.1.npz"])
    with FileExchange(connect(), 0) as exchange:
        exchange.take([1], tmp_path / "here", failed=False)
    thread.join()
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "here").iterdir()] == [("rank1.0.npz", b"whole")]


def test_nobody_waits_for_a_command_that_never_came_or_shows_nothing_any_more(connect, tmp_path, monkeypatch):
    monkeypatch.setattr(between_nodes, "SILENCE_S", 0.3)
    (tmp_path / "rank1.0.npz").write_bytes(b"some")
    begin = time.monotonic()
    with FileExchange(connect(), 0) as exchange:
        exchange.take([1], tmp_path, failed=False)
    send(connect, 2, [tmp_path / "rank1.0.npz"]).join()  # rank 0 has left
    connect().set("0/beat", "runs 7")
    send(connect, 3, [tmp_path / "rank1.0.npz"]).join()  # it was killed
    assert 0.6 < time.monotonic() - begin < 20


def test_whoever_has_failed_does_not_wait_for_the_program_of_rank_0(connect, tmp_path, monkeypatch):
    """torchrun ends that when it knows."""
    monkeypatch.setattr(between_nodes, "FAILED_S", 0.2)
    (tmp_path / "rank1.0.npz").write_bytes(b"some")
    with FileExchange(connect(), 0):
        well = send(connect, 2, [tmp_path / "rank1.0.npz"])
        send(connect, 1, [tmp_path / "rank1.0.npz"], failed=True).join()
        send(connect, 3, [], failed=True).join()  # which has recorded nothing
        assert well.is_alive()
    well.join()


def test_where_it_has_failed_rank_0_does_not_wait_for_programs_that_still_run(connect, tmp_path, monkeypatch):
    """And whoever has failed does not wait for ever until rank 0 has the files of such."""
    monkeypatch.setattr(between_nodes, "FAILED_S", 0.2)
    monkeypatch.setattr(between_nodes, "TAKEN_S", 0.2)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "rank2.0.npz").write_bytes(b"some")
    with FileExchange(connect(), 1):  # its program runs
        with FileExchange(connect(), 0) as exchange:
            exchange.take([1], tmp_path, failed=True)
        with FileExchange(connect(), 0) as exchange:
            sender = send(connect, 2, [tmp_path / "there" / "rank2.0.npz"], failed=True)
            taker = threading.Thread(target=exchange.take, args=([2, 1], tmp_path, False))
            taker.start()
            sender.join()
            assert taker.is_alive() and (tmp_path / "rank2.0.npz").read_bytes() == b"some"
    taker.join()
