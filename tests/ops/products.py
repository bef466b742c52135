"""A product by `ctx.ops` against float64: matrices of any layout, scales, and how near the result has to be."""

import torch
from covering import EVERYTHING
from covering import RANKS as ALL_RANKS

from iris.ops import FusedConfig
from iris.ops.call import Call
from ops.nearness import Product, Roundings, assert_as_near, through_torch, whole

RANKS = ALL_RANKS if EVERYTHING else (3,)
OPERATIONS = ("all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce")
# Of each operation, by the Gluon kernels for Hopper or not: other code each.
PRODUCTS = [(name, hopper) for name in OPERATIONS for hopper in (False, True)]
# Small tiles, so that small matrices have many.
SMALL = {"block_size_m": 16, "block_size_n": 16, "block_size_k": 32}
CONFIGS = {
    # In the simulator the vendor's GEMM, if it can do the call.
    "chosen": None,
    "fused": FusedConfig(**SMALL),
    "copies": FusedConfig(variant="copies"),
    "few programs": FusedConfig(**SMALL, num_sms=2, comm_sms=1, group_size_m=2),
    "Hopper": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=64, num_sms=3),
    "Hopper, wide": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=256),
    "Hopper, deep": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=128, block_size_k=128),
    "chiplets": FusedConfig(**SMALL, num_xcds=2, chunk_size=1, allow_tf32=False),
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
LAYOUTS = ["rows", "columns", "sliced"]
# The layouts of A, B and the result; whether there is a bias; and whether the result is on the heap.
PLACES = [LAYOUTS, LAYOUTS, LAYOUTS, [False, True], [False, True]]
ROUNDS = 3 if EVERYTHING else 2


def place(rows, columns, dtype, layout, device, ctx=None):
    """Zeros by rows, by columns, or inside a larger matrix; on the heap of ``ctx``. And the larger one."""
    shape = {"rows": (rows, columns), "columns": (columns, rows), "sliced": (rows + 2, columns + 5)}[layout]
    whole = ctx.zeros(*shape, dtype=dtype) if ctx else torch.zeros(shape, dtype=dtype, device=device)
    return {"rows": whole, "columns": whole.t(), "sliced": whole[1:-1, 3:-2]}[layout], whole


def matrix(rows, columns, dtype, layout, seed, device, ctx=None):
    """Random, about 1 in size; laid out as `place` does."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    view, _ = place(rows, columns, dtype, layout, device, ctx)
    view.copy_(values)
    return view


def factors(kind, rows, columns, seed, device, begin):
    """Scales of A and B, as they are given: from that element on of a larger tensor."""
    generator = torch.Generator().manual_seed(seed)
    counts = {"none": (0, 0), "all": (1, 1), "A": (1, 0), "lines": (rows, columns), "columns": (1, columns)}[kind]
    return [0.5 + torch.rand(begin + n, generator=generator).to(device)[begin:] if n else None for n in counts]


def result_of(name, a, b, rank):
    """That of a rank, in float64, of everyone's matrices."""
    if name == "all_gather_matmul":
        return torch.cat(a).double() @ b[rank].double()
    products = [x.double() @ y.double() for x, y in zip(a, b, strict=True)]
    if name == "matmul_all_gather":
        return torch.cat(products)
    return sum(products).chunk(len(a))[rank] if name == "matmul_reduce_scatter" else sum(products)


def check(ctx, name, shape, dtype, config, *rest):
    return check_product(ctx, ctx.ops, ROUNDS, name, shape, dtype, CONFIGS[config], *rest)


def check_product(
    ctx, ops, rounds, name, shape, dtype, config, layout_a, layout_b, layout_out, biased, heap, result=None,
    scaled="none",
):  # fmt: skip
    """``result``: the dtype of the result, if not that of the matrices."""
    W, rank, result = ctx.num_ranks, ctx.cur_rank, result or dtype
    M, N, K = shape
    if name == "matmul_reduce_scatter":
        M *= W
    rows_out = {"all_gather_matmul": W * M, "matmul_all_gather": W * M, "matmul_reduce_scatter": M // W}.get(name, M)
    out, around = place(rows_out, N, result, layout_out, ctx.device, ctx if heap else None)
    rows = W * M if name == "all_gather_matmul" else M
    for call in range(rounds):
        a, b = (
            [matrix(*size, dtype, layout, 1000 * call + 2 * r + seed, ctx.device) for r in range(W)]
            for size, layout, seed in (((M, K), layout_a, 0), ((K, N), layout_b, 1))
        )
        # Every other call's scales and bias are not aligned to more than their elements.
        begin = call % 2
        scales = [factors(scaled, rows, N, 31 * call + r, ctx.device, begin) for r in range(W)]
        # Of a sum the ranks have the same bias, which is added once.
        bias = matrix(1, begin + N, result, "rows", 7 + call, ctx.device)[0, begin:] if biased else None
        scale_a, scale_b = scales[rank]
        getattr(ops, name)(out, a[rank], b[rank], bias, scale_a=scale_a, scale_b=scale_b, config=config)

        algorithm, used = ops._check(Call(name, out, a[rank], b[rank], bias, scale_a, scale_b), config)
        products = [Product(*each, *lines) for *each, lines in zip(a, b, scales, strict=True)]
        if name == "all_gather_matmul":
            products = [Product(torch.cat(a), b[rank], scale_a, scale_b)]
        torchs = through_torch(name, products, bias, result, Roundings.of(name, algorithm.name))
        exact = whole(name, [product.formed_in(torch.float64) for product in products])
        sizes = whole(name, [product.formed_in(torch.float64, torch.abs) for product in products])
        exact = exact if bias is None else exact + bias.double()
        if name == "matmul_reduce_scatter":
            exact, torchs = (each.chunk(W)[rank] for each in (exact, torchs))
        assert_as_near(out, exact, torchs, sizes, bits_of(dtype, used, ctx.device))
    # A result on the heap is not written by peers any more, and what lies around it never was.
    ctx.barrier()
    assert around.count_nonzero() == out.count_nonzero()
    return out.cpu().contiguous().view(torch.uint8) if name == "matmul_all_reduce" else None


def bits_of(dtype, config, device):
    """What products, or their sums, have while they are formed."""
    if device.type == "cuda" and dtype == torch.float32 and config.variant == "kernel" and config.allow_tf32:
        return 11
    # Hopper's tensor cores add up a few products of fp8 so.
    return 14 if device.type == "cuda" and dtype.itemsize == 1 else 24
