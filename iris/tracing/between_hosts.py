"""Gathers the recordings of other hosts' ranks: hosts share no files, so the bytes go along the rails."""

from pathlib import Path

import torch

from iris.world import Group, Hosts, Rail

# How many bytes of a file are gathered at a time.
CHUNK = 16 << 20


def gather_files(group: Group, hosts: Hosts, rail: Rail, own: Path, device: torch.device) -> dict[int, bytes]:
    """The recordings of the ranks with this local rank on other hosts, as files' contents, by rank in the group.

    ``own``: the file of this rank. Collective over all ranks; blocks the host.
    """
    sizes = group.agree(lambda: own.stat().st_size, "find the file with its events")
    content = own.read_bytes()
    files = {rank: bytearray() for rank in hosts.rail}
    for begin in range(0, max(sizes[rank] for rank in hosts.rail), CHUNK):
        part = content[begin : begin + CHUNK]
        size = min(CHUNK, max(sizes[rank] for rank in hosts.rail) - begin)
        mine = torch.frombuffer(bytearray(part.ljust(size, b"\0")), dtype=torch.uint8).to(device)
        everyone = mine.new_empty(len(hosts), size)
        rail.all_gather(everyone, mine, "the events of all hosts")()
        for rank, row in zip(hosts.rail, everyone.cpu(), strict=True):
            files[rank] += row.numpy().tobytes()
    return {rank: bytes(file[: sizes[rank]]) for rank, file in files.items() if rank != group.rank}
