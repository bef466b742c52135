"""What fails on one rank of a call of the host is told to the others at once, and all stay in step. Nothing is left."""

import gc
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from rank_pool import HOSTS

import iris.ccl.communicator
import iris.context
import iris.runtime.device_barrier
import iris.runtime.process_groups
import iris.tracing.recording
from iris import world
from iris.errors import PeerFailedError
from iris.heap.mapping import mappings
from iris.heap.symmetric import live_heaps
from iris.world import placement


def collective(ctx):
    values = ctx.zeros(8)
    ctx.ccl.all_reduce(values, values, group=dist.new_group())


def broadcast(value):
    """From the last rank, where ``value()`` is made."""
    return lambda ctx: ctx.broadcast(value() if ctx.cur_rank == ctx.num_ranks - 1 else None, ctx.num_ranks - 1)


# What is called, what breaks in it on the last rank, and what the others hear that this could not do.
CALLS = {
    "a value that cannot be pickled": (broadcast(lambda: {"hook": lambda: 3}), None, "broadcast from rank"),
    "waiting for its kernels": (broadcast(lambda: 3), (iris.Iris, "_drain"), "broadcast from rank"),
    "no room for what comes": (
        lambda ctx: ctx.broadcast(torch.arange(6)), (torch, "empty"), "make room for what rank 0 broadcasts"),
    "its device": (lambda ctx: world.join(), (placement, "choose_device"), "find out where it runs"),
    "its table of collectives": (collective, (iris.ccl.communicator, "load_table"), "begin its first collective"),
    "the compiler": (
        lambda ctx: ctx.device_barrier(dist.new_group()),
        (iris.runtime.device_barrier, "prepare"),
        "compile its first",
    ),
    "no room for events": (lambda ctx: ctx.tracing.enable(), (torch, "zeros"), "make room for its events"),
    "reading events": (
        lambda ctx: ctx.tracing.timeline(), (iris.tracing.recording, "assemble"), "read the events of all ranks"),
}  # fmt: skip


def fail_on_the_last(ctx, name):
    call, broken, text = CALLS[name]
    ctx.tracing.enable()
    last = ctx.num_ranks - 1

    def fail(*args, **options):
        raise FloatingPointError("no such thing")

    with pytest.MonkeyPatch.context() as patch:
        if ctx.cur_rank == last and broken is not None:
            patch.setattr(*broken, fail)
        reason = "no such thing" if broken is not None else ".*[Pp]ickle"
        message = reason if ctx.cur_rank == last else f"rank {last} could not {text}.*: {reason}"
        with pytest.raises(Exception, match=message) as caught:
            call(ctx)
    assert isinstance(caught.value, PeerFailedError) == (ctx.cur_rank != last)
    assert ctx.broadcast(7, last) == 7


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", CALLS)
def test_what_fails_on_one_rank_fails_on_all(ranks, name):
    ranks.run(fail_on_the_last, name)


def have_no_folder(ctx):
    """That of the first rank, through which the events of all go."""
    ctx.tracing.enable()
    with pytest.MonkeyPatch.context() as patch:
        if ctx.cur_rank == 0:
            patch.setattr(tempfile, "tempdir", "/nowhere")
        with pytest.raises(OSError if ctx.cur_rank == 0 else PeerFailedError, match="nowhere"):
            ctx.tracing.export("trace.json")
    ctx.barrier()


@pytest.mark.ranks(2)
def test_no_folder_for_the_events_of_all(ranks):
    ranks.run(have_no_folder)


# What a context makes after its heap, in this order.
STEPS = [
    (iris.context, "DeviceRecord"),
    (iris.runtime.process_groups, "Workspace"),
    (iris.context, "heap_bases_tensor"),
    (iris.context, "context_tensor"),
    (iris.context, "Tracing"),
    (iris.context.Tracing, "enable_if_wanted"),
]


def taken():
    with open("/proc/self/maps") as maps:
        shared = [line for line in maps if "memfd" in line or "nvidia" in line]
    mapped = [mapping for mapping in mappings() if mapping.memory is not None]
    return len(os.listdir("/proc/self/fd")), len(shared), len(mapped), len(live_heaps())


def make_no_context(ctx):
    def fail(*args, **options):
        raise FloatingPointError("no such thing")

    iris.iris(1 << 20).close()  # what is made once in a process
    gc.collect()
    gc.disable()  # which would hide what a context has not given back by itself
    try:
        before = taken()
        for owner, name in STEPS:
            with pytest.MonkeyPatch.context() as patch:
                # On several hosts, the others have memory of theirs by then.
                if ctx.host == 0 or name != "Workspace":
                    patch.setattr(owner, name, fail)
                with pytest.raises((FloatingPointError, PeerFailedError), match="no such thing"):
                    iris.iris(1 << 20)
            ctx.barrier()
            assert taken() == before, name
    finally:
        gc.enable()
    with iris.iris(1 << 20) as other:
        values = other.arange(4) + ctx.cur_rank
        other.ccl.all_reduce(values, values)
        assert values.tolist() == [sum(i + rank for rank in range(ctx.num_ranks)) for i in range(4)]


@pytest.mark.ranks(2, HOSTS[0])
def test_a_context_that_cannot_be_made_gives_back_what_it_has_taken(ranks):
    ranks.run(make_no_context)
