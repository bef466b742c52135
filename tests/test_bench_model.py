"""The benchmark of a decoder: each way of communicating gives what one process gives, and a wrong one is told."""

import json

import pytest
import torch
from click.testing import CliRunner
from conftest import UNDER_TORCHRUN
from covering import EVERYTHING, thorough

from iris.__main__ import commands
from iris.bench import model_command, plots
from iris.bench.model import measure
from iris.bench.model.cases import Case
from iris.bench.model.communication import Alone
from iris.bench.model.decoder import rotations, visible
from iris.bench.model.dimensions import MODELS, Share
from iris.bench.model.experts import MOST_TOKENS
from iris.bench.model.ways import BY_DEFAULT, FLOOR, WAYS, Way
from iris.bench.model.weights import Maker

TINY = MODELS["tiny"]
MIXTURE = MODELS["tiny-moe"]._replace(**({} if EVERYTHING else {"layers": 1}))
# Of those that are compiled the first call takes most of the time.
ASKED = [way for way in BY_DEFAULT if WAYS[way].compiler is None or EVERYTHING]
CASES = [Case("decode", 3, 5), Case("prefill", 4, 3), Case("train", 2, 6)]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def measured(ctx, model, dimensions, cases, ways, dtype, folder):
    wrong = model_command.run_on_rank(model, dimensions, cases, tuple(ways), dtype, folder)
    assert not wrong, wrong
    # Each rank of torchrun has a folder of its own.
    if ctx.cur_rank:
        return None
    (file,) = folder.glob("*.json")
    assert file.with_suffix(".csv").exists()
    return json.loads(file.read_text())


OF_EXPERTS = (CASES, ASKED) if EVERYTHING else ([Case("train", 2, 3)], ["iris fused"])


@pytest.mark.ranks(1, 2, 3) if EVERYTHING else pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES if EVERYTHING else ["bfloat16"])
@pytest.mark.parametrize(
    ("model", "dimensions", "cases", "ways"),
    [
        ("tiny", TINY, CASES, ASKED),
        thorough("tiny-moe", MIXTURE, *OF_EXPERTS),
        thorough("no-shared-expert", MIXTURE._replace(intermediate=0), CASES, ASKED),
    ],
)
def test_each_way_gives_what_one_process_gives(ranks, model, dimensions, cases, ways, dtype, tmp_path):
    if dimensions.experts and dtype != "bfloat16":
        # torch's products of experts are compiled in bf16 alone.
        ways = [way for way in ways if way != "nccl compiled"]
    written = ranks.run(measured, model, dimensions, cases, ways, dtype, tmp_path)[0]
    assert written["num_ranks"] == ranks.num_ranks
    rows = [measure.Row(**row) for row in written["rows"]]
    assert [(row.mode, row.sequences, row.context, row.way) for row in rows] == [
        (*case, way) for case in cases for way in ways if WAYS[way].suits(case.mode, dimensions)
    ]
    for row in rows:
        assert (row.model, row.layers, row.dtype, row.reason) == (model, dimensions.layers, dtype, "")
        compared = row.way != FLOOR or ranks.num_ranks == 1
        assert (row.error is not None) == compared
        assert row.error is None or row.error <= 2 * row.error_of_one + torch.finfo(DTYPES[dtype]).eps
        tokens = Case(row.mode, row.sequences, row.context).tokens
        assert row.tokens_per_second == pytest.approx(1e6 * tokens / row.microseconds)


def accelerated(ctx, dimensions):
    rows = list(measure.measure(ctx, "tiny", dimensions, CASES, ["iris accelerate"], torch.bfloat16))
    return [row.reason for row in rows]


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dimensions", [TINY, MIXTURE], ids=["tiny", "tiny-moe"])
def test_what_is_accelerated_gives_what_one_process_gives(ranks, dimensions):
    assert ranks.run(accelerated, dimensions) == [[""] * len(CASES)] * ranks.num_ranks


@pytest.mark.thorough
@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
def test_the_command_starts_its_ranks(tmp_path):
    what = "bench", "model", "--mode", "decode", "--batch", "1,2", "--way", "nccl", "--num-ranks", "3", "--layers", "1"
    result = CliRunner().invoke(commands, [*what, "--dtype", "float32", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "model_tiny_float32_3.json").read_text())
    assert [(row["sequences"], row["layers"], row["way"]) for row in written["rows"]] == [
        (1, 1, "nccl"),
        (2, 1, "nccl"),
    ]


def without_communication(ctx):
    ways = {"nccl": Way(lambda ctx: Alone(ctx.num_ranks)), "iris fused": Way(lambda ctx: None)}
    usual = dict(WAYS)
    WAYS.update(ways)
    try:
        rows = list(measure.measure(ctx, "tiny", TINY, CASES, list(ways), torch.float32))
    finally:
        WAYS.update(usual)
    return [row._replace(microseconds=None) for row in rows]


@pytest.mark.ranks(2)
def test_a_wrong_result_and_a_failure_are_told(ranks):
    rows, *others = ranks.run(without_communication)
    assert all(each == rows for each in others), "ranks have different rows"
    for wrong, failed in zip(rows[::2], rows[1::2], strict=True):
        assert "wrong result: an error of " in wrong.reason and wrong.error > 2 * wrong.error_of_one
        assert "AttributeError: " in failed.reason and failed.error is None


@torch.no_grad()
def test_a_step_continues_prompts_of_different_lengths():
    """One process: a token after a prompt has the logits that it has as the prompt's last."""
    maker = Maker(TINY, Share(), torch.float32, torch.float32, torch.device("cpu"))
    decoder, length = maker.decoder(), 7
    rotation, tokens = rotations(TINY, length, torch.float32, maker.device), torch.randint(96, (3, length))
    alone, caches = Alone(), list(maker.empty_caches(3, length))
    decoder.prefill(tokens, caches=caches, rotation=rotation, by=alone)
    positions = torch.tensor([3, 6, 0])
    last = tokens[torch.arange(3), positions]
    mask = visible(positions, length, torch.float32)
    for _ in range(2):  # the same token again in the same place
        continued = decoder.decode(last, positions, caches=caches, rotation=rotation, by=alone, mask=mask)
        for sequence, position in enumerate(positions.tolist()):
            prompt = tokens[sequence : sequence + 1, : position + 1]
            whole = decoder.prefill(prompt, caches=maker.empty_caches(1, length), rotation=rotation, by=alone)
            assert torch.allclose(continued[sequence], whole[0], rtol=1e-4, atol=1e-4)


def test_ranks_have_parts_of_one_model():
    whole, *parts = (
        Maker(TINY, share, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
        for share in (Share(), Share(0, 2), Share(1, 2))
    )
    layer, (first, second) = whole.layer(1), (part.layer(1) for part in parts)
    for name, dim in (("o", 0), ("down", 0)):
        assert torch.equal(getattr(layer, name), torch.cat([getattr(first, name), getattr(second, name)], dim))
    gates_and_ups = (part.gate_up.chunk(2, 1) for part in (first, second))
    assert torch.equal(layer.gate_up, torch.cat([torch.cat(each, 1) for each in zip(*gates_and_ups, strict=True)], 1))
    cache, *of_ranks = (next(maker.full_caches(2, 3)) for maker in (whole, *parts))
    assert torch.equal(cache, torch.cat(of_ranks, 2))


def test_experts_of_ranks_add_up():
    """Each rank's part of the sums, of choices that are all other experts, in whatever way it multiplies."""
    whole, *parts = (
        Maker(MIXTURE, share, torch.bfloat16, torch.float64, torch.device("cpu")).layer(0).experts
        for share in (Share(), Share(0, 2), Share(1, 2))
    )
    rows = torch.randn(7, MIXTURE.hidden, dtype=torch.float64)
    ids, gates = whole.route(rows, 3)
    assert all(len(set(of_token)) == MIXTURE.top_k for of_token in ids.tolist())
    assert torch.equal(ids[2:], whole.route(rows[2:], 5)[0])  # which depend on the number of a token alone
    expected = torch.zeros_like(rows)
    for token, (of_token, weights) in enumerate(zip(ids, gates, strict=True)):
        for expert, weight in zip(of_token, weights, strict=True):
            gate, up = (whole.experts_up[expert] @ rows[token]).chunk(2)
            expected[token] += weight * (whole.experts_down[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(sum(part.of_local_experts(rows, ids, gates) for part in parts), expected)
    grouped = sum(part.bfloat16().of_local_experts(rows.bfloat16(), ids, gates).double() for part in parts)
    assert (grouped - expected).norm() < 0.02 * expected.norm()


def test_more_tokens_than_choices_are_drawn_for():
    what = "--model", "tiny-moe", "--mode", "decode", "--batch", f"8,{MOST_TOKENS + 1}"
    result = CliRunner().invoke(commands, ["bench", "model", *what])
    assert result.exit_code == 2 and f"A decode of {MOST_TOKENS + 1} tokens is too much" in result.output


def test_the_help_has_all_models_and_ways():
    output = CliRunner().invoke(commands, ["bench", "model", "--help"]).output
    words = " ".join(output.split()).replace("- ", "-")  # lines may end at a hyphen
    assert [name for name in (*MODELS, *WAYS) if name not in words] == []


def test_a_picture_compares_ways_with_the_first(tmp_path):
    pytest.importorskip("matplotlib")
    of = {"model": "tiny", "layers": 2, "context": 12, "dtype": "bfloat16", "tokens_per_second": None}
    rows = [
        measure.Row(mode=mode, sequences=sequences, way=way, microseconds=spent, error=None, error_of_one=None, **of)
        for mode, sequences in (("decode", 1), ("decode", 8), ("prefill", 8))
        for way, spent in (("nccl", 3.0), ("iris fused", None if mode == "prefill" else 2.0))
    ]
    (file,) = plots.draw_model(tmp_path, "model_tiny_2", rows)
    assert file.name == "model_tiny_2.svg" and file.stat().st_size > 1000
    assert plots.draw_model(tmp_path, "model_tiny_2", [row for row in rows if row.way == "iris fused"]) == []
