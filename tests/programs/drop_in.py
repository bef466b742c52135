"""Programs as others write them, of which only the backend's name is Iris': each part checks its own results.

    torchrun --nproc-per-node 2 tests/programs/drop_in.py [PART ...] [--backend nccl]

What is compiled goes through torch.compile(mode="reduce-overhead"), so it runs in CUDA graphs. In the simulator, which
has none, it is traced alone. ``--backend nccl`` is for comparison, and is Gloo there.
"""

import argparse
import os
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TURNS = 5  # of what is compiled: a graph is recorded in the second or third


def compiled(function):
    how = {"mode": "reduce-overhead"} if ON_GPU else {"backend": "aot_eager"}
    run = torch.compile(function, **how)

    def call(*given):
        torch.compiler.cudagraph_mark_step_begin()
        return run(*given)

    return call


def random(*shape, seed):
    """The same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(DEVICE)


def train(network, batches, rate=0.1, optimizer=torch.optim.SGD):
    optimizer = optimizer(network.parameters(), lr=rate)
    for batch in batches:
        optimizer.zero_grad()
        network(batch).square().mean().backward()
        optimizer.step()
    return network


def assert_trained_alike(network, expected):
    for parameter, reference in zip(network.parameters(), expected.parameters(), strict=True):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert_close(whole, reference, rtol=1e-4, atol=1e-5)


# Parts ---------------------------------------------------------------------------------------------------------------


def objects():
    found = [None] * SIZE
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": rank} for rank in range(SIZE)]
    box = [{"a": 1}] if RANK == 0 else [None]
    dist.broadcast_object_list(box, src=0, device=DEVICE)
    assert box == [{"a": 1}]
    found = [None] * SIZE if RANK == 0 else None
    dist.gather_object(RANK, found, dst=0)
    assert found in (None, list(range(SIZE)))


def lists():
    parts = random(SIZE, SIZE, 3, 4, seed=1)  # [from, to]
    mine = parts[RANK]
    found = [torch.empty_like(mine) for _ in range(SIZE)]
    dist.all_gather(found, mine)
    assert_close(torch.stack(found), parts)
    one = torch.empty_like(mine[0])
    dist.reduce_scatter(one, list(mine.clone()))
    assert_close(one, parts[:, RANK].sum(0))
    found = [torch.empty_like(one) for _ in range(SIZE)]
    dist.all_to_all(found, list(mine.clone()))
    assert_close(torch.stack(found), parts[:, RANK])
    dist.scatter(one, list(mine.clone()) if RANK == 0 else None, src=0)
    assert_close(one, parts[0, RANK])
    found = [torch.empty_like(mine) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(mine, found, dst=0)
    assert found is None or torch.equal(torch.stack(found), parts)
    uneven = [torch.empty(rank + 1, device=DEVICE) for rank in range(SIZE)]
    dist.all_gather(uneven, parts.flatten()[: RANK + 1] + RANK)
    assert all(torch.equal(each, parts.flatten()[: rank + 1] + rank) for rank, each in enumerate(uneven))
    for dtype in (torch.bool, torch.int64, torch.float64, torch.complex64, torch.uint8, torch.float8_e4m3fn):
        given = (torch.arange(5, device=DEVICE) % 2 + RANK).to(dtype)
        dist.broadcast(given, 0)
        assert given.float().tolist() == [0, 1, 0, 1, 0] if not dtype.is_complex else given.real.sum() == 2


def messages():
    sent, received = torch.full((1 << 18,), 1.0 + RANK, device=DEVICE), torch.empty(1 << 18, device=DEVICE)
    pair = [dist.P2POp(dist.isend, sent, (RANK + 1) % SIZE), dist.P2POp(dist.irecv, received, (RANK - 1) % SIZE)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert (received == 1 + (RANK - 1) % SIZE).all()


def groups():
    mesh = init_device_mesh(DEVICE.type, (1, SIZE), mesh_dim_names=("dp", "tp"))
    alone = [dist.new_group([rank]) for rank in range(SIZE)][RANK]
    for group, size in ((mesh["tp"].get_group(), SIZE), (mesh["dp"].get_group(), 1), (alone, 1)):
        x = torch.arange(4.0, device=DEVICE)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [0, size, 2 * size, 3 * size]


def data_parallel(compile=False):
    network = DistributedDataParallel(mlp(), device_ids=[DEVICE.index] if ON_GPU else None)
    batches = random(TURNS, SIZE, 4, 32, seed=2)
    run = compiled(network) if compile else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad(set_to_none=False)
        run(batch[RANK]).square().mean().backward()
        optimizer.step()
    assert_trained_alike(network.module, train(mlp(), batches.flatten(1, 2)))
    with network.no_sync():
        network(batches[0, RANK]).sum().backward()


def data_parallel_compiled():
    data_parallel(compile=True)


def fully_sharded():
    network, batches = mlp(), random(TURNS, SIZE, 4, 32, seed=3)
    for layer in (network[0], network[2]):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    train(fully_shard(network), batches[:, RANK])
    assert_trained_alike(network, train(mlp(), batches.flatten(1, 2)))
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer = torch.optim.AdamW(network.parameters())
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0, device=DEVICE)
    state = dict(zip(("model", "optimizer"), get_state_dict(network, optimizer), strict=True))
    checkpoint.save(state, checkpoint_id=folder[0])
    before = [parameter.detach().clone() for parameter in network.parameters()]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    checkpoint.load(state, checkpoint_id=folder[0])
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(network.parameters(), before, strict=True))


def tensor_parallel():
    mesh, one = init_device_mesh(DEVICE.type, (SIZE,)), mlp(4)
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    network = parallelize_module(mlp(4), mesh, plan)
    run = compiled(network)
    for turn in range(TURNS):
        x = random(8 * SIZE, 32, seed=10 + turn)
        results = []
        for call, given in ((run, x.chunk(SIZE)[RANK]), (one, x)):
            out = call(given)
            out.sin().sum().backward()
            results.append(out.detach().clone())
        assert_close(results[0], results[1].chunk(SIZE)[RANK], rtol=1e-3, atol=1e-3)
        for parameter, reference in zip(network.parameters(), one.parameters(), strict=True):
            assert_close(parameter.grad.full_tensor(), reference.grad, rtol=1e-3, atol=1e-3)
            # A graph's gradient may not be added to in the next turn: its memory is written by each replay.
            parameter.grad = reference.grad = None


def functional():
    def chain(x):
        x = funcol.all_reduce(torch.tanh(x), "sum", dist.group.WORLD)
        x = funcol.all_gather_tensor_autograd(x * (1 + RANK), 0, dist.group.WORLD)
        return funcol.reduce_scatter_tensor(x, "avg", 0, dist.group.WORLD) + 1

    def in_place(x):
        x = x * 3
        dist.all_reduce(x)
        return x.sin()

    with torch.no_grad():
        runs = [compiled(each) for each in (chain, in_place)]
        for turn in range(TURNS):
            x = random(SIZE, 4, 8, seed=20 + turn)
            total = torch.tanh(x).sum(0)
            assert_close(runs[0](x[RANK]), total * (1 + RANK) + 1, rtol=1e-4, atol=1e-4)
            assert_close(runs[1](x[RANK]), (3 * x).sum(0).sin(), rtol=1e-4, atol=1e-4)
    x = random(SIZE, SIZE, 3, seed=6)
    mine = x[RANK].clone().requires_grad_()
    out = funcol.all_to_all_single_autograd(mine, None, None, dist.group.WORLD)
    assert_close(out.detach(), x[:, RANK])
    (out * (1 + RANK)).sum().backward()
    assert_close(mine.grad, (1.0 + torch.arange(SIZE, device=DEVICE))[:, None].expand(SIZE, 3))


def pipeline():
    """Of SIZE stages, each a layer."""
    torch.manual_seed(7)
    layers = [nn.Linear(32, 32).to(DEVICE) for _ in range(SIZE)]
    x, target = random(16, 32, seed=8), random(16, 32, seed=9)
    schedule = Schedule1F1B(
        PipelineStage(layers[RANK], RANK, SIZE, DEVICE), n_microbatches=4, loss_fn=nn.functional.mse_loss
    )
    given = {"target": target, "losses": []} if RANK == SIZE - 1 else {}
    schedule.step(*([x] if RANK == 0 else []), **given)
    found = layers[RANK].weight.grad.clone()
    for layer in layers:
        layer.zero_grad()
    nn.functional.mse_loss(nn.Sequential(*layers)(x), target).backward()
    assert_close(found, layers[RANK].weight.grad, rtol=1e-3, atol=1e-5)


def sharded_optimizer():
    network, batches = DistributedDataParallel(mlp()), random(3, SIZE, 4, 32, seed=11)

    def optimizer(parameters, lr):
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=lr)

    train(network, batches[:, RANK], optimizer=optimizer)
    assert_trained_alike(network.module, train(mlp(), batches.flatten(1, 2)))


def transformers():
    """Tensor parallel by transformers' own plan, from a checkpoint; for which it needs accelerate."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0, device=DEVICE)
    if RANK == 0:
        torch.manual_seed(12)
        LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64)).save_pretrained(folder[0])
    dist.barrier()
    one = AutoModelForCausalLM.from_pretrained(folder[0]).to(DEVICE)
    model = AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto")
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(13)).to(DEVICE)
    with torch.no_grad():
        assert_close(model(tokens).logits, one(tokens).logits, rtol=2e-2, atol=2e-2)
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
        assert torch.equal(model.generate(tokens, **options), one.generate(tokens, **options))


PARTS = [objects, lists, messages, groups, data_parallel, data_parallel_compiled, fully_sharded, tensor_parallel]
PARTS += [functional, pipeline, sharded_optimizer, transformers]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.__name__ for part in PARTS))
    parser.add_argument("--backend", choices=["iris", "nccl"], default="iris")
    options = parser.parse_args()
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    if options.backend == "iris":
        import iris.distributed  # noqa: F401 (registers the backend)

        dist.init_process_group("cpu:gloo,cuda:iris" if ON_GPU else "cuda:iris")
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    for part in PARTS:
        if options.parts and part.__name__ not in options.parts:
            continue
        begin = time.perf_counter()
        part()
        if ON_GPU:
            torch.cuda.synchronize()
        dist.barrier()
        if RANK == 0:
            print(f"{part.__name__}: right, {time.perf_counter() - begin:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
