"""The backend "iris" over several hosts: the calls of torch.distributed, training in parallel, and what is refused."""

import functools
import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import UNDER_TORCHRUN, import_path
from covering import SAMPLED, thorough
from preloaded import LIMIT_S, python
from rank_pool import FEWER_HOSTS, Hosts, needs_gloo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import iris.distributed  # noqa: F401 (registers the backend)
from ccl.test_process_group import (
    ROWS,
    assert_trained_alike,
    collectives,
    make_group,
    model,
    train,
    unequal_parts_and_messages,
    values,
)
from iris.errors import GroupAbortedError, InvalidGroupError

PROGRAM = Path(__file__).parents[1] / "programs" / "train_on_a_mesh.py"

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def call_all(ctx, hosts):
    """By all ranks; by one of each host; by those of one host, which `test_process_group` tests as well."""
    by_host = [hosts.ranks_of(host) for host in range(hosts.hosts)]
    within_hosts = [] if SAMPLED else [by_host]
    for groups in ([range(ctx.num_ranks)], zip(*by_host, strict=True), *within_hosts):
        made = [(make_group(ctx, sorted(members)), sorted(members)) for members in groups]
        group, members = next((group, members) for group, members in made if ctx.cur_rank in members)
        collectives(ctx, group, members)
        unequal_parts_and_messages(ctx, group, members)
        parts, mine = list(values(ctx, 6, ctx.cur_rank).repeat(len(members)).split(6)), members.index(ctx.cur_rank)
        received = [torch.empty_like(part) for part in parts]
        dist.all_to_all(received, [part + peer for peer, part in enumerate(parts)], group=group)
        assert torch.equal(torch.stack(received), torch.stack([values(ctx, 6, rank) + mine for rank in members]))
        together = dist.distributed_c10d._coalescing_manager
        sums = [values(ctx, 4, ctx.cur_rank), values(ctx, 3, ctx.cur_rank, 1)]
        with together(group, device=ctx.device):
            for total in sums:
                dist.all_reduce(total, group=group)
        for call, total in enumerate(sums):
            assert torch.equal(total, sum(values(ctx, len(total), rank, call) for rank in members))
        futures = [dist.all_reduce(values(ctx, 5, ctx.cur_rank, n), group=group, async_op=True) for n in range(3)]
        for n, work in enumerate(futures):
            assert torch.equal(work.get_future().wait()[0], sum(values(ctx, 5, rank, n) for rank in members))
        dist.destroy_process_group(group)
    ctx.barrier()


@pytest.mark.ranks(*FEWER_HOSTS)
def test_collectives(ranks):
    ranks.run(call_all, ranks.hosts)


@functools.cache
def lasting_groups(ctx, axes):
    """DTensor remembers meshes by their ranks, and would ask for groups of an equal mesh that have been destroyed."""
    made = [[(make_group(ctx, list(members)), members) for members in groups] for groups in axes]
    return [next(group for group, members in groups if ctx.cur_rank in members) for groups in made]


def train_in_parallel(ctx, hosts, how):
    """A model trained by all ranks, each on rows of its own, is the one that a single rank would have trained."""
    expected = train(ctx, model(ctx), slice(None))
    own = slice(ROWS * ctx.cur_rank, ROWS * (ctx.cur_rank + 1))
    if how == "data parallel":
        (everyone,) = lasting_groups(ctx, ((tuple(range(ctx.num_ranks)),),))
        network = train(ctx, DistributedDataParallel(model(ctx), process_group=everyone), own)
        assert_trained_alike(network, expected)
        return
    rows = tuple(tuple(hosts.ranks_of(host)) for host in range(hosts.hosts))
    mesh = DeviceMesh.from_group(
        lasting_groups(ctx, (tuple(zip(*rows, strict=True)), rows)),
        ctx.device.type,
        mesh=torch.tensor(rows),
        mesh_dim_names=("replicate", "shard"),
    )
    network = model(ctx)
    for layer in (network[0], network[2]):
        fully_shard(layer, mesh=mesh)
    network = train(ctx, fully_shard(network, mesh=mesh), own)
    assert all(isinstance(parameter, DTensor) for parameter in network.parameters())
    assert_trained_alike(network, expected)


@pytest.mark.ranks(*FEWER_HOSTS)
@pytest.mark.parametrize("how", [thorough("data parallel"), "fully sharded within hosts"])
def test_training(ranks, how):
    ranks.run(train_in_parallel, ranks.hosts, how)


@pytest.mark.thorough
@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
def test_a_program_that_names_the_backend_alone_trains_on_a_mesh_of_hosts():
    done = subprocess.run(
        [*python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", PROGRAM],
        env={**os.environ, "PYTHONPATH": import_path(), "IRIS_SIMULATOR": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as by one process") == 4 * 4


def ask_for_uneven_hosts(ctx, members):
    group, x = make_group(ctx, members), torch.ones(3, device=ctx.device)
    if ctx.cur_rank in members:
        with pytest.raises(InvalidGroupError, match="2 on host0, 1 on host1"):
            dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
    ctx.barrier()


@pytest.mark.ranks(Hosts(2, 2), exactly=True)
def test_other_numbers_on_each_host_are_refused(ranks):
    ranks.run(ask_for_uneven_hosts, [0, 1, 2])


def break_off(ctx):
    """Who aborts a group does so on all hosts."""
    group, x = make_group(ctx), torch.ones(3, device=ctx.device)
    dist.all_reduce(x, group=group)
    if ctx.cur_rank == 0:
        group.abort()
    ctx.barrier()
    with pytest.raises(GroupAbortedError, match=r"rank 0 called abort\(\)"):
        dist.all_reduce(x, group=group)
    ctx.barrier()
    dist.destroy_process_group(group)


@needs_gloo
@pytest.mark.ranks(Hosts(2, 2))
def test_an_aborted_group_is_of_no_more_use_on_any_host(ranks):
    ranks.run(break_off)
