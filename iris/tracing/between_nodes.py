"""Files of ranks on other nodes come to the first one, where ``python -m iris trace`` shows them.

Nodes are torchrun's: what one agent of it has started. They share no files. When the program of a rank is over, its
command sends what that has recorded through the store that torchrun's agents share, which is there as long as they are.
A file goes in parts, of which one at a time is in the store: its sender puts the next one when rank 0 has taken it.

Each command that takes part shows that it lives, by a number in the store that it raises. So who waits for another one
waits as long as that lives, and no longer, and for a program of another rank as long as that takes.
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
# How often a command shows that it lives, and after how long without it counts as gone.
BEAT_S, SILENCE_S = 5.0, 30.0
# The pause between two looks is a share of the time waited so far: parts follow each other fast, and a thousand ranks
# that wait for the program of rank 0 leave the store to those that run.
SHARE, PAUSES_S = 1 / 8, (0.002, 1.0)
# torchrun ends the other ranks of a node only when a command has ended by an error, and they may wait for what has
# failed. So a command whose program has failed waits for programs of others no longer than this; and for rank 0 to have
# the files of all, before torchrun ends those that send some, no longer than that.
FAILED_S, TAKEN_S = 10.0, 60.0

_RUNS, _TAKES, _SHOWS, _OVER = "runs", "takes", "shows", "over"


def store() -> dist.Store | None:
    """torchrun's, for what these commands exchange; None where it is not its agents' own, and ends with the program."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        client = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    except dist.DistError:
        return None
    return dist.PrefixStore(f"iris/trace/{restart}", client)


class Courier:
    """The command of a rank, for those of other nodes. Without a store nobody hears of it.

    A context manager: when it is left, the others do not wait for this command any more.
    """

    def __init__(self, store: dist.Store | None, rank: int) -> None:
        self._store, self._rank = store, rank
        self._does, self._left, self._until = _RUNS, threading.Event(), math.inf
        self._thread = threading.Thread(target=self._beat, name="iris-trace", daemon=True)

    def __enter__(self) -> "Courier":
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._left.set()
            self._thread.join()
            self._show(_OVER)

    def send(self, files: Sequence[Path], failed: bool) -> None:
        """Let rank 0 have these files. Blocks until it has them, or is gone.

        ``failed``: the program of this rank has. Then it blocks for `FAILED_S` while that of rank 0 runs; and until
        rank 0 has those of all ranks, as torchrun ends the others of this node when this command ends by an error.
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
        """Rank 0 takes the files of these ranks: into the folder, as far as they come. Blocks.

        ``failed``: its own program has. Then it waits for programs that still run for `FAILED_S` in all.
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
        """What a rank sends, which is gone then; None if it is gone itself."""
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
        """What a rank's command does, again and again while that lives."""
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
