"""The comparison of two revisions' kernels sees every difference in code, and no difference in names."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cute_kernels.runtime import KernelCache, native
from cute_kernels.runtime.store import key_of
from tests.golden import ARCH, collect, compare
from tests.golden.compare import Kernel, Map, Outcome
from tests.golden.toy import ToyConfig, ToySpec

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
VERSIONS = ("Before", "AfterAnotherName", "OtherConstant", "OtherGrid", "OtherSharedMemory")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    """Each version compiled; the renamed class has a symbol of its own too."""
    cache = KernelCache(tmp_path_factory.mktemp("toys"))
    names = {version: "toy_new_name" if version == "AfterAnotherName" else "toy" for version in VERSIONS}
    specs = {version: ToySpec(ToyConfig(version, name)) for version, name in names.items()}
    cache.artifacts(specs.values(), ARCH)
    return {
        version: Kernel(spec.symbol, ARCH, cache.store.folder(key_of(spec, ARCH))) for version, spec in specs.items()
    }


def compared(old: list[Kernel], new: list[Kernel], names: Map) -> Outcome:
    """As `compare.main` does where every kernel's IR differs."""
    outcome = Outcome()
    sides = [{(item.symbol, item.arch): item for item in kernels} for kernels in (old, new)]
    for a, b in compare.pair(sides[0], sides[1], names, outcome):
        compare.compare(outcome, sides[0][a], sides[1][b], names)
    return outcome


def test_a_renamed_class_and_symbol_are_the_same_under_the_map(toys: dict[str, Kernel]):
    names = Map(renamed=[("^toy$", "toy_new_name")])
    outcome = compared([toys["Before"]], [toys["AfterAnotherName"]], names)
    assert (outcome.same, outcome.unexplained, outcome.explained) == (1, [], [])
    assert outcome.classes == {("Before.kernel", "AfterAnotherName.kernel"): 1}


def test_a_renamed_symbol_without_a_map_is_a_kernel_lost_and_a_kernel_new(toys: dict[str, Kernel]):
    outcome = compared([toys["Before"]], [toys["AfterAnotherName"]], Map())
    assert outcome.same == 0
    assert outcome.unexplained == [f"- toy for {ARCH}", f"+ toy_new_name for {ARCH}"]


@pytest.mark.parametrize(
    ("version", "seen"),
    [("OtherConstant", ".text.kernel0"), ("OtherGrid", "host function"), ("OtherSharedMemory", "shared memory")],
)
def test_a_difference_is_unexplained_until_the_map_has_its_reason(toys: dict[str, Kernel], version: str, seen: str):
    (line,) = compared([toys["Before"]], [toys[version]], Map()).unexplained
    assert line.startswith(f"~ toy for {ARCH}: ") and seen in line
    outcome = compared([toys["Before"]], [toys[version]], Map(changed={"toy": "wanted"}))
    assert outcome.unexplained == [] and outcome.explained == [f"{line}: wanted"]


def test_a_larger_grid_leaves_the_device_code_alone(toys: dict[str, Kernel]):
    (line,) = compared([toys["Before"]], [toys["OtherGrid"]], Map()).unexplained
    assert "cubin" not in line


def test_kernels_gone_and_new_can_be_explained(toys: dict[str, Kernel]):
    names = Map(removed={"toy": "not needed"}, added={"toy_.*": "needed"})
    outcome = compared([toys["Before"]], [toys["AfterAnotherName"]], names)
    assert outcome.unexplained == []
    assert outcome.explained == [f"- toy for {ARCH}: not needed", f"+ toy_new_name for {ARCH}: needed"]


def test_two_symbols_mapped_to_one_are_reported(toys: dict[str, Kernel]):
    names = Map(renamed=[("^toy.*$", "toy")])
    outcome = compared([toys["Before"], toys["AfterAnotherName"]], [toys["Before"]], names)
    assert outcome.unexplained == ["toy_new_name and toy are mapped to one symbol"]


def test_a_map_with_an_unknown_key_is_refused(tmp_path: Path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"rename": []}))
    with pytest.raises(ValueError, match=r"got \['rename'\], want some of"):
        compare.read_map(path)


def test_kernels_that_are_new_or_have_other_sources_are_affected(capsys: pytest.CaptureFixture[str]):
    old = {("a", ARCH): "1 f:1", ("b", ARCH): "2 f:1 g:1 h:1", ("gone", ARCH): "3"}
    new = {("a", ARCH): "1 f:1", ("b", ARCH): "4 f:1 g:2", ("new", ARCH): "5 f:1"}
    assert compare.differing_sources(old, new) == [("b", ARCH), ("new", ARCH)]
    compare.show_affected(old, new)
    said = capsys.readouterr().out.splitlines()
    assert sorted(said[2:5]) == ["  1 by (a new kernel)", "  1 by g", "  1 by h"]
    assert said[5] == "2 of 3 kernels have other sources"


@pytest.mark.skipif(not (compare.ROOT / ".git").exists(), reason="needs the repository")
def test_a_worktree_holds_the_revision_and_goes_away():
    with compare.worktree("HEAD") as tree:
        want = subprocess.run(
            ["git", "-C", str(compare.ROOT), "show", "HEAD:LICENSE"], capture_output=True, text=True, check=True
        )
        assert (tree / "LICENSE").read_text() == want.stdout
    assert not tree.exists()


def test_the_inventory_is_what_ships():
    symbols = [(spec.symbol, arch) for spec, arch in collect.inventory()]
    assert len(set(symbols)) == len(symbols)
    assert {arch for _, arch in symbols} == {ARCH}


@pytest.mark.usefixtures("compiler_kept")
def test_ir_differs_by_code_and_not_by_names():
    digests = {version: collect.trace((ToySpec(ToyConfig(version, "toy")), ARCH)) for version in VERSIONS}
    assert digests["Before"] == digests["AfterAnotherName"]
    assert len(set(digests.values())) == len(VERSIONS) - 1
