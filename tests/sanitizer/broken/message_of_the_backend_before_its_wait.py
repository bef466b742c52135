"""The host clears a tensor into which a message is on its way, by the backend of Iris; and waits after that."""

import torch
import torch.distributed as dist
from program import command

import iris

KIND = "race"
N, CALLS = 64, 3


def main(ctx: iris.Iris, broken: bool) -> None:
    group, peer = dist.new_group(backend="iris"), 1 - ctx.get_rank()
    got = torch.zeros(N, dtype=torch.int32)
    for call in range(CALLS):
        x = torch.arange(N, dtype=torch.int32) + 100 * call + 7 * ctx.get_rank()
        if not broken:
            got.zero_()
        messages = [dist.irecv(got, peer, group=group), dist.isend(x, peer, group=group)]  # first
        if broken:
            got.zero_()  # second
        for message in messages:
            message.wait()
        assert broken or got.tolist() == [i + 100 * call + 7 * peer for i in range(N)]
    ctx.barrier()
    dist.destroy_process_group(group)


if __name__ == "__main__":
    command(main)
