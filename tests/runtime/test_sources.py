"""The digest of a kernel's sources: every Python file that decides what is compiled, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_kernels.runtime import sources


def digest(root: Path) -> str:
    return sources._state_of.__wrapped__((root,)).digest


@pytest.fixture
def room(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "kernel.py").write_text("a = 1\n")
    (tmp_path / "part" / "mma.py").write_text("b = 2\n")
    return tmp_path


def test_editing_adding_moving_and_removing_a_source_change_it(room: Path):
    seen = {digest(room)}
    (room / "part" / "mma.py").write_text("b = 3\n")
    seen.add(digest(room))
    (room / "new.py").write_text("")
    seen.add(digest(room))
    (room / "new.py").rename(room / "part" / "new.py")
    seen.add(digest(room))
    (room / "kernel.py").unlink()
    seen.add(digest(room))
    assert len(seen) == 5


def test_other_files_do_not_change_it(room: Path):
    before = digest(room)
    (room / "notes.md").write_text("thoughts")
    assert digest(room) == before


def test_it_does_not_depend_on_where_the_room_lies(room: Path, tmp_path_factory: pytest.TempPathFactory):
    moved = tmp_path_factory.mktemp("elsewhere") / room.name
    before = digest(room)
    room.rename(moved)
    assert digest(moved) == before


def test_a_source_that_is_not_there_is_refused(room: Path):
    missing = room / "mainlop.py"
    with pytest.raises(FileNotFoundError, match=r"mainlop\.py: no such file, want the sources of a kernel"):
        digest(missing)
