"""What carries a fused operation where the caller does not say."""

from dataclasses import replace

import pytest
import torch

import iris
from iris import simulator
from iris.machine import figures
from iris.ops import FusedConfig
from iris.ops.call import Call
from iris.ops.choose import (
    COPIES,
    TRITON,
    VENDOR,
    Case,
    choose,
    chunks_of,
    kept_us,
    plan,
    read_us,
    rounds_us,
    scheduled_us,
    tile_us,
)
from iris.ops.copies import COPIED, chunks, tiles
from iris.ops.hopper.arguments import Plan, chunk_rows
from iris.ops.kernel import most_programs
from iris.ops.operations import Operations
from iris.ops.portable import TritonKernels

OPERATIONS = ("all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce")
PROGRAMS, READING = 132, 4000  # of an H200
GPU = figures.find("NVIDIA H200").figures


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    """Whose memory the choice is for, whichever GPU the tests run on."""
    monkeypatch.setattr("iris.ops.choose.reading_GBps", lambda gpu: READING)


def call(name, M, N, K, dtype=torch.bfloat16, size=4):
    """One rank's part of a product of these sizes, shared as `python -m iris bench ops` does."""
    rows = M // size if "gather" in name else M
    columns, depth = (N // size, K) if name == "all_gather_matmul" else (N, K if "gather" in name else K // size)
    a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, depth), (depth, columns)))
    rows_out = M // size if name == "matmul_reduce_scatter" else M
    return Call(name, torch.empty(rows_out, columns, dtype=dtype, device="meta"), a, b, None, None, None)


def keeping(given, size):
    """The same call, whose gathered A is kept."""
    (rows, depth), dtype = given.a.shape, given.a.dtype
    return given._replace(gathered=torch.empty(size * rows, depth, dtype=dtype, device="meta"))


def case(given, size, programs=PROGRAMS):
    return Case(given, size, programs, GPU)


def test_a_gathered_a_that_is_kept_is_copied_after_a_kernel(monkeypatch):
    given = call("all_gather_matmul", 4096, 8192, 8192)
    assert kept_us(case(given, 4)) == 0
    # 64 MiB, read and written.
    assert kept_us(case(keeping(given, 4), 4)) == pytest.approx(2 * (64 << 20) / READING / 1e3)
    assert choose(keeping(given, 4), 4, PROGRAMS, GPU, True).use_gluon
    # Where that took longer than a kernel saves, the vendor's GEMM would be taken, which has it anyway.
    monkeypatch.setattr("iris.ops.choose.kept_us", lambda case: 1000)
    assert choose(given, 4, PROGRAMS, GPU, True) == VENDOR


@pytest.mark.parametrize("name", OPERATIONS)
def test_few_rows_are_not_worth_a_kernel_of_large_tiles(name):
    assert choose(call(name, 64, 8192, 8192), 4, PROGRAMS, GPU, True) == VENDOR
    assert choose(call(name, 4096, 8192, 8192), 4, PROGRAMS, GPU, True).use_gluon


def test_columns_of_a_go_to_the_triton_kernel_where_its_programs_have_many_tiles():
    def chosen(rows, dtype, gpu=GPU, by_vendor=True):
        a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, 4096), (8192, 4096)))
        given = Call("all_gather_matmul_k", torch.empty(rows, 4096, dtype=dtype, device="meta"), a, b, None, None, None)
        return choose(given, 2, PROGRAMS, gpu, by_vendor)

    assert chosen(4096, torch.bfloat16) == TRITON[2]
    assert chosen(2048, torch.bfloat16) == chosen(256, torch.bfloat16) == VENDOR
    assert chosen(4096, torch.float32) == chosen(4096, torch.bfloat16, None) == VENDOR
    assert chosen(256, torch.float32, by_vendor=False).variant == "kernel"


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    "size, dtype, columns, gpu",
    [(4, torch.float32, 8192, GPU), (4, torch.bfloat16, 8196, GPU), (1, torch.bfloat16, 8192, GPU),
     (4, torch.bfloat16, 8192, None)],
    ids=["dtype", "alignment", "one rank", "simulator"],
)  # fmt: skip
def test_where_the_kernel_cannot_or_need_not_run(name, size, dtype, columns, gpu):
    # 8196 columns of two bytes are no multiple of 16 bytes, of all ranks or of one.
    assert choose(call(name, 4096, columns, 8192, dtype, size), size, PROGRAMS, gpu, True) == VENDOR


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("rows, columns, depth", [(0, 8192, 8192), (4096, 0, 8192), (4096, 8192, 0)])
def test_nothing_is_chosen_for_nothing(name, rows, columns, depth):
    assert choose(call(name, rows, columns, depth), 4, PROGRAMS, GPU, True) == VENDOR


def test_tiles_are_narrower_where_wide_ones_leave_multiprocessors_idle():
    # 64 tiles of 256 columns, for 132 multiprocessors.
    assert choose(call("matmul_reduce_scatter", 1024, 2048, 28672), 4, PROGRAMS, GPU, True).block_size_n < 256
    assert choose(call("matmul_reduce_scatter", 8192, 28672, 8192), 4, PROGRAMS, GPU, True).block_size_n == 256


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_last_sums_take_no_longer_where_products_are_deep(name, size):
    # Two rounds of deep tiles, which would be slower than the vendor's GEMM if a part of a tile came after them.
    assert choose(call(name, 1024, 8192, 28672, size=size), size, PROGRAMS, GPU, True) == WIDE


def test_tiles_are_narrow_where_the_link_waits_for_the_first():
    for size, columns, narrow in ((4, 14336, 128), (4, 16384, 128), (8, 14336, 64), (2, 14336, 256)):
        chosen = choose(call("matmul_all_gather", 4096, columns, 4096, size=size), size, PROGRAMS, GPU, True)
        assert chosen == replace(WIDE, block_size_n=narrow)
    # Where it waits, no split that makes the product shorter helps.
    assert plan(call("matmul_all_gather", 4096, 28672, 8192, size=8), 8, PROGRAMS, WIDE, GPU) == Plan()


def test_tiles_are_wide_where_stores_go_on_beside_them():
    # Narrow ones leave less after the last product, which matters less the more tiles there are, and fetch more.
    assert choose(call("matmul_all_gather", 8192, 28672, 8192), 4, PROGRAMS, GPU, True).block_size_n == 256
    assert choose(call("matmul_all_gather", 8192, 8192, 8192), 4, PROGRAMS, GPU, True).block_size_n == 128


@pytest.mark.parametrize("columns, depth", [(16384, 16384), (57344, 8192), (28672, 4096)])
def test_tiles_of_few_rows_take_as_long_as_b_is_read(columns, depth):
    few, more = (call("all_gather_matmul", rows, columns, depth, size=2) for rows in (256, 512))
    # Of 128 rows on each of two ranks B is read twice, where the vendor's GEMM reads it once.
    assert choose(few, 2, PROGRAMS, GPU, True) == VENDOR
    assert choose(more, 2, PROGRAMS, GPU, True).use_gluon
    assert (
        read_us(case(few, 2), WIDE, Plan())
        == read_us(case(more, 2), WIDE, Plan())
        == pytest.approx(2 * few.b.nbytes / 1e3 / READING)
    )


def test_a_round_takes_as_long_as_its_tiles_read():
    given = case(call("matmul_all_gather", 4096, 8192, 8192), 4)
    assert rounds_us(given, 264, 2.0, 0.01) == pytest.approx(2 * 2.0)
    assert rounds_us(given, 264, 2.0, 0.02) == pytest.approx(2 * 132 * 0.02)
    # Of few tiles each takes its own time, unless these read a lot, for which few programs are slower than all.
    assert rounds_us(given, 144, 2.0, 0.02) == pytest.approx(132 * 0.02 + 2.0)
    assert rounds_us(given, 66, 2.0, 0.02) == 2.0
    assert 66 * 0.04 < rounds_us(given, 66, 2.0, 0.04) < 132 * 0.04


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_the_last_of_narrow_tiles_read_b_for_themselves_if_they_are_not_full(columns):
    tile = replace(WIDE, block_size_n=columns)
    full, rest = (case(call("matmul_all_gather", rows, 8192, 28672, size=1), 1) for rows in (256, 192))
    assert read_us(rest, tile, Plan()) == pytest.approx(read_us(full, tile, Plan()) * (2 if columns < 256 else 1))


@pytest.mark.parametrize("rows, height", [(64, 128), (256, 256), (512, 256), (640, 384), (1024, 256), (4096, 1024)])
def test_a_chunk_of_rows_is_worth_reading_b_for(rows, height):
    assert chunk_rows(torch.empty(rows, 57344, dtype=torch.bfloat16, device="meta"), WIDE) == height


def of_fp8(name, M, N, K, size=4):
    given = call(name, M, N, K, size=size)
    return given._replace(a=given.a.to(torch.float8_e4m3fn), b=given.b.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("name", OPERATIONS)
def test_products_of_fp8(name, monkeypatch):
    monkeypatch.setattr("iris.ops.copies.TILE", 128)
    large = choose(of_fp8(name, 4096, 14336, 4096), 4, PROGRAMS, GPU, True)
    # Deeper than tiles of wider types, and as many bytes.
    assert large.use_gluon and large.block_size_k == 128 and large.block_size_n <= 128
    # Copies to several peers, beside a product, take longer than to one.
    assert choose(of_fp8(name, 8192, 4608, 36864), 4, PROGRAMS, GPU, True).use_gluon
    assert choose(of_fp8(name, 8192, 8192, 8192), 4, PROGRAMS, GPU, True).use_gluon
    assert choose(of_fp8(name, 64, 8192, 8192), 4, PROGRAMS, GPU, True) == VENDOR
    assert choose(of_fp8(name, 8192, 8192, 8192), 4, PROGRAMS, None, True) == VENDOR
    assert choose(of_fp8(name, 8192, 8192, 8192, 1), 1, PROGRAMS, GPU, True) == VENDOR
    # As measured between two ranks: copies that bring rows cost a product less than copies that take its result away,
    # but where that is deep and little is taken.
    halves = choose(of_fp8(name, 8192, 8192, 8192, 2), 2, PROGRAMS, GPU, True)
    assert halves == COPIES if name == "all_gather_matmul" else halves.use_gluon
    deep = choose(of_fp8(name, 8192, 4608, 36864, 2), 2, PROGRAMS, GPU, True)
    assert deep == COPIES if name in COPIED else deep.use_gluon
    # A part of 256 rows has 32 tiles for the vendor's chunks, which take as long as 132.
    assert choose(of_fp8("all_gather_matmul", 1024, 8192, 28672), 4, PROGRAMS, GPU, True) != COPIES


@pytest.mark.parametrize(
    "comm_sms, programs, size, idle, senders",
    [(None, 132, 4, 0, 8), (None, 132, 4, 20, 20), (None, 132, 4, 132, 131), (16, 132, 4, 20, 16),
     (200, 132, 4, 0, 131), (None, 1, 4, 0, 1), (16, 132, 1, 0, 0)],
)  # fmt: skip
def test_how_many_programs_send_rows(comm_sms, programs, size, idle, senders):
    assert FusedConfig(comm_sms=comm_sms).senders(programs, size, idle) == senders


@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_the_vendor_cannot_do(name, allow_tf32, monkeypatch):
    """The kernels do, of float32 in the precision that torch's products have."""
    monkeypatch.setattr("iris.ops.choose.allows_tf32", lambda: allow_tf32)
    plain, known = (replace(config, allow_tf32=allow_tf32) for config in (FusedConfig(), TRITON[2]))
    # Scales of bf16, say, or float8_e5m2.
    assert choose(call(name, 4096, 8192, 8192), 4, PROGRAMS, GPU, False).use_gluon
    assert choose(of_fp8(name, 64, 8192, 8192, 1), 1, PROGRAMS, GPU, False).use_gluon
    assert choose(call(name, 4096, 8196, 8192), 4, PROGRAMS, GPU, False) == known
    assert choose(call(name, 4096, 8192, 8192, torch.float32), 4, PROGRAMS, GPU, False) == plain
    assert choose(call(name, 4096, 8192, 8192), 4, PROGRAMS, None, False) == plain


def remembered(ctx):
    """Calls of one shape, with other dtypes, settings and configurations."""
    ops = Operations(ctx)
    ops._on_gpu = True  # what is chosen there

    def given(dtype, out_dtype=torch.bfloat16):
        made = call("matmul_all_gather", 256, 1280, 6144, dtype, size=2)
        return made._replace(out=made.out.to(out_dtype))

    for out_dtype, in_gluon in ((torch.bfloat16, True), (torch.float32, False)):
        assert ops._choose(given(torch.bfloat16, out_dtype), False).use_gluon == in_gluon
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert ops._choose(given(torch.float32, torch.float32), False).allow_tf32 == allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    narrow, hopper = replace(WIDE, block_size_n=128), ops._algorithms["hopper"]
    cases = [(given(torch.bfloat16), WIDE), (given(torch.bfloat16), narrow), (given(torch.float8_e4m3fn), narrow)]
    plans = [plan(made, 2, most_programs(ctx), config, GPU) for made, config in cases]
    assert len(set(plans)) == 3 and [hopper.plan(*case) for case in cases] == plans


def of_two_kinds(ctx):
    """Each rank's GPU reads its memory at another rate, by which each would choose another way."""
    with iris.iris(1 << 20) as mixed, pytest.MonkeyPatch.context() as patch:
        rate, kind = [(1000, "slow"), (4000, "fast")][mixed.cur_rank]
        patch.setattr("iris.ops.choose.reading_GBps", lambda gpu: rate)
        patch.setattr("iris.ccl.communicator.gpu_name", lambda device: kind)
        patch.setattr(mixed.ops, "_on_gpu", True)  # what is chosen there
        patch.setattr("iris.ops.kernel.SIMULATED_PROGRAMS", PROGRAMS)
        made = call("all_gather_matmul", 1024, 8192, 8192, size=2)
        alone = choose(made, 2, PROGRAMS, GPU, True), plan(made, 2, PROGRAMS, WIDE, GPU)
        return alone, (mixed.ops._choose(made, True), mixed.ops._algorithms["hopper"].plan(made, WIDE))


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.skipif(not simulator.ACTIVE, reason="each rank plays another GPU")
def test_gpus_of_two_kinds_choose_one_way(ranks):
    (slow, one), (fast, other) = ranks.run(of_two_kinds)
    assert slow[0] != fast[0] and slow[1] != fast[1]
    assert one == other == (VENDOR, Plan())


def residents(ctx):
    """Programs wait for each other, so there are no more than have a place at one time."""
    asked = [TritonKernels(ctx).programs(FusedConfig(num_sms=n)) for n in (1, None, 1 << 20)]
    assert asked == [1, most_programs(ctx), most_programs(ctx)]


def test_no_more_programs_than_have_a_place(ranks):
    ranks.run(residents)


@pytest.mark.skipif(not simulator.ACTIVE, reason="for the number of programs there")
def test_what_was_chosen_is_for_calls_like_it(ranks):
    ranks.run(remembered)


@pytest.mark.parametrize(
    "rows, columns, number", [(1, 4096, 1), (64, 64, 2), (64, 24, 1), (0, 64, 1), (3, 64, 1), (17, 88, 1), (33, 64, 2)]
)
def test_a_chunk_has_a_tile_for_each_multiprocessor(rows, columns, number, monkeypatch):
    monkeypatch.setattr("iris.ops.copies.TILE", 8)
    pieces = chunks(rows, columns, 16)
    assert len(pieces) == number
    assert number == 1 or all(tiles(len(range(rows)[piece]), columns) >= 16 for piece in pieces)
    assert [i for piece in pieces for i in range(rows)[piece]] == list(range(rows))


WIDE = FusedConfig(use_gluon=True, block_size_m=128, block_size_n=256)


def test_programs_share_the_tiles_of_a_round_that_is_not_full():
    narrow = replace(WIDE, block_size_n=128)
    # 288 tiles: two rounds, and 24 tiles of which each has room for five programs.
    given = call("matmul_all_gather", 8192, 4608, 36864)
    assert choose(given, 4, PROGRAMS, GPU, True).use_gluon
    assert plan(given, 4, PROGRAMS, WIDE, GPU) == Plan(5, 24, paced=True)
    # 512 tiles: three rounds, and 116 tiles.
    assert plan(call("matmul_all_gather", 8192, 8192, 8192), 4, PROGRAMS, WIDE, GPU) == Plan(paced=True)
    # 128 deep tiles: of two rounds of splits the first is sent beside the second.
    assert plan(call("matmul_all_gather", 1024, 8192, 28672), 4, PROGRAMS, narrow, GPU) == Plan(2, 128, paced=True)
    # 576 tiles, 36 of each chunk of rows: those of the chunks that come while a tile is multiplied, in three splits
    # each, of which there are programs for all of a chunk.
    assert plan(call("all_gather_matmul", 8192, 4608, 36864), 4, PROGRAMS, narrow, GPU) == Plan(3, 108, together=2)
    # Few tiles, and those of the last rank's rows, which come when half of the time is over.
    assert plan(call("all_gather_matmul", 1024, 8192, 28672), 4, PROGRAMS, narrow, GPU).last == 128
    # The product takes longest: whatever comes last, it has come in time.
    assert plan(call("all_gather_matmul", 8192, 28672, 8192), 4, PROGRAMS, WIDE, GPU) == Plan(together=4)


@pytest.mark.parametrize("reading", [READING, 2750], ids=["H200", "H100"])
def test_programs_share_what_they_read(reading, monkeypatch):
    monkeypatch.setattr("iris.ops.choose.reading_GBps", lambda gpu: reading)
    # 64 tiles, for which B is read too slowly by half of all programs. More than two splits would be handed over while
    # B is read, which takes longer than to multiply.
    assert plan(call("matmul_all_gather", 256, 16384, 16384, size=2), 2, PROGRAMS, WIDE, GPU) == Plan(2, 64, paced=True)


def test_chunks_are_long_but_for_those_of_the_last_rank():
    given = call("all_gather_matmul", 8192, 8192, 8192)
    short, long = (chunks_of(case(given, 4), WIDE, Plan(together=chunks)) for chunks in (1, 4))
    assert [count for count, _ in short] == 16 * [32] and [count for count, _ in long] == 3 * [128] + 4 * [32]
    # Of four ranks' rows own ones are there, and six copies are fewer than twelve.
    assert short[-1][1] - long[-1][1] == pytest.approx(6 * GPU.copy_us)
    chosen = choose(given, 4, PROGRAMS, GPU, True)
    assert chosen.block_size_n == 256 and plan(given, 4, PROGRAMS, chosen, GPU) == Plan(together=4)


def test_a_tile_waits_for_its_rows_and_its_program():
    # Two ranks with a tile each: one program does one after the other, two begin when the rows are there.
    given = call("all_gather_matmul", 256, 512, 8192, size=2)
    one, two = case(given, 2, programs=1), case(given, 2, programs=2)
    tile, copied = tile_us(one, WIDE), GPU.copy_us + given.a.nbytes / 1e3 / GPU.copy_engine_GBps
    assert scheduled_us(one, WIDE, Plan()) == pytest.approx(2 * tile)
    assert scheduled_us(two, WIDE, Plan()) == pytest.approx(copied + tile)


def test_stores_take_their_time_where_the_product_is_longer_than_they():
    assert plan(call("matmul_all_gather", 8192, 28672, 8192), 4, PROGRAMS, WIDE, GPU).paced
    assert not plan(call("matmul_all_gather", 4096, 14336, 4096), 4, PROGRAMS, WIDE, GPU).paced


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_all_gather"])
@pytest.mark.parametrize("depth, most", [(64, 1), (192, 3), (8192, 8)])
def test_no_split_is_without_a_part_of_k(name, depth, most):
    gpu = replace(GPU, split_us=0)
    # 32 tiles: there are programs for four splits of each, and room for eight.
    assert 1 <= plan(call(name, 512, 8192, depth), 4, PROGRAMS, WIDE, gpu).splits <= most
    assert plan(call(name, 512, 8192, 192), 4, PROGRAMS, WIDE, gpu).splits == 3
