"""Tables of what was measured: which entry a GPU gets, and what is said of a file that is missing or cannot be used."""

import json
from dataclasses import asdict, fields

import pytest

from iris.ccl import select
from iris.errors import InvalidTableError
from iris.machine import figures, tables

SHIPPED = json.loads((tables.SHIPPED / tables.OPERATIONS).read_text())
H200 = "NVIDIA H200"


@pytest.fixture
def own(monkeypatch, tmp_path):
    """The folder of a user's own tables."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "iris").mkdir()
    return tmp_path / "iris"


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """A folder in the place of that which ships with Iris, with copies of its files."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    for name in (tables.COLLECTIVES, tables.OPERATIONS):
        (folder / name).write_text((tables.SHIPPED / name).read_text())
    monkeypatch.setattr(tables, "SHIPPED", folder)
    return folder


def load(name, device=H200):
    """As a group does that is first used."""
    return select.load_table(device, 2) if name == tables.COLLECTIVES else figures.find(device).figures


def test_every_figure_says_what_it_is_and_in_which_unit():
    names = [field.name for field in fields(figures.Figures)]
    assert list(SHIPPED[H200]["figures"]) == names
    units = ("_us", "_ns_per_k", "_GBps", "_TFLOPS", "_bytes", "_fraction", "_loss", "_exponent")
    bare = [name for name in names if not name.endswith(units)]
    assert bare == ["product_speed_beside_stores", "reads_by_turns", "fp8_loss_beside_copies"], "numbers without a unit"
    assert not [name for name in names if name not in figures.Figures.__doc__]
    assert {"on", "date", "torch", "triton", "how"} == set(SHIPPED[H200]["measured"])


@pytest.mark.parametrize(
    "device, own",
    [("NVIDIA H100 80GB HBM3", {"memory_GBps"}), ("a GPU that nobody has measured", set()), ("simulator", set())],
)
def test_gpus_without_figures_have_those_of_another(device, own):
    found, of_another = figures.find(device), figures.find(H200)
    assert {
        name for name in vars(of_another.figures) if getattr(found.figures, name) != getattr(of_another.figures, name)
    } == own
    assert found.source == f"{H200}{''.join(f', but {name} of {device}' for name in own)}, as shipped"
    entry = SHIPPED.get(device, SHIPPED[figures.ANY_OTHER])
    assert entry["same_as"] == H200 and entry["because"]


def test_own_figures_come_first(own):
    measured = {**SHIPPED[H200]["figures"], "copy_us": 7.5}
    (own / tables.OPERATIONS).write_text(json.dumps({"mine": {"figures": measured}, "too": {"same_as": "mine"}}))
    for device in ("mine", "too"):
        found = figures.find(device)
        assert found.figures.copy_us == 7.5 and found.source == f"mine in {own / tables.OPERATIONS}"
        others = asdict(found.figures), asdict(figures.find(H200).figures)
        assert {name for name in others[0] if others[0][name] != others[1][name]} == {"copy_us"}
    assert figures.find("another").figures.copy_us == 6


@pytest.mark.parametrize("name", [tables.COLLECTIVES, tables.OPERATIONS])
def test_a_file_that_was_not_installed_is_told(shipped, name):
    (shipped / name).unlink()
    with pytest.raises(InvalidTableError, match=f"{shipped / name} is missing: Iris is not installed whole"):
        load(name)


@pytest.mark.parametrize("name", [tables.COLLECTIVES, tables.OPERATIONS])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"\xff": 3}', b'{"NVIDIA H200": 3}', b'{"NVIDIA H200": {"2": {"all_reduce": [3]}}}']
)
def test_a_file_that_cannot_be_used_is_told(shipped, own, name, content):
    (own / name).write_bytes(content)
    with pytest.raises(InvalidTableError, match=f"{own / name} is no table.*Remove it; `python -m iris tune` makes"):
        load(name)
    (own / name).unlink()
    (shipped / name).write_bytes(content)
    with pytest.raises(InvalidTableError, match=f"{shipped / name} is no table.*Install Iris anew"):
        load(name)


@pytest.mark.parametrize(
    "name, given, words",
    [("copy_us", None, "copy_us is None, and it takes a number above 0"), ("copy_us", 0, "copy_us is 0, and"),
     ("copy_us", "6", "copy_us is '6', and"), ("copy_us", True, "is True"), ("copy_us", float("inf"), "is inf"),
     ("copies_us", 6, "there is no figure copies_us"), ("gemm_TFLOPS", 700, "is 700, and it takes an object"),
     ("gemm_TFLOPS", {"2": 700}, "gemm_TFLOPS 1 is None"), ("tile_ns_per_k", {"2": {"256": 1}}, "k 2 128 is None")],
)  # fmt: skip
def test_a_figure_that_cannot_be_is_told(own, name, given, words):
    measured = {**SHIPPED[H200]["figures"], name: given}
    (own / tables.OPERATIONS).write_text(json.dumps({H200: {"figures": measured}}))
    with pytest.raises(InvalidTableError, match=f"{own / tables.OPERATIONS} is no table.*{words}"):
        figures.find(H200)


def test_a_table_names_an_entry_that_is_there(shipped):
    (shipped / tables.OPERATIONS).write_text(json.dumps({H200: {"same_as": "another"}}))
    with pytest.raises(InvalidTableError, match="there is no entry 'another'"):
        figures.find(H200)
    with pytest.raises(InvalidTableError, match=f"{shipped / tables.OPERATIONS} has no entry 'any other GPU'"):
        figures.find("another GPU")
