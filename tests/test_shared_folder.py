"""Folders that the ranks of a run share: the same for all of them, nobody else's, and gone when the last has left."""

import fcntl
import os
import tempfile
from contextlib import ExitStack

import pytest

from iris.commands.shared_folder import shared_folder
from iris.errors import FolderError


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def under_torchrun(temporary, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "some")
    monkeypatch.setenv("MASTER_PORT", "29500")
    return temporary


def test_a_process_alone_has_a_folder_of_its_own(temporary, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with shared_folder("iris-test") as one, shared_folder("iris-test") as other:
        assert one != other and one.stat().st_mode & 0o777 == 0o700
    assert not list(temporary.iterdir())


def test_ranks_share_one_until_the_last_has_left(under_torchrun):
    ranks = [ExitStack() for _ in range(3)]
    (folder,) = {rank.enter_context(shared_folder("iris-test", 7)) for rank in ranks}
    with shared_folder("iris-test", 8) as next_one:
        assert next_one != folder
    for rank in ranks:
        assert folder.exists()
        rank.close()
    assert not list(under_torchrun.iterdir())


def test_it_is_gone_after_an_error_too(under_torchrun):
    with pytest.raises(KeyboardInterrupt), shared_folder("iris-test"):
        raise KeyboardInterrupt
    assert not list(under_torchrun.iterdir())


def nothing(folder):
    folder.rmdir()


def another(folder):
    folder.rename(folder.with_name("removed"))
    folder.mkdir(mode=0o700)


@pytest.mark.parametrize("step", ["open", "flock"])
@pytest.mark.parametrize("leave", [nothing, another])
def test_it_may_be_removed_while_a_rank_enters(under_torchrun, monkeypatch, step, leave):
    """What a rank is in is at the path. The last of other ranks may leave just before this one opens or locks it."""
    module = os if step == "open" else fcntl
    real, left = getattr(module, step), []

    def late(*args, **options):
        if not left:
            left.append(1)
            leave(*under_torchrun.iterdir())
        return real(*args, **options)

    monkeypatch.setattr(module, step, late)
    with shared_folder("iris-test") as folder, shared_folder("iris-test") as same:
        assert left and folder == same and folder.is_dir()
    assert not folder.exists()


def test_a_rank_that_leaves_removes_no_folder_of_others(under_torchrun):
    """It may be between its two locks when the last but one removes the folder, and others make one anew."""
    with shared_folder("iris-test") as folder:
        another(folder)
    assert folder.is_dir()


def link(folder, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    folder.symlink_to(victim)


def dangling_link(folder, tmp_path):
    folder.symlink_to(tmp_path / "new")


def open_to_others(folder, tmp_path):
    folder.mkdir()
    folder.chmod(0o777)


def of_another_user(folder, tmp_path):
    if os.geteuid():
        pytest.skip("only root may give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)


def a_file(folder, tmp_path):
    folder.write_text("")


@pytest.mark.parametrize("put", [link, dangling_link, open_to_others, of_another_user, a_file])
def test_what_somebody_else_may_have_put_there_is_not_used(under_torchrun, put):
    with shared_folder("iris-test") as folder:
        pass
    put(folder, under_torchrun)
    with pytest.raises(FolderError, match=str(folder)), shared_folder("iris-test"):
        pass
    assert not list(under_torchrun.glob("victim/*")) and not (under_torchrun / "new").exists()


def test_no_place_for_temporary_files(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(FolderError, match="TMPDIR"), shared_folder("iris-test"):
        pass
