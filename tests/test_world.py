"""Who takes part, and how their hosts meet."""

import os
import pickle
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from iris.errors import (
    GroupAbortedError,
    InvalidGroupError,
    InvalidMessageError,
    IrisTimeoutError,
    NoGpuForRankError,
    NoPeerAccessError,
    PeerFailedError,
    PeerLostError,
    SharedDeviceError,
)
from iris.world import Group, Placement, bootstrap, hosts, placement, strangers, wire
from iris.world.store import tcp_store


def everyone():
    return Group(dist.group.WORLD)


def gather_in_rounds(ctx):
    group, other = everyone(), everyone()
    store = distributed_c10d._get_process_group_store(dist.group.WORLD)
    keys = []
    for turn in range(20):
        value = {"rank": group.rank, "turn": turn, "text": "x" * turn}
        expected = [{"rank": rank, "turn": turn, "text": "x" * turn} for rank in range(group.size)]
        assert group.all_gather(value, "a round") == expected
        assert other.all_gather((group.rank, -turn), "a round") == [(rank, -turn) for rank in range(group.size)]
        keys.append(store.num_keys())
    return keys


@pytest.mark.ranks(1, 2, 4)
def test_every_member_gets_every_members_value(ranks):
    for keys in ranks.run(gather_in_rounds):
        # Values that all have read are removed; at most two rounds of each group remain, on each rank.
        assert max(keys[5:]) <= keys[0] + 4 * ranks.num_ranks


def gather_among_some(ctx):
    """Sub-groups meet by themselves: members only, any number of times, and other members meanwhile."""
    halves = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = halves[dist.get_rank() % 2]
    if dist.get_rank() == 1:
        group = Group(mine)
        assert group.all_gather("alone", "a test") == ["alone"]
    else:
        group = Group(mine)
        for turn in range(1 + 2):
            assert group.all_gather(10 * group.rank + turn, "a test") == [turn, 10 + turn]
    return group.rank, group.size, group.ranks


@pytest.mark.ranks(3, exactly=True)
def test_a_group_needs_its_members_only(ranks):
    assert ranks.run(gather_among_some) == [(0, 2, (0, 2)), (0, 1, (1,)), (1, 2, (0, 2))]


def use_what_is_no_group(ctx):
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        assert Group(alone).all_gather(3, "a test") == [3]
    else:
        with pytest.raises(InvalidGroupError, match="This rank is not a member"):
            Group(alone)
    with pytest.raises(InvalidGroupError, match=r"group='some' is not a process group"):
        Group("some")


@pytest.mark.ranks(2)
def test_what_is_no_group_of_this_rank_is_told(ranks):
    ranks.run(use_what_is_no_group)


def send_what_cannot_be_sent(ctx):
    """It is an error on the rank that tries, which is not out of step afterwards."""
    group = everyone()
    if group.rank == 1:
        with pytest.raises(TypeError, match="cannot be sent in a meeting"):
            group.all_gather(lambda: 3, "a test")
    assert group.all_gather(group.rank, "a test") == list(range(group.size))


@pytest.mark.ranks(2)
def test_a_value_that_cannot_be_sent_leaves_the_ranks_in_step(ranks):
    ranks.run(send_what_cannot_be_sent)


class Attack:
    """Unpickled, it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def read_what_somebody_else_has_written(ctx, path, forged):
    """Whoever reaches the store can write there: rank 1 finds this in the place of rank 0's value."""
    group = everyone()
    if group.rank == 0:
        group.store.set("0/0", pickle.dumps(Attack(path)) if forged == "a pickle" else forged)
        group.store.set("0/1", "")
    group.meetings += group.rank == 0
    group.store.wait(["0/0"])
    if group.rank == 1:
        with pytest.raises(InvalidMessageError, match="what lies in the store for rank 0 is no message"):
            group.all_gather("mine", "a test")
    everyone().all_gather(None, "the end of the test")
    assert not os.path.exists(path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("forged", ["a pickle", "null", "NaN", "3", '{"tuple": [1]}', '{"tuple": [1, 2, 3]}'])
def test_what_lies_in_the_store_runs_no_code(ranks, tmp_path, forged):
    ranks.run(read_what_somebody_else_has_written, str(tmp_path / "attacked"), forged)


@pytest.mark.parametrize(
    "value", [None, True, -(2**70), 0.1, "ü", b"\x00\xff", [], (1, [2, ("3",)]), {1: {"a": (b"",)}}]
)
def test_a_value_arrives_as_it_was_sent(value):
    arrived = wire.decode(wire.encode(value))
    assert arrived == value and type(arrived) is type(value)


@pytest.mark.parametrize("text", [b"", b"\x80\x04.", b"{}", b'{"set": []}', b'{"bytes": "?"}', b"[" * 10**5])
def test_what_is_no_message_is_refused(text):
    with pytest.raises(ValueError):
        wire.decode(text)


def share_a_connection(ctx):
    """Groups of all, and of this rank alone, have no connections to the store of their own."""
    first = everyone()
    port = tcp_store(first.store).port
    counts, kept = [], []
    for number in range(4):
        alone = [dist.new_group([rank]) for rank in range(first.size)]
        kept += [Group(dist.new_group()), Group(alone[first.rank])]
        for group in kept:
            assert group.all_gather(number, "a test") == [number] * group.size
        first.all_gather(None, "count connections")
        counts.append(len(strangers._connections(port)))
        first.all_gather(None, "go on")
    assert len(set(counts)) == 1, counts


@pytest.mark.ranks(2)
def test_groups_share_a_connection_to_the_store(ranks):
    ranks.run(share_a_connection)


def fail_in_one(ctx):
    group = everyone()
    failing = group.size - 1

    def step():
        if group.rank == failing:
            raise FloatingPointError("no such thing")
        return group.rank * 11

    error, text = PeerFailedError, f"rank {failing} could not do a test: FloatingPointError: no such thing"
    if group.rank == failing:
        error, text = FloatingPointError, "no such thing"
    with pytest.raises(error, match=text):
        group.agree(step, "do a test")
    assert group.agree(lambda: group.rank * 11, "do a test") == [11 * rank for rank in range(group.size)]


@pytest.mark.ranks(1, 3)
def test_a_step_works_on_all_or_raises_on_all(ranks):
    ranks.run(fail_in_one)


def break_after_a_meeting(ctx):
    """Rank 0 comes last to a meeting and breaks the group after it, before the others have seen it come."""
    group = everyone()
    here = group.meetings

    def check_whole():
        if group.meetings == here:
            return  # it has not begun to wait
        dist.barrier()
        while not group.store.check([f"{here}/0"]):
            pass
        raise GroupAbortedError(group.ranks, "rank 0 says so.")

    if group.rank == 0:
        dist.barrier()
    else:
        group.check_whole = check_whole
    assert group.all_gather(group.rank * 7, "a test") == [7 * rank for rank in range(group.size)]


@pytest.mark.ranks(2, 4)
def test_a_group_that_breaks_after_a_meeting_leaves_the_meeting_whole(ranks):
    ranks.run(break_after_a_meeting)


def make_a_group_without_a_store(ctx):
    """As it is where the rank has died that holds it."""

    def refuse(*_):
        raise dist.DistNetworkError("Broken pipe")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.PrefixStore, "set", refuse)
        with pytest.raises(PeerLostError, match="lost its connection to the other ranks in the making of a group"):
            everyone()
    assert everyone().all_gather(ctx.cur_rank, "a test") == list(range(ctx.num_ranks))


@pytest.mark.ranks(2)
def test_a_group_that_misses_its_store_says_who_may_be_lost(ranks):
    ranks.run(make_a_group_without_a_store)


def stay_away(ctx):
    """Rank 1 comes late; the others wait no longer than the limit, and then nobody meets any more, nor waits for it."""
    store = distributed_c10d._get_process_group_store(dist.group.WORLD)
    meanwhile, before = everyone(), store.timeout
    store.set_timeout(timedelta(seconds=3))
    group = everyone()
    try:
        if group.rank != 1:
            text = f"Rank {group.rank} waited 3 s in a test, and rank 1 has not come"
            with pytest.raises(IrisTimeoutError, match=text):
                group.all_gather(None, "a test")
    finally:
        store.set_timeout(before)
    meanwhile.all_gather(None, "the end of the wait")
    for what in ("a test", "another test"):
        with pytest.raises(GroupAbortedError, match="rank [02] has left a test by IrisTimeoutError"):
            group.all_gather(group.rank, what)
    assert everyone().all_gather(group.rank, "another test") == list(range(group.size))


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_come_is_named(ranks):
    ranks.run(stay_away)


def gather_through_a_file(ctx, path):
    """A store without the extended operations: the one that ``init_method="file://…"`` makes."""
    with pytest.MonkeyPatch.context() as patch:
        store = dist.FileStore(path, dist.get_world_size())
        assert not store.has_extended_api()
        patch.setattr("iris.world.group.store_of", lambda group: store)
        group = everyone()
        for turn in range(3):
            assert group.all_gather((group.rank, turn), "a test") == [(rank, turn) for rank in range(group.size)]
    group.agree(lambda: None, "end the test")


@pytest.mark.ranks(2)
def test_a_store_may_be_a_file(ranks, tmp_path):
    ranks.run(gather_through_a_file, str(tmp_path / "store"))


def placements(**changes):
    """Three ranks on one host, each with a GPU; ``changes`` gives a list for a field."""
    default = [Placement("boot", f"box{rank}", f"GPU-{rank}", "H200") for rank in range(3)]
    return [
        each._replace(**{field: values[rank] for field, values in changes.items()}) for rank, each in enumerate(default)
    ]


def in_group(*ranks):
    """This rank's group, as far as who is where depends on it."""
    return SimpleNamespace(rank=0, ranks=ranks)


def test_ranks_on_one_host_may_have_names_of_their_own():
    group = in_group(0, 1, 2)
    found = hosts.divide(group, placements())
    assert found.group is group and found.ranks == ((0, 1, 2),) and found.local_rank == 0


@pytest.mark.parametrize("gpu", [["GPU-7", "GPU-8", "GPU-9"], [None] * 3])
def test_hosts_with_other_numbers_of_ranks_are_told(gpu):
    """By the ranks in the world, of which the context may have some."""
    unequal = placements(host=["one", "two", "one"], gpu=gpu)
    text = r"2 on box0, 1 on box1 \(ranks 3 and 8 on box0; rank 5 on box1\).*torchrun --nproc-per-node"
    with pytest.raises(InvalidGroupError, match=text):
        hosts.divide(in_group(3, 5, 8), unequal)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_and_no_simulator_is_told(monkeypatch):
    monkeypatch.setattr(placement.mode, "ACTIVE", False)
    with pytest.raises(NoGpuForRankError, match="no GPU here, and IRIS_SIMULATOR=0 forbids the simulator"):
        placement.find_placement(placement.choose_device())


def test_two_ranks_on_one_gpu_are_told(monkeypatch):
    monkeypatch.delenv(placement.OVERLAP_VARIABLE, raising=False)
    shared, ranks = placements(gpu=["GPU-7", "GPU-8", "GPU-7"]), (3, 5, 8)
    with pytest.raises(SharedDeviceError, match=r"Ranks 3 and 8 use the same GPU .*set_device\(LOCAL_RANK\)"):
        placement.check_own_gpus(shared, ranks)
    placement.check_own_gpus(placements(), ranks)
    placement.check_own_gpus(placements(gpu=[None] * 3), ranks)
    monkeypatch.setenv(placement.OVERLAP_VARIABLE, "1")
    placement.check_own_gpus(shared, ranks)


def test_gpus_without_peer_access_are_told(monkeypatch):
    """This process sees its own GPU as number 1 and that of rank 2 as number 0; that of rank 1 is hidden from it."""
    visible = ["GPU-2", "GPU-0"]
    asked = []

    def can_access(device, peer):
        asked.append((device, peer))
        return False

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=visible[index]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    with pytest.raises(NoPeerAccessError, match=r"cuda:1 \(H200\) of rank 3 cannot access .* of rank 8\."):
        placement.check_peer_access(placements(), (3, 5, 8), 0, torch.device("cuda:1"))
    assert asked == [(1, 0)]
    # Of another host, which is on this machine.
    placement.check_peer_access(placements(host=["one", "one", "two"]), (3, 5, 8), 0, torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    placement.check_peer_access(placements(), (3, 5, 8), 0, torch.device("cuda:1"))


@pytest.mark.parametrize(
    ("simulated", "gpus", "bound", "expected"),
    [
        (True, True, "cuda:3", "cpu"),
        (False, False, None, "cpu"),
        (False, True, None, "cuda:1"),
        (False, True, "cuda:3", "cuda:3"),
        (False, True, "cpu", "cuda:1"),
    ],
)
def test_the_device_is_the_process_groups_or_the_current_one(monkeypatch, simulated, gpus, bound, expected):
    monkeypatch.setattr(placement.mode, "ACTIVE", simulated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    group = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=torch.device(bound) if bound else None))
    monkeypatch.setattr(dist, "group", group)
    assert placement.choose_device() == torch.device(expected)


@pytest.mark.parametrize(("local_rank", "visible", "chosen"), [("3", 8, 3), ("3", 1, 0)])
def test_torchrun_gives_each_rank_a_gpu_and_nccl(monkeypatch, local_rank, visible, chosen):
    calls = []
    monkeypatch.setattr(bootstrap, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(index))
    monkeypatch.setattr(dist, "init_process_group", lambda backend: calls.append(backend))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=None))
    monkeypatch.setattr(bootstrap.atexit, "register", lambda function: None)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("RANK", "11")
    bootstrap.initialise()
    assert calls == [chosen, "nccl"]
