"""Trains by accelerate's Accelerator or transformers' Trainer on the backend, in one of the ways in which they start.

    torchrun --nproc-per-node 2 tests/programs/train_by_others.py accelerator [--named]

The program has initialised torch.distributed before; with ``--named`` they do it, and are told the backend's name,
which they take where there are GPUs. The parameters are those of the same steps by one process.
"""

import argparse
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import iris
import iris.distributed  # registers the backend

STEPS, EACH, TOKENS, RATE = 3, 2, 7, 0.1
BACKEND = "cuda:iris"


class Sequences(Dataset):
    """As many as ``ranks`` ranks take in all steps, each another one."""

    def __init__(self, ranks):
        self.length = STEPS * EACH * ranks

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        tokens = (3 + number + 2 * torch.arange(TOKENS) * (1 + number % 3)) % 24
        return {"input_ids": tokens, "labels": tokens}


def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=16))


def by_one_process(ranks, device):
    """Steps of which each has the sequences of all ranks."""
    network = model().to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    for batch in DataLoader(Sequences(ranks), batch_size=EACH * ranks):
        optimizer.zero_grad()
        network(**{name: each.to(device) for name, each in batch.items()}).loss.backward()
        optimizer.step()
    return network


def by_accelerator(named):
    handlers = [InitProcessGroupKwargs(backend=BACKEND)] if named else []
    accelerator = Accelerator(cpu=iris.simulator.ACTIVE, kwargs_handlers=handlers)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    data = DataLoader(Sequences(accelerator.num_processes), batch_size=EACH)
    network, optimizer, data = accelerator.prepare(network, optimizer, data)
    for batch in data:
        optimizer.zero_grad()
        loss = network(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
    assert accelerator.gather(loss).shape == (accelerator.num_processes,)
    assert accelerator.reduce(torch.ones(3, device=accelerator.device)).tolist() == [accelerator.num_processes] * 3
    return accelerator.unwrap_model(network)


def by_trainer(named):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=EACH,
            num_train_epochs=1,
            learning_rate=RATE,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0,
            use_cpu=iris.simulator.ACTIVE,
            ddp_backend=BACKEND if named else None,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        ranks = int(os.environ["WORLD_SIZE"])
        trainer = Trainer(model(), arguments, train_dataset=Sequences(ranks), eval_dataset=Sequences(ranks))
        trainer.train()
        trainer.evaluate()
        return trainer.model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("by", choices=["accelerator", "trainer"])
    parser.add_argument("--named", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu")
    if not iris.simulator.ACTIVE:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not options.named:
        dist.init_process_group(BACKEND)
    trained = {"accelerator": by_accelerator, "trainer": by_trainer}[options.by](options.named)
    assert "iris" in dist.get_backend_config(), dist.get_backend_config()
    expected = by_one_process(dist.get_world_size(), device)
    for (name, parameter), reference in zip(trained.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference, msg=lambda text, name=name: f"{name}: {text}")
    if dist.get_rank() == 0:
        print(f"{options.by}: as by one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
