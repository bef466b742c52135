"""Folders and files that cannot be used: Iris does without those that it does not need, and names the others."""

import os
from pathlib import Path

import pytest

from iris.ccl import select
from iris.commands.files import check_writable, written
from iris.errors import FolderError
from iris.heap.history import shown
from iris.machine import figures, tables
from iris.sanitizer.event_log import EventLog

FULL = Path("/dev/full")


def nobody() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_has_no_table(monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert tables.own_folder() is None
    assert select.load_table("a device that nobody has measured", 2) == select.ELSEWHERE
    assert figures.find("a device that nobody has measured") == figures.find(figures.ANY_OTHER)


@pytest.mark.parametrize("home", ["/dev/null", "/" + 300 * "x"], ids=["a file", "a name that cannot be"])
def test_a_home_that_cannot_be_read_has_no_table(monkeypatch, home):
    monkeypatch.setenv("XDG_CONFIG_HOME", home)
    assert select.load_table("a device that nobody has measured", 2) == select.ELSEWHERE
    assert figures.find("a device that nobody has measured") == figures.find(figures.ANY_OTHER)


def test_lines_are_named_where_the_working_directory_is_gone(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert shown(str(gone / "program.py")) == "program.py"
    gone.rmdir()
    assert shown("/there/program.py") == "/there/program.py"


def test_a_file_that_cannot_be_written_is_named():
    with pytest.raises(FolderError, match="/dev/full cannot be written: .*No space left"), written(FULL):
        FULL.write_text("some")


def test_it_is_named_before_the_work_is_done(tmp_path):
    check_writable(tmp_path / "new" / "trace.json")
    with pytest.raises(FolderError, match="/dev/null is no folder"):
        check_writable(Path("/dev/null/trace.json"))
    with pytest.raises(FolderError, match=f"{tmp_path} cannot be written: it is a folder"):
        check_writable(tmp_path)


def test_a_full_disk_names_the_log_and_what_to_do(tmp_path):
    os.symlink(FULL, tmp_path / "rank0.events")
    log = EventLog(tmp_path, 0)
    with pytest.raises(FolderError, match="rank0.events: No space left on device.*TMPDIR"):
        log.add(None)
