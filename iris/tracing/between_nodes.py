"""``python -m iris trace`` on several nodes: sends the recordings of other nodes' ranks to rank 0, which shows them.

A node is what one agent of torchrun has started. Nodes share no files. When the program of a rank is over, its command
(``python -m iris trace``, which has started the program) sends its files through the store that torchrun's agents
share, and which lives as long as they do. A file is sent in parts, one at a time: the sender puts the next part into
the store when rank 0 has taken the one before.

Each command has a heartbeat: a number in the store that it raises. So a command waits for another one as long as that
lives, also for as long as its program takes, and no longer.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from iris.commands.shared_folder import whole
from iris.world.store import put

# The store takes no more than 8 MiB at a time (torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp, MAX_PAYLOAD_LEN).
PART = 4 << 20
# Seconds between two heartbeats; and after how many without one a command counts as gone.
BEAT_S, SILENCE_S = 5.0, 30.0
# The pause between two looks is a share of the time waited so far: parts follow each other fast, and a thousand ranks
# that wait for the program of rank 0 leave the store to those that run.
SHARE, PAUSES_S = 1 / 8, (0.002, 1.0)
# Other programs may wait for one that has failed, and torchrun ends them only when the command of the failed one has
# ended. So a command whose program has failed waits no longer than FAILED_S for other programs. When it ends, torchrun
# also ends commands that still send files: so it waits until rank 0 has the files of all, but no longer than TAKEN_S.
FAILED_S, TAKEN_S = 10.0, 60.0

# What a command does: its program runs; rank 0 takes files; rank 0 shows them; it is over.
_RUNS, _TAKES, _SHOWS, _OVER = "runs", "takes", "shows", "over"


def store() -> dist.Store | None:
    """torchrun's store, for these commands. None if the agents do not hold it: then it ends with a program."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        client = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    except dist.DistError:
        return None
    return dist.PrefixStore(f"iris/trace/{restart}", client)


class FileExchange:
    """One command's part in the exchange: its heartbeat, and sending or taking files. Without a store it does nothing.

    A context manager: when it is left, other commands do not wait for this one any more.
    """

    def __init__(self, store: dist.Store | None, rank: int) -> None:
        self._store, self._rank = store, rank
        self._does, self._left, self._until = _RUNS, threading.Event(), math.inf
        self._thread = threading.Thread(target=self._beat, name="iris-trace", daemon=True)

    def __enter__(self) -> "FileExchange":
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._left.set()
            self._thread.join()
            self._show(_OVER)

    def send(self, files: Sequence[Path], failed: bool) -> None:
        """Send these files to rank 0. Blocks until rank 0 has them, or is gone.

        ``failed``: whether the program of this rank has failed. Then it waits no longer than `FAILED_S` while the
        program of rank 0 runs; and at the end it waits until rank 0 has the files of all ranks, `TAKEN_S` at most.
        """
        if self._store is None:
            return
        with contextlib.suppress(dist.DistError):
            self._set("files", json.dumps([(file.name, file.stat().st_size) for file in files]).encode())
            begin = time.monotonic()
            for number, part in enumerate(_parts(files)):
                self._set(f"part/{number}", part)
                key = f"{self._rank}/part/{number}"
                for does in self._states(0):
                    if not self._has(key):
                        break
                    if does == _OVER or (failed and does == _RUNS and time.monotonic() - begin > FAILED_S):
                        return
                else:
                    return
            begin = time.monotonic()
            for does in self._states(0) if failed else ():
                waited = time.monotonic() - begin
                if does in (_SHOWS, _OVER) or waited > (FAILED_S if does == _RUNS else TAKEN_S):
                    return

    def take(self, ranks: Sequence[int], folder: Path, failed: bool) -> None:
        """On rank 0: take the files of these ranks into the folder, as far as they come. Blocks.

        ``failed``: whether its own program has failed. Then it waits `FAILED_S` in all for programs that still run.
        """
        if self._store is None:
            return
        self._until = time.monotonic() + FAILED_S if failed else math.inf
        self._does = _TAKES
        self._show(_TAKES)
        with contextlib.suppress(dist.DistError):
            for rank in ranks:
                self._take(rank, folder)
            self._does = _SHOWS
            self._show(_SHOWS)

    def _take(self, rank: int, folder: Path) -> None:
        files, number = self._get(rank, "files"), 0
        for name, size in json.loads(files) if files is not None else ():
            content = bytearray()
            while len(content) < size:
                part = self._get(rank, f"part/{number}")
                if part is None:
                    return
                content += part
                number += 1
            with whole(folder / Path(name).name) as file:
                file.write_bytes(content)

    def _get(self, rank: int, what: str) -> bytes | None:
        """Wait for what a rank sends, and remove it from the store. None if the rank's command is gone."""
        assert self._store is not None
        key = f"{rank}/{what}"
        for does in self._states(rank):
            if self._has(key):
                value = self._store.get(key)
                self._store.delete_key(key)
                return value
            if does == _OVER or (does == _RUNS and what == "files" and time.monotonic() > self._until):
                return None
        return None

    def _states(self, rank: int) -> Iterator[str]:
        """What a rank's command does, again and again, with a pause. It ends when the command counts as gone."""
        assert self._store is not None
        begin = changed = now = time.monotonic()
        last, (shortest, longest) = b"", PAUSES_S
        while now - changed < SILENCE_S:
            beat = self._store.get(f"{rank}/beat") if self._has(f"{rank}/beat") else b""
            if beat != last:
                last, changed = beat, now
            yield beat.decode().partition(" ")[0]
            time.sleep(min(max((now - begin) * SHARE, shortest), longest))
            now = time.monotonic()

    def _has(self, key: str) -> bool:
        assert self._store is not None
        return self._store.check([key])

    def _set(self, key: str, value: bytes) -> None:
        assert self._store is not None
        put(self._store, f"{self._rank}/{key}", value)

    def _beat(self) -> None:
        number = 0
        while not self._left.is_set():
            number += 1
            self._show(f"{self._does} {number}")
            self._left.wait(BEAT_S)

    def _show(self, what: str) -> None:
        if self._store is not None:
            with contextlib.suppress(dist.DistError):
                self._set("beat", what.encode())


def _parts(files: Sequence[Path]) -> Iterator[bytes]:
    for each in files:
        with open(each, "rb") as file:
            while part := file.read(PART):
                yield part
