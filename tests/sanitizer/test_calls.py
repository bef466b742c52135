"""By what a program hears that an asynchronous call of torch.distributed is over, and what it must not do before."""

import pytest
import torch
import torch.distributed as dist

N = 64


def by_wait(work):
    work.wait()


def by_looking(work):
    while not work.is_completed():
        pass


def by_future(work):
    work.get_future().wait()


def by_done(work):
    future = work.get_future()
    while not future.done():
        pass
    future.value()


def by_callback(work):
    work.get_future().then(lambda future: future.value()[0].mul_(2)).wait()


def by_several(work):
    torch.futures.collect_all([work.get_future()]).wait()


def by_nothing(work):
    return work.wait


WAYS = [by_wait, by_looking, by_future, by_done, by_callback, by_several, by_nothing]
# Gloo's messages have no future, nor can one look whether they are over.
CASES = [("gloo", True, by_wait), ("gloo", True, by_nothing)]
CASES += [(*case, way) for case in [("gloo", False), ("iris", True), ("iris", False)] for way in WAYS]


def work(ctx, backend, message, way):
    group = dist.new_group(backend=backend)
    x, sent = torch.arange(N) + ctx.cur_rank, torch.arange(N) + ctx.cur_rank
    if message:
        sending, call = dist.isend(sent, 1 - ctx.cur_rank, group=group), dist.irecv(x, 1 - ctx.cur_rank, group=group)
    else:
        sending, call = None, dist.all_reduce(x, group=group, async_op=True)
    sent.sum()
    end = way(call)
    x.add_(1)
    if end is not None:
        end()
    if sending is not None:
        sending.wait()
    sent.add_(1)
    ctx.barrier()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend, message, way", CASES)
def test_who_waits_for_a_call_comes_after_it(ranks, backend, message, way):
    _, findings = ranks.run_sanitized(work, backend, message, way)
    assert [finding.kind for finding in findings] == ([] if way is not by_nothing else ["race"])


CALLS = {
    "all_reduce": lambda out, x, rows: dist.all_reduce(out),
    "reduce": lambda out, x, rows: dist.reduce(out, 0),
    "broadcast": lambda out, x, rows: dist.broadcast(out, 0),
    "all_gather": lambda out, x, rows: dist.all_gather(rows, x),
    "all_gather_into_tensor": lambda out, x, rows: dist.all_gather_into_tensor(out, x[: N // 2]),
    "reduce_scatter": lambda out, x, rows: dist.reduce_scatter(out, [x, x]),
    "reduce_scatter_tensor": lambda out, x, rows: dist.reduce_scatter_tensor(out[: N // 2], x),
    "all_to_all_single": lambda out, x, rows: dist.all_to_all_single(out, x),
    "gather": lambda out, x, rows: dist.gather(x, rows if dist.get_rank() == 0 else None),
    "scatter": lambda out, x, rows: dist.scatter(out, [x, x] if dist.get_rank() == 0 else None),
    "send and recv": lambda out, x, rows: dist.recv(out, 0) if dist.get_rank() else dist.send(x, 1),
}


def use_at_once(ctx, name):
    """Of memory that the host may only touch in order with the call."""
    out, x, rows = ctx.zeros(N), torch.ones(N), [ctx.zeros(N) for _ in range(2)]
    for _ in range(2):
        CALLS[name](out, x, rows)
        x.add_(1)
        for tensor in (out, *rows):
            tensor.add_(1)
    ctx.barrier()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_waits_has_ended(ranks, name):
    _, findings = ranks.run_sanitized(use_at_once, name)
    assert not findings
