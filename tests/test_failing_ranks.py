"""What fails on one rank of a collective call of the host is told to the others at once, and all stay in step."""

import tempfile

import pytest
import torch
import torch.distributed as dist

import iris.ccl.communicator
import iris.runtime.device_barrier
import iris.tracing.recording
from iris import world
from iris.errors import PeerFailedError
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
