"""Programs of torch.distributed run on the backend "iris": its collectives, and training in parallel."""

import functools

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import iris.distributed  # noqa: F401 (registers the backend)
from iris.errors import InvalidGroupError, WrongDeviceError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def make_group(ctx, ranks=None):
    return dist.new_group(ranks, backend=f"{ctx.device.type}:iris")


def values(ctx, count, rank, call=0):
    """A rank's data: each element another one, exact in sums."""
    return torch.arange(count, dtype=torch.float32, device=ctx.device) + 100 * rank + 10_000 * call


def collectives(ctx, group, members):
    """Every call of ``torch.distributed`` whose parts are equal, and what it should give."""
    size, rank = len(members), members.index(ctx.cur_rank)
    first, last = members[0], members[-1]
    everyone = torch.stack([values(ctx, 6 * size, peer) for peer in range(size)])
    own = everyone[rank]

    total = own.clone()
    work = dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work.wait() and torch.equal(total, everyone.sum(0))
    total = own.clone()
    dist.all_reduce(total, group=group, async_op=True).block_current_stream()
    assert torch.equal(total, everyone.sum(0))
    largest = own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    assert torch.equal(largest, everyone.amax(0))
    average = own.clone()
    dist.reduce(average, last, dist.ReduceOp.AVG, group=group)
    if rank == size - 1:
        torch.testing.assert_close(average, everyone.sum(0) / size)

    sent = own.clone()
    dist.broadcast(sent, last, group=group)
    assert torch.equal(sent, everyone[-1])

    whole = torch.empty_like(everyone)
    dist.all_gather_into_tensor(whole, own, group=group)
    assert torch.equal(whole, everyone)
    parts = [torch.empty(2, 3 * size, device=ctx.device) for _ in members]
    dist.all_gather(parts, own.view(2, -1), group=group)
    assert torch.equal(torch.stack(parts).view(size, -1), everyone)
    uneven = [torch.empty(peer + 1, device=ctx.device) for peer in range(size)]
    dist.all_gather(uneven, own[: rank + 1].clone(), group=group)
    assert all(torch.equal(part, everyone[peer, : peer + 1]) for peer, part in enumerate(uneven))

    part = torch.empty(6, device=ctx.device)
    dist.reduce_scatter_tensor(part, own, group=group)
    assert torch.equal(part, everyone.sum(0).view(size, 6)[rank])
    dist.reduce_scatter(part, list(own.view(size, 6).unbind()), dist.ReduceOp.MIN, group=group)
    assert torch.equal(part, everyone.amin(0).view(size, 6)[rank])
    counts = [2 * peer % 6 + 1 for peer in range(size)]
    part = torch.empty(counts[rank], device=ctx.device)
    dist.reduce_scatter(part, list(own[: sum(counts)].split(counts)), group=group)
    assert torch.equal(part, everyone.sum(0)[: sum(counts)].split(counts)[rank])

    result = torch.empty_like(own)
    dist.all_to_all_single(result, own, group=group)
    assert torch.equal(result.view(size, 6), everyone.view(size, size, 6)[:, rank])
    if hasattr(dist, "gather_single"):  # from torch 2.14 on
        together = torch.empty_like(everyone) if rank == 0 else None
        dist.gather_single(own, together, dst=first, group=group)
        assert rank or torch.equal(together, everyone)
    gathered = [torch.empty_like(own) for _ in members] if rank == 0 else None
    dist.gather(own, gathered, first, group=group)
    if rank == 0:
        assert torch.equal(torch.stack(gathered), everyone)
    scattered = torch.empty(6, device=ctx.device)
    dist.scatter(scattered, list(own.view(size, 6).unbind()) if rank == size - 1 else None, last, group=group)
    assert torch.equal(scattered, everyone[-1].view(size, 6)[rank])

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": peer} for peer in range(size)]
    dist.barrier(group=group)


def unequal_parts_and_messages(ctx, group, members):
    """An all_to_all of unequal parts, and messages."""
    size, rank = len(members), members.index(ctx.cur_rank)
    everyone = torch.stack([values(ctx, 6 * size, peer) for peer in range(size)])
    own, counts = everyone[rank], [2 * peer % 6 + 1 for peer in range(size)]
    rows = own[: sum(counts)].repeat_interleave(2).view(-1, 2)
    result = rows.new_empty(size * counts[rank], 2)
    dist.all_to_all_single(result, rows, [counts[rank]] * size, counts, group=group)
    expected = torch.cat([row[: sum(counts)].split(counts)[rank] for row in everyone])
    assert torch.equal(result, expected.repeat_interleave(2).view(-1, 2))
    lists = [torch.empty(counts[rank], device=ctx.device) for _ in members]
    dist.all_to_all(lists, list(own[: sum(counts)].split(counts)), group=group)
    assert torch.equal(torch.cat(lists), expected)

    after, before = members[(rank + 1) % size], members[rank - 1]
    # In any order, and of more than a queue holds.
    for repeats, order in ((1, 1), (1, -1), (6_000, -1)) if size > 1 else ():
        sent = own.repeat(repeats)
        received = torch.empty_like(sent)
        calls = [dist.P2POp(dist.isend, sent, after, group), dist.P2POp(dist.irecv, received, before, group)]
        for work in dist.batch_isend_irecv(calls[::order]):
            work.wait()
        assert torch.equal(received, everyone[rank - 1].repeat(repeats))


def destroyed_meanwhile(ctx):
    """To destroy a group waits for its messages, whether anyone waits for their works before or after."""
    group, me, size = make_group(ctx), ctx.cur_rank, ctx.num_ranks
    received = torch.zeros(40_000, device=ctx.device)
    works = [
        dist.irecv(received, (me - 1) % size, group=group),
        dist.isend(values(ctx, 40_000, me), (me + 1) % size, group=group),
    ]
    dist.destroy_process_group(group)
    for work in works:
        work.wait()
    assert torch.equal(received, values(ctx, 40_000, (me - 1) % size))


def test_a_group_that_is_destroyed_with_messages_under_way(ranks):
    ranks.run(destroyed_meanwhile)


def of_all_and_of_some(ctx):
    everyone = list(range(ctx.num_ranks))
    for members in (everyone, everyone[1:]):
        group = make_group(ctx, members)
        if ctx.cur_rank in members:
            collectives(ctx, group, members)
            unequal_parts_and_messages(ctx, group, members)
            dist.destroy_process_group(group)


@pytest.mark.ranks(*((2, 3) if EVERYTHING else (3,)))
def test_collectives(ranks):
    ranks.run(of_all_and_of_some)


FEATURES, STEPS = 12, 3
HIDDEN, ROWS = 10, 4  # of each rank


def model(ctx):
    torch.manual_seed(1)
    hidden = HIDDEN * ctx.num_ranks
    layers = torch.nn.Linear(FEATURES, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, FEATURES)
    return torch.nn.Sequential(*layers).to(ctx.device)


def train(ctx, network, rows, group_size=1):
    """Some steps on a rank's rows of each batch, or on all of them."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        batch = torch.randn(ROWS * ctx.num_ranks, FEATURES, generator=generator).to(ctx.device)
        optimizer.zero_grad()
        network(batch[rows]).square().mean().backward()
        optimizer.step()
    return network


def assert_trained_alike(network, expected):
    for parameter, reference in zip(network.parameters(), expected.parameters(), strict=True):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(whole, reference)


@functools.cache
def lasting_group(ctx):
    """DTensor remembers meshes by their ranks, and would ask for a group of an equal mesh that has been destroyed."""
    return make_group(ctx)


def parallel(ctx, how):
    """A model trained by all ranks is the one that a single rank would have trained on everything."""
    expected = train(ctx, model(ctx), slice(None))
    group = lasting_group(ctx)
    own = slice(ROWS * ctx.cur_rank, ROWS * (ctx.cur_rank + 1))
    if how == "data parallel":
        assert_trained_alike(train(ctx, DistributedDataParallel(model(ctx), process_group=group), own), expected)
    else:
        mesh = DeviceMesh.from_group(group, ctx.device.type)
        network = model(ctx)
        if how == "fully sharded":
            for layer in (network[0], network[2]):
                fully_shard(layer, mesh=mesh)
            assert_trained_alike(train(ctx, fully_shard(network, mesh=mesh), own), expected)
        else:
            network = parallelize_module(network, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            assert_trained_alike(train(ctx, network, slice(None)), expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["data parallel", "fully sharded", "tensor parallel"])
def test_training(ranks, how):
    ranks.run(parallel, how)


def compiled(ctx):
    """What torch.compile makes of a functional collective reaches the backend."""
    group = make_group(ctx)

    def doubled_sum(x):
        total = torch.ops._c10d_functional.all_reduce(2 * x, "sum", group.group_name)
        return torch.ops._c10d_functional.wait_tensor(total) + 1

    x = values(ctx, 50, ctx.cur_rank)
    result = torch.compile(doubled_sum, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(result, 2 * sum(values(ctx, 50, rank) for rank in range(ctx.num_ranks)) + 1)
    dist.destroy_process_group(group)


def test_compiled_collectives(ranks):
    ranks.run(compiled)


def split(ctx):
    """Which torch does where the default group has a device, and an accelerator is there."""
    me, world = ctx.cur_rank, make_group(ctx)
    assert world._get_backend(torch.device("cuda")) is world  # which torch up to 2.11 asks for
    with pytest.MonkeyPatch.context() as patch:
        if ctx.device.type == "cpu":
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            patch.setattr(torch.accelerator, "current_accelerator", lambda: ctx.device)
        patch.setattr(dist.group.WORLD, "bound_device_id", torch.device(ctx.device.type, ctx.gpu_id))
        halves = dist.split_group(world, [[1, 3], [0, 2]], group_desc="halves")
        inner = dist.split_group(halves, [[1]])
    if inner is dist.GroupMember.NON_GROUP_MEMBER:  # of torch 2.14; of older ones it is None
        inner = None
    total = values(ctx, 5, me)
    dist.all_reduce(total, group=halves)
    assert torch.equal(total, values(ctx, 5, me) + values(ctx, 5, (me + 2) % 4))
    assert (inner is None) == (me < 2)
    if inner is not None:
        dist.all_reduce(total, group=inner)
        assert dist.get_process_group_ranks(inner) == [me]
    ctx.barrier()
    for group in filter(None, (inner, halves, world)):
        dist.destroy_process_group(group)


@pytest.mark.ranks(4, exactly=True)
def test_a_group_is_split(ranks):
    ranks.run(split)


def split_without_a_device(ctx):
    """Where Iris is the default group's backend: it has no device of its own, and torch asks for one to split it."""
    world, parts = make_group(ctx), [[rank] for rank in range(ctx.num_ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d._world, "default_pg", world)
        assert world.bound_device_id is None
        if ctx.device.type == "cpu":
            with pytest.raises(InvalidGroupError, match=r"new_group\(ranks\)"):
                dist.split_group(world, parts)
        else:
            alone = dist.split_group(world, parts)
            assert alone.size() == 1 and alone.bound_device_id == ctx.device
            dist.destroy_process_group(alone)
    ctx.barrier()
    dist.destroy_process_group(world)


def test_a_default_group_without_a_device_is_split(ranks):
    ranks.run(split_without_a_device)


def beside_gloo(ctx):
    """In a group with two backends, tensors of the CPU beside a GPU go to the other one."""
    group = dist.new_group(backend="cpu:gloo,cuda:iris")
    group.device_type = "cuda"  # in the simulator too, for this
    x = torch.full((3,), ctx.cur_rank + 1.0)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [sum(range(1, ctx.num_ranks + 1))] * 3
    everyone = torch.empty(3 * ctx.num_ranks)
    dist.all_gather_into_tensor(everyone, x + ctx.cur_rank, group=group)
    assert everyone[::3].tolist() == [x[0] + rank for rank in range(ctx.num_ranks)]
    if ctx.cur_rank < 2:
        peer = 1 - ctx.cur_rank
        for work in [dist.isend(x + ctx.cur_rank, peer, group), dist.irecv(x, peer, group)]:
            work.wait()
        assert x.tolist() == [sum(range(1, ctx.num_ranks + 1)) + peer] * 3
        if ctx.cur_rank == 0:
            dist.send(x + 7, peer, group)
        else:
            dist.recv(y := torch.empty(3), group=group)  # from any rank, which Gloo has
            assert torch.equal(y, x + 8)
    several = [torch.full((2,), 10.0 * n + ctx.cur_rank) for n in range(2)]
    everyones = [[torch.empty(2) for _ in several] for _ in range(ctx.num_ranks)]
    dist.all_gather_coalesced(everyones, several, group=group)
    assert [[x[0] for x in row] for row in everyones] == [[rank, 10.0 + rank] for rank in range(ctx.num_ranks)]
    dist.all_reduce_coalesced(several, group=group)
    assert [x[0] for x in several] == [sum(10.0 * n + rank for rank in range(ctx.num_ranks)) for n in range(2)]
    with (
        pytest.raises(RuntimeError, match="[Cc]oalesc"),
        distributed_c10d._coalescing_manager(group, torch.device("cpu")),
    ):
        dist.all_reduce(x, group=group)  # which it does not
    distributed_c10d._world.pg_coalesce_state.pop(group, None)  # torch leaves it there
    dist.barrier(group=group)
    with pytest.raises(WrongDeviceError, match="cpu:gloo,cuda:iris"):
        dist.all_reduce(torch.empty(3, device="meta"), group=group)
    dist.destroy_process_group(group)


def overlapping(ctx):
    """What is asked for with async_op=True does not hold up what comes after it on the stream."""
    group, size = make_group(ctx), ctx.num_ranks
    x, other = torch.ones(1 << 20, device=ctx.device), torch.ones(1 << 20, device=ctx.device)
    for _ in range(2):
        dist.all_reduce(x, group=group, async_op=True).wait()
    other.add_(1)
    ctx.barrier()
    if ctx.cur_rank == 0:
        torch.cuda._sleep(500_000_000)
    work, later = dist.all_reduce(x, group=group, async_op=True), torch.cuda.Event()
    future = work.get_future()
    other.add_(1)
    later.record()
    later.synchronize()
    assert ctx.cur_rank == 0 or not work.is_completed(), "the stream waited for the collective, or it for nobody"
    future.wait()
    x.add_(1)
    assert (x == size**3 + 1).all() and (other == 3).all()
    dist.destroy_process_group(group)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no streams without a GPU")
def test_asynchronous_calls_run_beside_others(ranks):
    ranks.run(overlapping)


def test_gloo_for_the_cpu(ranks):
    ranks.run(beside_gloo)
