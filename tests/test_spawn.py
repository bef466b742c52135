"""`iris.spawn.launch`: ranks know who they are, and the failure of one is the failure of the program."""

import os
import time

import pytest
from conftest import UNDER_TORCHRUN

from iris.spawn import launch

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")


def write_environment(folder):
    text = " ".join(os.environ[name] for name in VARIABLES)
    (folder / os.environ["RANK"]).write_text(text)


def fail_on_rank_1(how):
    if os.environ["RANK"] == "0":
        time.sleep(600)
    if how == "raises":
        raise ValueError("of all ranks, me")
    os._exit(3)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="the ranks are there already")
def test_ranks_get_the_environment_of_torchrun(tmp_path):
    calls = []
    launch(write_environment, 2, tmp_path, meanwhile=lambda: calls.append(1))
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 0 2 127.0.0.1", "1 1 2 127.0.0.1"]
    assert calls


def test_a_rank_of_torchrun_simply_runs(tmp_path, monkeypatch):
    for name, value in zip(VARIABLES, ("5", "1", "8", "somewhere"), strict=True):
        monkeypatch.setenv(name, value)
    launch(write_environment, 2, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["5"]


@pytest.mark.skipif(UNDER_TORCHRUN, reason="the ranks are there already")
@pytest.mark.parametrize(("how", "told"), [("raises", "ValueError: of all ranks, me"), ("dies", "exit code 3")])
def test_a_rank_that_fails_ends_the_others_and_is_named(how, told):
    with pytest.raises(SystemExit) as caught:
        launch(fail_on_rank_1, 2, how)
    assert str(caught.value.code).startswith("Rank 1 of 2 failed:")
    assert told in caught.value.code
