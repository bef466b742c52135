"""Memory that a process group hands out: its collectives need no staging for it, and FSDP2 trains with it."""

import functools

import pytest
import torch
import torch.distributed as dist
from covering import EVERYTHING, thorough
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import iris.distributed  # noqa: F401 (registers the backend)
from iris.ccl.select import Choice
from iris.errors import OutOfStepError, WrongDeviceError
from iris.heap.pool import is_handed_out

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# Above what goes through queues in any case, in elements of float32.
PIECE = 24_000


def make_group(ctx, ranks=None):
    return dist.new_group(ranks, backend=f"{ctx.device.type}:iris")


def sent_by_queues(group, device):
    """What the counts of the group's queues say: that changes with every block that goes through one."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return [line for line in group.context(device).ccl.communicator().workspace.progress() if "blocks sent" in line]


def blocks_sent(group, device, call):
    """Whether ``call()`` has sent blocks through queues."""
    call()  # which makes the queues

    def counts():
        return [line.partition("; calls that")[0] for line in sent_by_queues(group, device)]

    before = counts()
    call()
    return counts() != before


def values(ctx, count, rank, call):
    """A rank's data: each element another one, exact in sums."""
    return (torch.arange(count, device=ctx.device) * (rank + 1) % 1009 + 7 * call).float()


def calls(ctx, regions):
    """Collectives of tensors that the group has made, in memory that it got in several steps, and elsewhere."""
    group, device, size, rank = make_group(ctx), ctx.device, ctx.num_ranks, ctx.cur_rank
    assert group.supports_tensor_alloc(device) and group._get_backend(device) is group
    take = functools.partial(group.allocate_tensor, dtype=torch.float32, device=device)
    comm = group.context(device).ccl.communicator()
    # By the table of a GPU; the simulator's has no sums that are read where they lie.
    comm.table = comm.table | {"reduce_scatter on few SMs": [Choice(None, "pull", None)]}
    # What one rank has kept moves its later tensors to other places than those of the others.
    kept = []
    while comm.regions <= regions:
        # Few at a time, with more in each, so that new ones lie in the memory that came last.
        kept += [take(PIECE * size * (comm.regions + len(kept)))]
    if rank:
        kept.clear()
    number = 0

    def gather(output):
        nonlocal number
        number += 1
        own = output[rank * PIECE :][:PIECE]
        own.copy_(values(ctx, PIECE, rank, number))
        dist.all_gather_into_tensor(output, own, group=group)
        expected = torch.cat([values(ctx, PIECE, peer, number) for peer in range(size)])
        assert torch.equal(output, expected)

    def scatter(output, input):
        nonlocal number
        number += 1
        input.copy_(values(ctx, PIECE * size, rank, number))
        dist.reduce_scatter_tensor(output, input, dist.ReduceOp.SUM, group=group)
        whole = sum(values(ctx, PIECE * size, peer, number) for peer in range(size))
        assert torch.equal(output, whole.view(size, PIECE)[rank])

    whole, part = take(PIECE * size), take(PIECE)
    assert is_handed_out(whole[3:])
    assert not blocks_sent(group, device, lambda: gather(whole))
    assert not blocks_sent(group, device, lambda: scatter(part, whole))
    # A rank without room has a tensor of torch's, and all of them go another way; so do tensors that start askew.
    other = group._memory._pool._from_torch(PIECE * size, torch.float32, whole.untyped_storage().iris_owner)
    mine = other if rank == 0 else whole
    assert blocks_sent(group, device, lambda: scatter(part, mine))
    gather(mine)
    gather(take(PIECE * size + 1)[1:])
    # Memory of the last tensors is used again, and not that of those which are alive.
    taken = {whole.data_ptr(), part.data_ptr()}
    for _ in range(6):
        again = take(PIECE * size)
        assert again.data_ptr() not in taken
        gather(again)
        scatter(part, again)
    dist.destroy_process_group(group)
    # Memory stays as long as a tensor is over it.
    assert torch.equal(whole + 0, whole)


@pytest.mark.ranks(*((2, 3) if EVERYTHING else (2,)))
@pytest.mark.parametrize("regions", [thorough(1), 3])
def test_what_a_group_has_made_needs_no_staging(ranks, regions):
    ranks.run(calls, regions)


def alone_and_elsewhere(ctx):
    group = [make_group(ctx, [rank]) for rank in range(ctx.num_ranks)][ctx.cur_rank]
    alone = group.allocate_tensor(5, dtype=torch.int8, device=ctx.device)
    assert alone.shape == (5,) and is_handed_out(alone)
    group = make_group(ctx)
    empty = group.allocate_tensor(0, dtype=torch.int8, device=ctx.device)
    assert empty.shape == (0,) and empty.dtype == torch.int8
    assert not group.supports_tensor_alloc(torch.device("meta"))
    with pytest.raises(WrongDeviceError, match="was asked for a tensor on meta"):
        group.allocate_tensor(4, dtype=torch.int8, device=torch.device("meta"))
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_small_groups_and_other_devices(ranks):
    ranks.run(alone_and_elsewhere)


def out_of_step(ctx):
    """The second call of a group is one at which its ranks meet."""
    group, device = make_group(ctx), ctx.device
    group.allocate_tensor(PIECE, dtype=torch.float32, device=device)
    with pytest.raises(OutOfStepError, match=r"call 2 of allocate_tensor\(\) of a process group"):
        if ctx.cur_rank:
            group.allocate_tensor(PIECE, dtype=torch.float32, device=device)
        else:
            group.context(device).barrier()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_ranks_that_make_other_calls_are_told(ranks, mistaken):
    ranks.run(out_of_step)


# A layer of float32 is gathered from pieces of more than 64 KiB, which go straight to their places.
WIDTH, ROWS, STEPS = 190, 3, 3


def model(ctx, dtype=None):
    torch.manual_seed(5)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    return torch.nn.Sequential(*layers).to(ctx.device)


def sharded(network, mesh, **options):
    """By FSDP2, with memory of the process group."""
    for layer in (*network, network):
        fully_shard(layer, mesh=mesh, **options)
    for module in network.modules():
        assert isinstance(module, FSDPModule)
        module.set_allocate_memory_from_process_group_for_comm(True)
    return network


def train(ctx, network, rows, scale=1.0):
    """Losses of each step, of a rank's rows of each batch or of all of them."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(7)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(ROWS * ctx.num_ranks, WIDTH, generator=generator).to(ctx.device)
        loss = network(batch[rows]).square().mean()
        (scale * loss).backward()
        losses.append(loss.detach())
        if step < STEPS - 1:  # whose gradients stay
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses)


@functools.cache
def mesh_of(ctx, shape):
    """DTensor remembers meshes by their ranks, and would ask for a group of an equal mesh that has been destroyed."""
    if len(shape) == 1:
        return DeviceMesh.from_group(make_group(ctx), ctx.device.type)
    ranks = torch.arange(ctx.num_ranks).view(shape)
    row = [make_group(ctx, each) for each in ranks.tolist()][ctx.cur_rank // shape[1]]
    column = [make_group(ctx, each) for each in ranks.t().tolist()][ctx.cur_rank % shape[1]]
    return DeviceMesh.from_group([column, row], ctx.device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def fsdp(ctx, shape, factor, dtype):
    shape = shape or (ctx.num_ranks,)
    exact, mesh = model(ctx), mesh_of(ctx, shape)
    # SGD with gradients divided by the factor instead of by the number of ranks.
    expected = train(ctx, exact, slice(None), ctx.num_ranks / (factor or ctx.num_ranks))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    network = sharded(model(ctx), mesh, mp_policy=policy)
    if factor:
        for module in network.modules():
            module.set_gradient_divide_factor(factor)
    losses = train(ctx, network, slice(ROWS * ctx.cur_rank, ROWS * (ctx.cur_rank + 1)))
    dist.all_reduce(losses, dist.ReduceOp.AVG, group=ctx_group(ctx))
    near = {} if dtype is None else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(losses.float(), expected, **near)
    for mine, reference in zip(network.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), reference, **near)
        torch.testing.assert_close(mine.grad.full_tensor(), reference.grad, **near)
    group = mesh.get_group("shard" if len(shape) > 1 else 0)
    memory = group._memory
    if len(shape) > 1:
        assert memory._pool.size > 0
        return
    before = memory._pool.size
    assert before > 0 and memory._calls >= 6 * STEPS  # of each layer: once gathered, and summed up from one to another
    train(ctx, network, slice(ROWS * ctx.cur_rank, ROWS * (ctx.cur_rank + 1)))
    # Later steps fit in what the first ones needed.
    assert memory._pool.size == before
    assert all(block.region is not None for block in memory._pool._blocks.values())


@functools.cache
def ctx_group(ctx):
    return make_group(ctx)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [thorough(None), 3.0])
@pytest.mark.parametrize("dtype", [thorough(None), torch.bfloat16], ids=str)
def test_fully_sharded_training_is_that_of_one_process(ranks, factor, dtype):
    ranks.run(fsdp, None, factor, dtype)


@pytest.mark.thorough
@pytest.mark.ranks(4, exactly=True)
@pytest.mark.parametrize("factor", [None, 3.0])
def test_hybrid_sharding_is_that_of_one_process(ranks, factor):
    ranks.run(fsdp, (2, 2), factor, None)
