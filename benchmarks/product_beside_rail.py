"""Fused products over hosts, for a trace that shows the kernel multiply while the rail moves the next host's part.

    IRIS_OVER_HOSTS=iris torchrun --nproc-per-node 2 -m iris trace --picture rail.svg benchmarks/product_beside_rail.py

Each process starts with the IRIS_HOST and NCCL_HOSTID of its host, as docs/several-hosts.md says. Two calls of each
operation are made first, so that connections, kernels and memory are there; then one of each is recorded, in bf16, by
the kernel that the options describe.
"""

import click
import torch

import iris
from iris.ops.config import FusedConfig


@click.command(context_settings={"show_default": True})
@click.option("-m", default=4096, help="Rows of all ranks.")
@click.option("-n", default=4096, help="Columns of the first product, depth of the second.")
@click.option("-k", default=65536, help="Depth of the first product, columns of the second.")
@click.option("--block", nargs=3, default=(128, 256, 64), help="Rows, columns and depth of a tile.")
@click.option(
    "--programs", default=0, help="Of the kernel, at most; 0: as many as there may be. Each is a line of a picture."
)
def main(m: int, n: int, k: int, block: tuple[int, int, int], programs: int) -> None:
    on_gpu = torch.cuda.is_available()
    config = FusedConfig(
        variant="kernel",
        block_size_m=block[0],
        block_size_n=block[1],
        block_size_k=block[2],
        num_sms=programs or None,
        use_gluon=on_gpu,
    )
    with iris.iris(1 << 20) as ctx:
        generator = torch.Generator(ctx.device).manual_seed(ctx.cur_rank)

        def random(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, device=ctx.device, dtype=torch.bfloat16)

        mine = m // ctx.num_ranks
        rows, of_all = random(mine, k), random(m, n)
        first, second = random(k, n), random(n, k)
        product, part = torch.empty_like(of_all), torch.empty_like(rows)
        for recorded in (False, False, True):
            ctx.barrier()
            if recorded:
                ctx.tracing.reset()
            ctx.ops.all_gather_matmul(product, rows, first, config=config)
            ctx.ops.matmul_reduce_scatter(part, of_all, second, config=config)
        ctx.barrier()


if __name__ == "__main__":
    main()
