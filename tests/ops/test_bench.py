"""The benchmark of fused operations: who is measured, and that a wrong result is noticed."""

import json

import torch

from iris.bench import operations, plots


def measured(ctx):
    libraries = ["iris", "iris triton", "iris copies", "vendor", "gemm", "all_reduce"]
    shapes = [(32, 16, 32), (48, 16, 32), (3, 40, 0), (5, 24, 0)]
    return list(operations.measure(ctx, list(operations.OPERATIONS), shapes, libraries, torch.float32))


def test_what_is_measured(ranks, tmp_path):
    rows, *others = ranks.run(measured)
    assert all([row[:6] for row in other] == [row[:6] for row in rows] for other in others)
    assert not [row for row in rows if row.reason]
    assert all(row.microseconds > 0 for row in rows)
    by_copies = {row.operation for row in rows if row.library == "iris copies"}
    assert by_copies == {"all_gather_matmul", "matmul_reduce_scatter"}
    norms = [row.library for row in rows if row.operation == operations.NORM]
    assert norms == 2 * ["iris", "vendor", "all_reduce"]
    assert len(rows) == 2 * (4 * 4 + len(by_copies)) + len(norms)
    operations.write(tmp_path, "operations_2", 2, rows)
    written = json.loads((tmp_path / "operations_2.json").read_text())
    assert [operations.Row(**row) for row in written["rows"]] == rows
    assert {file.stem for file in plots.draw_operations(tmp_path, "operations_2", rows)} == {
        f"{operation}_operations_2" for operation in operations.OPERATIONS
    }


def spoilt(ctx):
    x = operations.operands(ctx, "matmul_all_reduce", (32, 16, 32), torch.float32)
    call = operations.case(ctx, "matmul_all_reduce", "iris", x)
    assert operations.check(ctx, "matmul_all_reduce", call, x) == ""
    assert "wrong result" in operations.check(ctx, "matmul_all_reduce", lambda: (call(), x.out[3].zero_()), x)


def test_a_wrong_result_is_noticed(ranks):
    ranks.run(spoilt)
