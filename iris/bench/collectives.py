"""Collectives side by side: Iris in Triton and in Gluon, the vendor's library, torch's symmetric memory, and others.

All in one run, on tensors of the same random data. Each result is checked once before it is timed, but torch's, whose
sums stay in its buffer. A time is the median over replays of a CUDA graph of several calls, and of the ranks the
slowest counts. Bus bandwidth as nccl-tests define it (their PERFORMANCE.md): what the link of each rank must carry at
least, over the time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from iris import simulator
from iris.bench import optional_peers, peers
from iris.bench.checked import Checked, of_all_ranks, relative_error
from iris.bench.ranks import failure
from iris.bench.repetitions import Repetitions, repetitions
from iris.bench.report import file_name, save_rows
from iris.bench.timing import Operands, capture, counts, do_bench, microseconds_in_turns
from iris.ccl import Config
from iris.ccl.select import name_of_ranks
from iris.ccl.select_over_hosts import IRIS
from iris.context import Iris

SUMS = ("all_reduce", "reduce_scatter")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
# Iris' own steps over hosts, which "iris" may leave to the vendor.
STEPS = "iris steps"
LIBRARIES = ("iris", STEPS, "iris gluon", "nccl", "nccl windows", "torch", *optional_peers.NAMES)
# Of these, those that span hosts.
OVER_HOSTS = ("iris", STEPS, "nccl")


class Row(NamedTuple):
    """One measurement.

    ``sms``: 0 where each library chooses. ``microseconds``: none where the reason is given. ``error``: of sums of
    floats that are checked, against float64 (`relative_error`).
    """

    collective: str
    dtype: str
    bytes: int
    sms: int
    library: str
    microseconds: float | None
    bus_GBps: float | None
    reason: str = ""
    error: float | None = None


class Case(NamedTuple):
    """A library's call on ``operands``. ``checked``: a call that leaves its result there, where ``call`` may not.

    ``capturing``: the context in which graphs of ``call`` are captured.
    """

    operands: Operands
    call: Callable[[], object]
    checked: Callable[[], object]
    capturing: Callable[[], AbstractContextManager[object]] = nullcontext


def bus_bytes(collective: str, nbytes: int, size: int) -> float:
    """Bytes that cross each rank's link at least."""
    share = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0}.get(collective, (size - 1) / size)
    return share * nbytes


def has(library: str, collective: str, limit: int) -> bool:
    """Whether the library has the collective, and can be limited to so many multiprocessors; 0: no limit."""
    if library == "nccl" or library.startswith("iris"):
        return True
    return not limit and (library == "nccl windows" or collective == "all_reduce")


def iris_calls(ctx: Iris, operands: Operands, config: Config | None) -> peers.ByName:
    """Iris on these tensors."""
    x, out, part = operands
    return {
        "all_reduce": lambda: ctx.ccl.all_reduce(out, x, config=config),
        "all_gather": lambda: ctx.ccl.all_gather(out, part, config=config),
        "reduce_scatter": lambda: ctx.ccl.reduce_scatter(part, x, config=config),
        "all_to_all": lambda: ctx.ccl.all_to_all(out, x, config=config),
        "broadcast": lambda: ctx.ccl.broadcast(out, 0, config=config),
    }


def fill(ctx: Iris, operands: Operands, nbytes: int) -> None:
    """Random data that differ between ranks, the same for every library."""
    generator = torch.Generator(ctx.device).manual_seed(nbytes + ctx.cur_rank)
    for tensor in operands:
        if tensor.is_floating_point():
            tensor.normal_(generator=generator)
        else:
            tensor.random_(-100, 100, generator=generator)


def expected(ctx: Iris, collective: str, operands: Operands) -> torch.Tensor:
    """The result by torch.distributed, in float64 where it is a sum."""
    x, out, part = operands
    if collective in SUMS:
        result = x.to(torch.float64, copy=True)
        dist.all_reduce(result)
        if collective == "reduce_scatter":
            result = result.chunk(ctx.num_ranks)[ctx.cur_rank]
    elif collective == "all_gather":
        result = torch.empty_like(out)
        dist.all_gather_into_tensor(result, part.clone())
    elif collective == "all_to_all":
        result = torch.empty_like(out)
        if simulator.ACTIVE:
            rows = [torch.empty_like(x) for _ in range(ctx.num_ranks)]
            dist.all_gather(rows, x.clone())
            result = torch.cat([row.chunk(ctx.num_ranks)[ctx.cur_rank] for row in rows])
        else:
            dist.all_to_all_single(result, x.clone())
    else:
        result = out.clone()
        dist.broadcast(result, 0)
    return result


def check(ctx: Iris, collective: str, operands: Operands, call: Callable[[], object], nbytes: int) -> Checked:
    """What is wrong with the result of a call on this rank."""
    fill(ctx, operands, nbytes)
    wanted = expected(ctx, collective, operands)
    if collective == "all_reduce":
        operands.out.copy_(operands.whole)
    ctx.barrier()
    call()
    got = operands.part if collective == "reduce_scatter" else operands.out
    rounds = collective in SUMS and got.is_floating_point()
    # What is moved, and sums of whole numbers, are exact.
    rtol, atol = (2e-2, 2e-2 * ctx.num_ranks) if rounds else (0.0, 0.0)
    if not torch.allclose(got.double(), wanted.double(), rtol=rtol, atol=atol):
        return Checked("wrong result")
    return Checked("", relative_error(got, wanted) if rounds else None)


def microseconds(ctx: Iris, call: Callable[[], object], nbytes: int) -> float:
    """The slowest rank's time of a call, which has been made before. ``nbytes``: of `repetitions`. Collective."""
    often = repetitions(ctx, call, nbytes)
    return microseconds_of_each(ctx, [ready(ctx, call, often)], often)[0]


def ready(
    ctx: Iris,
    call: Callable[[], object],
    often: Repetitions,
    capturing: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Any:
    """What `microseconds_of_each` takes: on GPUs a graph of calls, else the call itself."""
    if ctx.device.type != "cuda":
        return call
    with capturing():
        return capture(call, ctx.device_barrier, often.per_graph)


def microseconds_of_each(ctx: Iris, readied: Sequence[Any], often: Repetitions) -> list[float]:
    """The slowest rank's time of each call, measured by turns, the same on all ranks. Collective; blocks the host."""
    ctx.barrier()
    if ctx.device.type == "cuda":
        mine = microseconds_in_turns(readied, *often)
    else:
        mine = [1e3 * do_bench(call, ctx.barrier, n_warmup=0, n_repeat=1, return_mode="median") for call in readied]
    everyone = [ctx.broadcast(mine, rank) for rank in range(ctx.num_ranks)]
    return [max(each) for each in zip(*everyone, strict=True)]


def measure(
    ctx: Iris, collectives: list[str], sizes: list[int], sms: Sequence[int], libraries: list[str], dtype: torch.dtype
) -> Iterator[Row]:
    """All rows, as they come. Collective over the world; the rows are the same on all ranks."""
    groups = {count: peers.with_max_ctas(count) for count in sms if count and "nccl" in libraries}
    ctx.device_barrier()
    # NCCL's communicator exists after its first call, and windows need it.
    dist.all_reduce(torch.zeros(1, device=ctx.device))
    windows: list[torch.Tensor] = []
    pool: torch.cuda.MemPool | None = None
    if "nccl windows" in libraries:
        windows, pool = peers.windows(counts(max(sizes), dtype.itemsize, ctx.num_ranks), dtype, ctx.device)
    summed = counts(max(sizes), dtype.itemsize, ctx.num_ranks)[0]
    with optional_peers.opened(ctx, libraries, optional_peers.Largest(summed, 0, dtype)) as others:
        yield from _measure(ctx, collectives, sizes, sms, libraries, dtype, groups, windows, others)
    del windows, pool


def _measure(
    ctx: Iris,
    collectives: list[str],
    sizes: list[int],
    sms: Sequence[int],
    libraries: list[str],
    dtype: torch.dtype,
    groups: dict,
    windows: list[torch.Tensor],
    others: dict[str, optional_peers.Peer],
) -> Iterator[Row]:
    """The rows of `measure`, when all libraries are there.

    ``groups``: NCCL's by the multiprocessors that they may use. ``windows``: `peers.windows`, if they are measured.
    """
    name = str(dtype).removeprefix("torch.")
    for nbytes in sizes:
        shared = counts(nbytes, dtype.itemsize, ctx.num_ranks)
        heap = Operands(*(ctx.empty(n, dtype=dtype) for n in shared))
        plain = Operands(*(torch.empty(n, dtype=dtype, device=ctx.device) for n in shared))
        registered = Operands(*(window[:n] for window, n in zip(windows, shared, strict=True))) if windows else None
        for collective in collectives:
            for limit in sms:
                cases = {
                    library: _case(ctx, library, collective, heap, plain, registered, limit, groups, others)
                    for library in libraries
                    if has(library, collective, limit)
                }
                found: dict[str, Checked] = {}
                readied: dict[str, Any] = {}
                often: Repetitions | None = None
                for library, case in cases.items():
                    found[library] = Checked("") if library == "torch" else _checked(ctx, collective, case, nbytes)
                    if not found[library].reason:
                        often = often or repetitions(ctx, case.call, nbytes)
                        readied[library] = ready(ctx, case.call, often, case.capturing)
                times = [] if often is None else microseconds_of_each(ctx, list(readied.values()), often)
                spent = dict(zip(readied, times, strict=True))
                moved = bus_bytes(collective, heap.whole.nbytes, ctx.num_ranks)
                for library, checked in found.items():
                    speed = moved / spent[library] / 1e3 if library in spent else None
                    yield Row(collective, name, nbytes, limit, library, spent.get(library), speed, *checked)
                ctx.ccl.release_graphs()
        del heap, plain, registered
        ctx.barrier()


def _checked(ctx: Iris, collective: str, case: Case, nbytes: int) -> Checked:
    """A call's result, on all ranks, which go on with one case; what fails is wrong, too."""
    try:
        checked = check(ctx, collective, case.operands, case.checked, nbytes)
    except optional_peers.UnavailableError as error:
        checked = Checked(str(error))
    except Exception as error:  # a peer's failure is a result too
        checked = Checked(failure(error))
    return of_all_ranks(ctx, checked)


def _case(
    ctx: Iris,
    library: str,
    collective: str,
    heap: Operands,
    plain: Operands,
    registered: Operands | None,
    limit: int,
    groups: dict,
    others: dict[str, optional_peers.Peer],
) -> Case:
    """The call of a library, which has that collective and can be limited to ``limit`` multiprocessors; 0: no limit."""

    def of(operands: Operands, call: Callable[[], object]) -> Case:
        return Case(operands, call, call)

    if library == STEPS:
        return of(heap, iris_calls(ctx, heap, Config(over_hosts=IRIS))[collective])
    if library.startswith("iris"):
        config = None
        if limit or library == "iris gluon":
            config = Config(comm_sms=limit or None, use_gluon=library == "iris gluon")
        return of(heap, iris_calls(ctx, heap, config)[collective])
    if library == "nccl":
        return of(plain, peers.vendor(plain, groups.get(limit))[collective])
    if library == "nccl windows":
        assert registered is not None
        return of(registered, peers.vendor(registered)[collective])
    if library in others:
        calls = others[library].all_reduce(library, plain.out, plain.whole)
        return Case(plain, calls.timed, calls.checked, others[library].capturing)
    symmetric = peers.torch_symmetric(plain)
    return of(plain, symmetric["one shot" if plain.whole.nbytes <= 256 << 10 else "two shot"])


def write(folder: Path, num_ranks: int, rows: list[Row], ceiling: dict[str, float], num_hosts: int = 1) -> None:
    """The rows as CSV and JSON, the latter with what they depend on."""
    name = file_name("collectives", rows[0].dtype, name_of_ranks(num_ranks // num_hosts, num_hosts))
    save_rows(folder / f"{name}.csv", num_ranks, num_hosts, rows, **ceiling)
