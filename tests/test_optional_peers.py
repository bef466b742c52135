"""FlashInfer's and SGLang's all-reduce as peers of benchmarks: what they are called with, and why a row has no time.

Modules on the CPU stand in for the packages.
"""

import contextlib
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from iris.bench import collectives, operations, optional_peers

KIB = 1 << 10


class FakeFlashInfer:
    """`flashinfer.comm` on the CPU. ``wrong``: what is added to its results."""

    AllReduceFusionPattern = SimpleNamespace(kAllReduce=0, kARResidualRMSNorm=1)

    def __init__(self, wrong=0.0):
        self.wrong, self.made, self.called, self.destroyed = wrong, [], [], 0

    def destroy(self):
        self.destroyed += 1

    def create_allreduce_fusion_workspace(self, **given):
        self.made.append(given)
        return self

    def allreduce_fusion(self, *, input, workspace, pattern, use_oneshot, fp32_acc, launch_with_pdl, **given):
        assert workspace is self and fp32_acc and launch_with_pdl
        self.called.append((pattern, use_oneshot, tuple(input.shape)))
        if use_oneshot is False and len(input) <= dist.get_world_size():
            raise AssertionError("sequence length should be larger than tp_size")
        total = input.float() + self.wrong
        dist.all_reduce(total)
        if pattern == 0:
            return given["output"].copy_(total)
        return normalised(total, given["residual_in"], given["rms_gamma"], given["rms_eps"], given["norm_out"])


def normalised(total, residual, weight, eps, out):
    """``out``, and the sum in ``residual``."""
    residual.copy_(total + residual.float())
    return out.copy_(torch.nn.functional.rms_norm(residual, weight.shape, weight, eps))


class FakeSGLang:
    """`CustomAllReduceV2`, and the module of the fused kernel, on the CPU."""

    def __init__(self):
        self.obj, self.disabled, self.sizes, self.closed = object(), False, [], 0

    def CustomAllReduceV2(self, group, device, max_size):
        assert dist.get_backend(group) == "gloo"
        self.sizes.append(max_size)
        return self

    def should_custom_ar(self, x):
        return x.nbytes < 4 * KIB

    def custom_all_reduce(self, x):
        result = x.clone()
        dist.all_reduce(result)
        return result

    def reserve_push_capacity(self, nbytes):
        self.sizes.append(nbytes)

    def register_comm(self, comm):
        assert comm is self.obj

    def all_reduce_residual_norm(self, x, residual, weight, eps, *, world_size):
        assert world_size == dist.get_world_size()
        return normalised(self.custom_all_reduce(x.float()), residual, weight, eps, torch.empty_like(x)), residual

    def capture(self):
        return contextlib.nullcontext()

    def close(self):
        self.closed += 1


IN_SGLANG = "srt.distributed.device_communicators.custom_all_reduce_v2", "kernels.ops.communication.all_reduce_fusion"


@contextlib.contextmanager
def installed(**packages):
    """These modules and no others of the packages' names: `flashinfer.comm` and two of SGLang."""
    modules = {}
    for package, fake in packages.items():
        modules[package] = SimpleNamespace(__spec__=object())
        modules |= {f"{package}.{each}": fake for each in (("comm",) if package == "flashinfer" else IN_SGLANG)}
    with pytest.MonkeyPatch.context() as patch:
        for package in ("flashinfer", "sglang"):
            patch.setitem(sys.modules, package, modules.get(package))
            if package not in packages:
                patch.delitem(sys.modules, package)
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(optional_peers, "find_spec", lambda name: packages.get(name))
        yield


def reasons_of(rows):
    assert all((row.microseconds is None) == bool(row.reason) for row in rows)
    return {(row[2] if isinstance(row, collectives.Row) else row[1], row.library): row.reason for row in rows}


def with_installed_peers(ctx):
    peers = list(optional_peers.NAMES)
    flashinfer, sglang = FakeFlashInfer(), FakeSGLang()
    with installed(flashinfer=flashinfer, sglang=sglang):
        assert optional_peers.by_default(["nccl", *peers]) == ["nccl", "flashinfer", "sglang"]
        sums = list(
            collectives.measure(ctx, ["all_reduce", "broadcast"], [2 * KIB, 256 * KIB], [0], peers, torch.bfloat16)
        )
        norms = list(operations.measure(ctx, [operations.NORM], [(2, 64, 0), (9, 64, 0)], peers, torch.bfloat16))
    assert [each["max_token_num"] for each in flashinfer.made] == [16, 1] and flashinfer.destroyed == 2
    assert flashinfer.made[0]["hidden_dim"] == 8192 and flashinfer.made[0]["dtype"] is torch.bfloat16
    assert {(0, None, (1, 1024)), (0, True, (16, 8192)), (1, False, (9, 64))} <= set(flashinfer.called)
    assert sglang.sizes == [16 << 20, 16 << 20, 2 * 9 * 64] and sglang.closed == 2
    return ctx.num_ranks, reasons_of(sums), reasons_of(norms)


def test_installed_peers_are_measured(ranks):
    few = "AssertionError: sequence length should be larger than tp_size"
    for size, sums, norms in ranks.run(with_installed_peers):
        assert {key: reason for key, reason in norms.items() if reason} == {(2, "flashinfer two shot"): few}
        assert {key: reason for key, reason in sums.items() if reason} == {
            (2 * KIB, "flashinfer two shot"): few,
            (256 * KIB, "sglang"): f"SGLang leaves 262144 bytes among {size} ranks to NCCL",
        }
        assert len(sums) == len(norms) == 8


def without_peers(ctx, package):
    """The reasons where nothing is installed, where one is not for these ranks, and where one's results are wrong."""
    fake = FakeFlashInfer(wrong=9.0) if package == "flashinfer" else FakeSGLang()
    fake.disabled = True
    found = []
    for packages in ({}, {package: fake}):
        with installed(**packages):
            found += collectives.measure(ctx, ["all_reduce"], [2 * KIB], [0], [package], torch.float32)
            found += operations.measure(ctx, [operations.NORM], [(4, 64, 0)], [package], torch.float32)
            assert optional_peers.by_default([package]) == list(packages)
    return [row.reason for row in found]


@pytest.mark.parametrize(
    "package, project, refusal, in_norms",
    [
        ("flashinfer", "flashinfer-python", "wrong result", "wrong result: differs by"),
        ("sglang", "sglang", "not for .* ranks", "not available: not for .* ranks"),
    ],
)
def test_a_peer_that_is_missing_or_refuses_or_is_wrong_has_the_reason_in_its_row(
    ranks, package, project, refusal, in_norms
):
    missing = f"not installed: pip install {project}"
    for reasons in ranks.run(without_peers, package):
        assert reasons[:2] == [missing, operations.NOT_AVAILABLE + missing]
        assert re.search(refusal, reasons[2]) and re.search(in_norms, reasons[3])
