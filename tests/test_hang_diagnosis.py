"""What a wait that was given up says: which flag, who has arrived, and whether ranks count or launch differently."""

import numpy as np
import pytest
import torch

import iris
from iris.errors import IrisTimeoutError, names
from iris.experts import ExpertsConfig
from iris.failures import device_record
from iris.failures.barrier_diagnosis import explain
from iris.failures.device_record import DeviceRecord
from iris.heap import describe_address
from iris.ops import FusedConfig
from iris.ops.counts import ARRIVED, DONE

OTHER_GRID = "the ranks have launched different grids"
OTHER_EPOCHS = "So the ranks count differently"

# The flags of a barrier of three ranks, the row and the epoch of the program that gave up on rank 0, and what is said.
# Rank 2 had arrived then, and rank 1 had not.
SEEN = {
    "one that never came": ([[1, 0, 1]], 0, 1, "Rank 1 has not arrived: it is at epoch 0 (it never was"),
    "one that is late": ([[5, 4, 5]], 0, 5, "Rank 1 has not arrived: it is at epoch 4, the one before."),
    "one that came meanwhile": ([[5, 5, 5]], 0, 5, "Rank 1 had not arrived, and has come since."),
    "late after launches of other grids": (
        [[9, 8, 9], [2, 1, 2]], 1, 2, "Rank 1 has not arrived: it is at epoch 1, the one before.",
    ),
    "epochs that wrap": (
        [[-(2**31), 2**31 - 1, -(2**31)]], 0, -(2**31), "Rank 1 has not arrived: it is at epoch 2147483647",
    ),
    "a smaller grid": (
        [[5, 5, 5], [5, 5, 5], [5, 4, 5], [5, 4, 5]], 3, 5,
        f"Rank 1 has arrived with programs 0 to 1 only, and this rank launched 4: {OTHER_GRID}",
    ),
    "a smaller grid, and later barriers that were given up too": (
        [[9, 5, 9], [9, 4, 9]], 1, 5,
        f"Rank 1 has arrived with program 0 only, and this rank launched 2: {OTHER_GRID}",
    ),
    "some programs": ([[5, 4, 5], [5, 5, 5]], 0, 5, "Rank 1 has arrived with other programs, of 2, than [0]."),
    "one that is far behind": ([[7, 3, 7]], 0, 7, f"Rank 1 is at epoch 3, 4 behind. {OTHER_EPOCHS}"),
    "one that is far ahead": ([[5, 4, 9]], 0, 5, f"Rank 2 is at epoch 9, 4 ahead. {OTHER_EPOCHS}"),
}  # fmt: skip


@pytest.mark.parametrize("what", SEEN)
def test_who_is_late_and_why(what):
    flags, program, epoch, expected = SEEN[what]
    text = explain(np.array(flags, np.int32), program, epoch, own=0, arrived=[0, 2], ranks=(0, 1, 2))
    assert text.startswith("Ranks 0 and 2 have arrived. ") and expected in text
    assert (OTHER_GRID in text) == (OTHER_GRID in expected) and (OTHER_EPOCHS in text) == (OTHER_EPOCHS in expected)


def give_up(address, kind, **words):
    """What is raised on rank 0 when its kernels have recorded this."""
    record = DeviceRecord(torch.device("cpu"))
    words = {"CLAIMED": 1, "FLAG": address, "KIND": device_record.KINDS.index(kind), **words}
    for name, value in words.items():
        record._words[getattr(device_record, name)] = value
    with pytest.raises(IrisTimeoutError) as raised:
        record.raise_if_claimed(0, describe_address, str)
    record.raise_if_claimed(0, describe_address, str)  # it is said once
    return str(raised.value)


def told_of_experts(ctx, late):
    """Of a wait of program 1 for a flag of each rank, which are not next to each other: it found these ``late``."""
    extents = dict(num_experts=2 * ctx.num_ranks, hidden=8, max_tokens=64, top_k=1, dtype=torch.float32)
    ep = ctx.experts(**extents, config=ExpertsConfig(in_flight=1, low_latency=False))
    memory, texts = ep._calls.open_memory(), []
    # Whoever reads them as a row finds others: of further programs, which are ahead, or of further stages.
    memory.slots[0].sent.copy_(torch.arange(memory.slots[0].sent.numel()).view(ctx.num_ranks, -1))
    for flags in (memory.slots[0].sent[:, 1], memory.staged[0][:, 1, 1]):
        seen = sum(1 << rank for rank in range(ctx.num_ranks) if rank not in late)
        words = dict(PROGRAM=1, PROGRAMS=3, WANTED=4, SEEN=seen, FIRST=0, RANKS=ctx.num_ranks)
        texts.append(give_up(flags.data_ptr(), "barrier", **words))
    ctx.barrier()
    ep.close()
    return texts


@pytest.mark.ranks(3)
@pytest.mark.parametrize("who", ["even", "odd", "none"])
def test_flags_of_ranks_that_lie_apart_are_not_read_as_a_row(ranks, who):
    late = {"even": range(0, ranks.num_ranks, 2), "odd": range(1, ranks.num_ranks, 2), "none": ()}[who]
    behind = f"Behind: {names(late)}." if late else "None is behind any more."
    for texts in ranks.run(told_of_experts, list(late)):
        for part, text in zip(("sent", "staged"), texts, strict=True):
            assert f"of {part}). {behind} The kernel went on without it" in text
            assert "for flags of ranks to be at or past 4 (rank" in text and "arrived" not in text


@pytest.fixture
def ctx(monkeypatch):
    if not iris.simulator.ACTIVE:
        pytest.skip("fills in the record by hand; on GPUs kernels do: test_wait_limit.py")
    monkeypatch.setattr(device_record, "NANOSECONDS", 10**9)
    with iris.iris(1 << 20) as ctx:
        yield ctx


def test_a_flag_is_named(ctx):
    flags = ctx.zeros(4, dtype=torch.int32)
    text = give_up(flags[2:].data_ptr(), "ge", WANTED=7, SEEN=3)
    assert "for a flag to be >= 7; it held 3 (rank 0's int32[4], element 2 (offset 0x8))." in text
    assert "not in any heap" in give_up(64, "eq")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_all_programs_of_a_barrier_are_looked_at(ctx, dtype):
    # After others in one tensor.
    flags = torch.tensor([[0, 0], [1, 1], [1, 1], [1, 0]], dtype=dtype)
    tensor = ctx.zeros(4, 2, dtype=dtype).copy_(flags)
    words = dict(PROGRAM=2, PROGRAMS=3, WANTED=1, SEEN=0b01, FIRST=0, RANKS=2)
    text = give_up(tensor[3].data_ptr(), "barrier", **words)
    assert f"in a barrier for epoch 1 (rank 0's {str(dtype)[6:]}[4, 2], element 6" in text
    assert "Rank 0 has arrived. Rank 1 has arrived with programs 0 to 1 only, and this rank launched 3" in text


@pytest.mark.parametrize("first, size", [(0, 33), (32, 33), (32, 100), (96, 128)])
def test_a_barrier_of_more_ranks_than_are_awaited_at_once(ctx, first, size):
    """By bits of the 32 that the program waits for; those before had arrived, and those after show what they do now."""
    awaited = range(first, min(first + 32, size))
    late, came = {awaited[-1], size - 1}, set(awaited[1:-1:9])
    flags = ctx.full((3, size), 5, dtype=torch.int32)
    flags[:, sorted(late)] = 4
    flags[:, 0] = 6  # this rank's: it went on to the next barrier
    seen = sum(1 << i for i, rank in enumerate(awaited) if rank not in late | came)
    words = dict(PROGRAM=1, PROGRAMS=3, WANTED=5, SEEN=seen, FIRST=first, RANKS=size)
    text = give_up(flags[1, first:].data_ptr(), "barrier", **words)
    arrived = [rank for rank in range(size) if rank not in late | came]
    expected = {f"R{names(arrived)[1:]} have arrived."}
    expected |= {f"Rank {rank} has not arrived: it is at epoch 4, the one before." for rank in late}
    expected |= {f"Rank {rank} had not arrived, and has come since." for rank in came}
    assert {sentence for sentence in expected if sentence in text} == expected
    assert text.count("arrived") == len(expected)
    # Without the flags nothing is known of those after.
    known = [rank for rank in arrived if rank in range(awaited.stop)]
    assert f"Of ranks 0 to {awaited[-1]} of its group, {known} had arrived." in give_up(64, "barrier", **words)


def test_the_memory_of_the_library_is_named(ctx):
    ctx.device_barrier()
    workspace = ctx._workspaces[None]
    channels = {operation: channel.memory for (operation, *_), channel in workspace._channels.items()}
    text = give_up(channels["flags of device_barrier()"].data_ptr(), "barrier", WANTED=2, RANKS=1, PROGRAMS=1)
    assert "in a barrier for epoch 2 (rank 0's flags of device_barrier() on stream 1 of 1, byte 0)" in text
    assert "Rank 0 has not arrived: it is at epoch 1, the one before." in text
    queues = ctx.ccl.communicator().queues(None, 2, False).words
    queues[:1].fill_((3 << 32) | 2)
    text = give_up(queues.data_ptr(), "queue", WANTED=4, RANKS=1)
    assert "queues of" in text and "Behind: rank 0, which has put in 3 and taken 2." in text
    assert "for data from its peers" in give_up(queues.data_ptr(), "data")
    out, a, b = (ctx.zeros(8, 8) for _ in range(3))
    buffers = ctx.ops.matmul_all_reduce_preamble(out, a, b, config=FusedConfig())
    text = give_up(buffers.counts.data_ptr() + 4 * DONE.value, "reached", WANTED=1)
    assert "rank 0's workspace of matmul_all_reduce(" in text and "what peers have finished" in text
    buffers = ctx.ops.all_gather_matmul_preamble(out, a, b, config=FusedConfig())
    for word, words in ((0, "what has arrived of part 0"), (1, "ticket 0 of what programs take")):
        assert words in give_up(buffers.counts.data_ptr() + 4 * (ARRIVED.value + word), "reached", WANTED=1)
