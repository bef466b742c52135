"""How a fused operation is carried out where the caller does not say: by what each way should take.

The times are of a model with few numbers, all measured on 2 and 4 H200 (docs/performance.md, "Fused operations"): what
a tile takes for each k, what the link carries beside a product, what the vendor's GEMM and a collective take one behind
the other. Elsewhere than on Hopper the vendor's GEMM and a collective are used.
"""

from iris.ops.call import Call
from iris.ops.config import FusedConfig
from iris.ops.hopper import arguments as hopper

VENDOR = FusedConfig(variant="vendor")
# Nanoseconds for each k of a tile of 128 rows and so many columns.
TILE_NS = {256: 11.4, 128: 6.1, 64: 5.1}
# GB/s over the link: stores alone, and beside a product, which is slowed down to so much of its speed meanwhile; the
# copy engine, which slows it down little; and collectives alone, with a result on the heap and elsewhere, where a
# gathered A is. Microseconds between two copies.
STORES, STORES_BESIDE, PRODUCT_BESIDE, ENGINE, COLLECTIVE, STAGED, BETWEEN_COPIES = 350, 280, 0.79, 360, 300, 170, 4
# The vendor's GEMM: 10^12 operations a second; GB/s that it reads B at, where that takes longer.
OPERATIONS, READING = 735, 4000
# Microseconds: of a fused kernel's meetings, of a GEMM's launch and of a collective, however small.
MEETING, LAUNCH, SMALL = 12, 5, 12
# What a way has to be faster by.
MARGIN = 1.05


def choose(call: Call, size: int, programs: int, on_gpu: bool) -> FusedConfig:
    """The configuration of least time, for a call that the vendor's GEMM can do."""
    configs = [
        FusedConfig(use_gluon=True, block_size_m=128, block_size_n=columns, block_size_k=64) for columns in TILE_NS
    ]
    if not on_gpu or size == 1 or hopper.problem(call, configs[0], size) is not None:
        return VENDOR
    best = min(configs, key=lambda config: fused_us(call, size, programs, config))
    return best if MARGIN * fused_us(call, size, programs, best) < vendor_us(call, size) else VENDOR


def sent_bytes(call: Call, size: int) -> float:
    """That each rank sends in one step."""
    (rows, depth), columns = call.a.shape, call.b.shape[1]
    if call.name == "all_gather_matmul":
        return (size - 1) * rows * depth * call.a.itemsize
    if call.name == "matmul_all_gather":
        return (size - 1) * rows * columns * call.a.itemsize
    return (size - 1) / size * rows * columns * call.a.itemsize


def fused_us(call: Call, size: int, programs: int, config: FusedConfig) -> float:
    """Microseconds of the Gluon kernel of that configuration."""
    (rows, depth), columns = call.a.shape, call.b.shape[1]
    M, N = config.block_size_m, config.block_size_n
    # Parts of rows, each of which is cut into tiles for itself.
    parts, share = {"all_gather_matmul": (size, rows), "matmul_all_gather": (1, rows)}.get(
        call.name, (size, -(-rows // size))
    )
    tiles = parts * -(-share // M) * -(-columns // N)
    tile = TILE_NS[N] * depth / 1e3
    product = -(-tiles // programs) * tile
    sent = sent_bytes(call, size) / 1e3
    if call.name == "all_gather_matmul":
        # The rows that come last are multiplied when they have come.
        copies = (size - 1) * -(-rows // hopper.chunk_rows(rows, depth, config))
        return MEETING + max(product, sent / ENGINE + copies * BETWEEN_COPIES + tile)
    if call.name == "matmul_all_gather":
        # What the last tiles are sent in comes behind.
        last = min(tiles, programs) / tiles * sent
        return MEETING + together_us(product, sent - last) + last / STORES
    # The last sums come behind their parts.
    steps = 2 if call.name == "matmul_all_reduce" else 1
    return MEETING + together_us(product, steps * sent) + tile / 3


def together_us(product: float, sent: float) -> float:
    """Microseconds of a product that takes so many alone, and of so many kilobytes that programs store beside it."""
    both = min(product / PRODUCT_BESIDE, sent / STORES_BESIDE)
    return both + (product - both * PRODUCT_BESIDE) + (sent - both * STORES_BESIDE) / STORES


def vendor_us(call: Call, size: int) -> float:
    """Microseconds of the vendor's GEMM and a collective, one behind the other."""
    (rows, depth), columns = call.a.shape, call.b.shape[1]
    multiplied = size * rows if call.name == "all_gather_matmul" else rows
    product = max(
        2 * multiplied * depth * columns / OPERATIONS / 1e6, depth * columns * call.b.itemsize / READING / 1e3
    )
    steps = 2 if call.name == "matmul_all_reduce" else 1
    rate = STAGED if call.name == "all_gather_matmul" else COLLECTIVE
    return LAUNCH + product + SMALL + steps * sent_bytes(call, size) / rate / 1e3


def is_vendors(call: Call) -> bool:
    """Whether the vendor's GEMM can do the call."""
    return not call.scaled and call.a.itemsize > 1 and call.out.dtype == call.a.dtype
