"""The digest of a kernel's sources changes with the code that its compilation can reach, and with nothing else."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cute_kernels.runtime import KernelSpec, definitions, sources, store

PACKAGE = "a_family"
FILES = {
    "compile.py": '''
"""Compiles."""
from dataclasses import dataclass
from typing import ClassVar
from a_family import config as settings
from cute_kernels.runtime import KernelSpec


@dataclass(frozen=True, eq=False)
class Spec(KernelSpec):
    config: settings.Config
    family: ClassVar[str] = "toy"

    def compile(self, arch):
        from a_family.kernel import Kernel

        return Kernel(self.config, scale_of(arch)).launch()


def scale_of(arch):
    return LARGE if arch == "sm_90a" else 1


def shipped_specs():
    from a_family.schedule import choose

    return [Spec(choose())]


LARGE = 3
''',
    "config.py": """
from dataclasses import dataclass
from typing import ClassVar
from a_family.limits import helper
from a_family.reductions import Split, Whole


@dataclass(frozen=True)
class Config:
    reduction: Split | Whole = Whole()
    limit: ClassVar[int] = helper(3)
    tile: int = 64
""",
    "reductions.py": """
from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    parts: int = 2

    def device(self):
        from a_family.device import add_parts

        return add_parts


@dataclass(frozen=True)
class Whole:
    def device(self):
        from a_family.device import keep

        return keep

    def time_us(self):
        cost = 1
        return cost


class Third:
    pass


KINDS = (Split, Whole)
""",
    "device.py": '''
def add_parts(x):
    """Adds."""
    return x + x  # twice


def keep(x):
    return helper(x)


def helper(x):
    return x
''',
    "kernel.py": """
from a_family.config import Config
from a_family.reductions import KINDS, Split, Third, Whole


class Kernel:
    def __init__(self, config: Config, scale):
        assert isinstance(config.reduction, KINDS)
        self.parts = 2 if type(config.reduction) is Split else 1
        self.device = config.reduction.device()

    def launch(self):
        return self.parts, STORES[type(self.reduction)](1)

    def cost(self):
        return 0


STORES = {
    Split: lambda x: x,
    Whole: lambda x: x - 1,
}
""",
    "limits.py": """
def helper(x):
    return x + 1
""",
    "schedule.py": """
from a_family.config import Config
from a_family.reductions import Whole


def choose():
    return Config(Whole())
""",
    "__init__.py": "",
}


def forget() -> None:
    for kept in (
        definitions.file_of,
        definitions.read,
        definitions.members,
        sources._reached,
        sources._links,
        sources._found,
        sources._state,
        store._known,
    ):
        kept.cache_clear()
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


class Room:
    """A package with a kernel, of which each call of `digests` sees the files as they are."""

    def __init__(self, folder: Path):
        self.folder = folder / PACKAGE
        self.folder.mkdir()
        for name, text in FILES.items():
            (self.folder / name).write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        assert old in text
        (self.folder / name).write_text(text.replace(old, new))

    def specs(self) -> dict[str, KernelSpec]:
        forget()
        spec = importlib.import_module(f"{PACKAGE}.compile").Spec
        config = importlib.import_module(f"{PACKAGE}.config")
        kinds = {"split": config.Split(), "whole": config.Whole()}
        return {name: spec(config.Config(kind)) for name, kind in kinds.items()}

    def states(self) -> dict[str, sources.Reached]:
        return {name: sources.reached(spec) for name, spec in self.specs().items()}

    def digests(self) -> dict[str, str]:
        return {name: state.digest for name, state in self.states().items()}


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    monkeypatch.syspath_prepend(tmp_path)
    yield Room(tmp_path)
    forget()


def changed_by(room: Room, *edits: Callable[[], None]) -> set[str]:
    """The kernels whose digests the edits change."""
    before = room.digests()
    for edit in edits:
        edit()
    after = room.digests()
    return {name for name in before if before[name] != after[name]}


OVERRIDE = """

@dataclass(frozen=True, eq=False)
class Spec(Base):
    def compile(self, arch):
        return super().compile(arch)
"""


def test_what_a_method_overrides_counts_where_the_method_calls_it(room: Room):
    room.edit("compile.py", "class Spec", "class Base")
    room.edit("compile.py", "LARGE = 3\n", f"LARGE = 3\n{OVERRIDE}")
    edited = changed_by(room, lambda: room.edit("compile.py", "scale_of(arch))", "2 * scale_of(arch))"))
    assert edited == {"split", "whole"}
    room.edit("compile.py", "return super().compile(arch)", "return scale_of(arch)")
    assert changed_by(room, lambda: room.edit("compile.py", "2 * scale_of(arch))", "3 * scale_of(arch))")) == set()


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("device.py", "x + x", "x * 2", {"split"}),
        ("device.py", "return x\n", "return -x\n", {"whole"}),
        ("reductions.py", "parts: int = 2", "parts: int = 2\n    lines: int = 4", {"split"}),
        ("kernel.py", "self.parts = 2", "self.parts = 3", {"split", "whole"}),
        ("compile.py", "LARGE = 3", "LARGE = 4", {"split", "whole"}),
        ("reductions.py", "KINDS = (Split, Whole)", "KINDS = (Whole, Split)", {"split", "whole"}),
        ("kernel.py", "return self.parts, ", "return -self.parts, ", {"split", "whole"}),
        ("kernel.py", "return 0", "return 1", set()),
        ("reductions.py", "cost = 1", "cost = 2", set()),
        ("kernel.py", "x - 1", "x - 2", {"whole"}),
        ("limits.py", "x + 1", "x + 2", {"split", "whole"}),
        ("kernel.py", "Split: lambda x: x,", "Split: lambda x: x + 3,", {"split"}),
        ("kernel.py", "Split: lambda x: x,", "Split: lambda x: x,\n    Third: len,", set()),
        ("schedule.py", "Config(Whole())", "Config(Whole(), 128)", set()),
        ("compile.py", "[Spec(choose())]", "[]", set()),
        ("device.py", '"""Adds."""', '"""Returns the double."""', set()),
        ("device.py", "return x + x  # twice", "# twice\n    return (\n        x + x\n    )", set()),
        ("compile.py", '"""Compiles."""', "", set()),
    ],
)
def test_an_edit_changes_the_kernels_that_reach_it(room: Room, file: str, old: str, new: str, changed: set[str]):
    assert changed_by(room, lambda: room.edit(file, old, new)) == changed


def test_a_definition_that_moves_to_another_module_changes_nothing(room: Room):
    text = "def helper(x):\n    return x\n"

    def move() -> None:
        room.edit("device.py", text, "from a_family.helpers import helper\n")
        (room.folder / "helpers.py").write_text(text)

    assert changed_by(room, move) == set()


def test_a_name_that_another_definition_takes_over_changes_its_kernels(room: Room):
    text = "def helper(x):\n    return x\n"

    def take_over() -> None:
        room.edit("device.py", text, "from a_family.helpers import other as helper\n")
        (room.folder / "helpers.py").write_text(text + "\n\ndef other(x):\n    return abs(x)\n")

    assert changed_by(room, take_over) == {"whole"}


def test_a_package_under_another_name_of_its_modules_has_the_same_digests(room: Room):
    def rename() -> None:
        (room.folder / "device.py").rename(room.folder / "on_the_gpu.py")
        room.edit("reductions.py", "a_family.device", "a_family.on_the_gpu")

    assert changed_by(room, rename) == set()


def test_sources_newer_than_the_process_are_said_to_be(room: Room):
    past = time.time() - 1_000_000
    for path in room.folder.iterdir():
        os.utime(path, (past, past))
    assert not room.states()["split"].changed
    future = time.time() + 60
    os.utime(room.folder / "device.py", (future, future))
    assert room.states()["split"].changed


def test_a_spec_without_a_file_is_refused(room: Room):
    room.states()
    shipped = importlib.import_module(f"{PACKAGE}.compile").Spec
    spec = type("Spec", (shipped,), {"__module__": "a_module_of_no_file"})
    with pytest.raises(TypeError, match="Spec must be defined in a file to be cached, not in a_module_of_no_file"):
        sources.reached(spec(None))


def test_star_imports_are_refused(room: Room):
    room.edit("device.py", "def keep", "from math import *\n\n\ndef keep")
    with pytest.raises(ValueError, match=r"device.py: got a star import of math, want names"):
        room.digests()


# -- digests that are kept ---------------------------------------------------------------------------------------------

LOOK = """
from cute_kernels.kv_cache import compile
from cute_kernels.norm import compile as norm
from cute_kernels.runtime import definitions, store
specs = compile.shipped_specs()[0], norm.shipped_specs()[0]
print(*(store.source_digest(spec) for spec in specs), definitions.reads())
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of indexes of a cache directory of this test's own."""
    monkeypatch.setenv(store.DIRECTORY_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept" / "sources"


def kept_digests(room: Room) -> tuple[dict[str, str], bool]:
    """The digests of the room's kernels in a new process, and whether it read files for them."""
    found = {name: store.source_digest(spec) for name, spec in room.specs().items()}
    return found, definitions.reads() > 0


def test_a_process_reads_no_source_once_others_have_noted_what_they_find_at_the_same_time(kept: Path, python: Callable):
    def printed(process: subprocess.Popen[str]) -> list[str]:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        return out.split()

    (*digests, reads), second = map(printed, [python(LOOK) for _ in range(2)])
    assert second[:-1] == digests and max(int(reads), int(second[-1])) > 0
    (index,) = kept.iterdir()
    lines = index.read_text().splitlines()
    assert len(set(lines)) == 2 and all(len(line) == 3 * 64 + 2 for line in lines)
    assert printed(python(LOOK)) == [*digests, "0"]


def test_what_was_found_before_is_what_a_search_finds(room: Room, kept: Path):
    found, searched = kept_digests(room)
    assert searched and found == room.digests()
    assert kept_digests(room) == (found, False)


def test_a_changed_file_is_searched_again_whatever_its_size_and_time(room: Room, kept: Path):
    file = room.folder / "device.py"
    os.utime(file, (1, 1))
    found, _ = kept_digests(room)
    room.edit("device.py", "x + x", "x * x")
    os.utime(file, (1, 1))
    changed, searched = kept_digests(room)
    assert searched and changed == room.digests()
    assert {name for name in found if found[name] != changed[name]} == {"split"}
    room.edit("device.py", "x * x", "x + x")
    assert kept_digests(room) == (found, False)


def test_a_new_file_that_takes_a_name_over_is_searched(room: Room, kept: Path):
    found, _ = kept_digests(room)
    (room.folder / "device").mkdir()
    (room.folder / "device.py").rename(room.folder / "device" / "__init__.py")
    room.edit("device/__init__.py", "x + x", "x * x")
    changed, searched = kept_digests(room)
    assert searched and found["split"] != changed["split"] and found["whole"] == changed["whole"]


def test_nothing_is_noted_of_files_that_change_during_a_search(room: Room, kept: Path):
    specs = room.specs()
    sources.question(specs["split"])
    room.edit("device.py", "x + x", "x * x")
    assert {name: store.source_digest(spec) for name, spec in specs.items()} == room.digests()
    assert not kept.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-3],
        lambda text: text.replace(b" ", b""),
        lambda text: text.translate(bytes.maketrans(b"0123456789abcdef", b"123456789abcdef0")),
        lambda text: b"".join(line[:130] + b"\n" for line in text.splitlines()),
        lambda text: b"\xff" + text,
        lambda text: b"",
    ],
    ids=["cut", "without blanks", "other letters", "without its own digest", "no text", "empty"],
)
def test_a_damaged_index_costs_a_search(room: Room, kept: Path, damage: Callable[[bytes], bytes]):
    found, _ = kept_digests(room)
    (index,) = kept.iterdir()
    index.write_bytes(damage(index.read_bytes()))
    assert kept_digests(room) == (found, True)


def test_an_index_that_others_can_write_is_not_read(room: Room, kept: Path):
    found, _ = kept_digests(room)
    (index,) = kept.iterdir()
    begins, digest, _ = index.read_text().splitlines()[0].split()
    wrong = digest[::-1]
    index.write_text(f"{begins} {wrong} {sources.digest_of(begins, wrong)}\n")
    assert wrong in kept_digests(room)[0].values()
    index.chmod(0o666)
    assert kept_digests(room) == (found, True)
    index.chmod(0o644)
    kept.parent.chmod(0o777)
    assert kept_digests(room) == (found, True)


def test_a_directory_that_cannot_be_written_costs_searches_alone(room: Room, kept: Path):
    kept.parent.write_text("a file")
    assert kept_digests(room) == kept_digests(room) == (room.digests(), True)


def test_the_last_indexes_are_kept(room: Room, kept: Path):
    kept_digests(room)
    for count in range(store.INDEXES + 3):
        (kept / f"old-{count}").write_text("")
        os.utime(kept / f"old-{count}", (count, count))
    room.edit("device.py", "x + x", "x * x")
    kept_digests(room)
    assert len(list(kept.iterdir())) == store.INDEXES
    assert not (kept / "old-0").exists() and (kept / f"old-{store.INDEXES + 2}").exists()


# -- files as they are -------------------------------------------------------------------------------------------------


def digest(root: Path) -> str:
    return sources.state_of([root])


def test_editing_adding_moving_and_removing_a_file_change_the_digest_of_a_folder(room: Room):
    seen = {digest(room.folder)}
    room.edit("device.py", "# twice", "# two times")
    seen.add(digest(room.folder))
    (room.folder / "new.py").write_text("")
    seen.add(digest(room.folder))
    (room.folder / "new.py").rename(room.folder / "newer.py")
    seen.add(digest(room.folder))
    (room.folder / "kernel.py").unlink()
    seen.add(digest(room.folder))
    (room.folder / "notes.md").write_text("thoughts")
    assert len(seen) == 5 and digest(room.folder) in seen


def test_the_digest_of_a_folder_does_not_depend_on_where_it_lies(room: Room, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere" / PACKAGE
    shutil.copytree(room.folder, elsewhere)
    assert digest(elsewhere) == digest(room.folder)


def test_a_link_that_leads_nowhere_changes_no_digest(room: Room):
    """Emacs marks a file that is being edited by such a link beside it."""
    before, kernels = digest(room.folder), room.digests()
    (room.folder / ".#device.py").symlink_to("someone@a-machine.1234:5678")
    assert digest(room.folder) == before and room.digests() == kernels


def test_a_file_that_is_not_there_is_refused(room: Room):
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*mainlop\.py"):
        digest(room.folder / "mainlop.py")
