"""Trains as programs do that know nothing of Iris but the backend's name: DDP, FSDP2 on a mesh, tensor parallel layers,
and these within a host with FSDP2 over hosts.

Under torchrun, four ranks on two hosts, or on one machine, where they count as two; the mesh replicates over hosts and
shards within them. Each result is that of the same steps by one process.
"""

import os

if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
    os.environ["IRIS_HOST"] = f"host{int(os.environ['RANK']) // 2}"

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import iris.distributed  # noqa: F401 (registers the backend)

STEPS, ROWS, FEATURES = 2, 4, 8


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 2 * FEATURES), torch.nn.GELU(), torch.nn.Linear(2 * FEATURES, FEATURES)
    )


def train(network, batch):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        network(batch + step).square().mean().backward()
        optimizer.step()
    return network


def main():
    dist.init_process_group("cpu:iris")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(5)
    batch = torch.randn(ROWS * dist.get_world_size(), FEATURES)
    own = batch[ROWS * dist.get_rank() :][:ROWS]
    expected = train(model(), batch)
    # Of a host, whose ranks share a model.
    shared = batch.chunk(2)[mesh["replicate"].get_local_rank()]
    layers = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def split():
        return parallelize_module(model(), mesh["shard"], layers)

    for name, trained in {
        "data parallel": train(DistributedDataParallel(model()), own),
        "fully sharded": train(fully_shard(model(), mesh=mesh), own),
        "tensor parallel": train(split(), batch),
        "tensor parallel, sharded over hosts": train(fully_shard(split(), mesh=mesh["replicate"]), shared),
    }.items():
        for parameter, reference in zip(trained.parameters(), expected.parameters(), strict=True):
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            torch.testing.assert_close(whole, reference)
        print(f"{name}: as by one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
