"""The ways in which programs of Hugging Face's start: from_pretrained with a plan, accelerate, and Trainer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import UNDER_TORCHRUN, import_path
from covering import thorough
from preloaded import LIMIT_S

from integrations.models import (
    CONFIGS,
    AutoModelForCausalLM,
    DistributedConfig,
    by_one_process,
    close,
    registered,
    token_ids,
    whole,
)
from iris.integrations.transformers import tp_plan

pytest.importorskip("accelerate", reason="accelerate is not installed, by which transformers reads checkpoints")

PROGRAM = Path(__file__).parents[1] / "programs" / "train_by_others.py"


def read(ctx, folder, name, with_plan):
    """A checkpoint that rank 0 has written, of which each rank reads its part."""
    one = by_one_process(name, device=ctx.device)
    folder = folder / name
    if ctx.cur_rank == 0:
        one.save_pretrained(folder)
    ctx.barrier()
    parallel = {"tp_size": ctx.num_ranks, "tp_plan": tp_plan(CONFIGS[name]) if with_plan else "auto"}
    if name == "mixtral":
        parallel |= {"ep_size": ctx.num_ranks, "ep_implementation": "iris"}
    with registered(max_tokens=16):
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**parallel))
    ids = token_ids((2, 5), 0, ctx.device)
    with torch.no_grad():
        close(whole(model(ids).logits), one(ids).logits)


def read_from(ctx, folder, name, with_plan):
    folders = [folder]  # rank 0's, where each rank runs the test and has one
    dist.broadcast_object_list(folders, src=0)
    read(ctx, folders[0], name, with_plan)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    ("name", "with_plan"), [("llama", True), thorough("mixtral", True), thorough("mixtral", False)]
)
def test_checkpoints_are_read(ranks, tmp_path, name, with_plan):
    ranks.run(read_from, tmp_path, name, with_plan)


@pytest.mark.thorough
@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own; run it without torchrun")
@pytest.mark.parametrize("by", ["accelerator", "trainer"])
def test_others_train_on_the_backend(by):
    """With ``--named`` the program is for GPUs: of CPUs accelerate takes Gloo and MPI alone, if it is to choose."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM, by],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert f"{by}: as by one process" in done.stdout
