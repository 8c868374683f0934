"""Lists of kernels: every shipped one comes back as it was; what is no list is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_kernels import families
from cute_kernels.__main__ import main
from cute_kernels.runtime import aot, wanted

ARCH = "sm_90a"


def test_every_shipped_kernel_comes_back_as_it_was(tmp_path: Path):
    specs = families.shipped_specs()
    path = tmp_path / "list.json"
    wanted.write(path, specs, ARCH)
    found = wanted.read(path, ARCH)
    assert len(found) == len(specs) and set(found) == set(specs)
    assert {spec.symbol for spec in found} == {spec.symbol for spec in specs}


def test_a_list_grows(tmp_path: Path):
    first, second, third = families.shipped_specs()[:3]
    path = tmp_path / "somewhere" / "list.json"
    wanted.write(path, [first, second], ARCH)
    wanted.write(path, [second, third], ARCH)
    assert set(wanted.read(path, ARCH)) == {first, second, third}


def test_kernels_of_another_version_leave_a_list_that_grows(tmp_path: Path):
    first, second = families.shipped_specs()[:2]
    path, record = tmp_path / "list.json", wanted.record_of(first)
    others = [record | {"config": {**record["config"], "gone": 1}}, record | {"spec": f"{record['spec']}Gone"}]
    path.write_text(json.dumps({"format": 1, "arch": ARCH, "kernels": [record, *others]}))
    with pytest.raises(ValueError, match="got no list of kernels of this version"):
        wanted.read(path, ARCH)
    wanted.write(path, [second], ARCH)
    assert set(wanted.read(path, ARCH)) == {first, second}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 7}, "got format 7, want 1"),
        ({"arch": "sm_80"}, "got kernels for 'sm_80', want 'sm_90a'"),
        ({"kernels": [{"spec": "os:system", "config": {}}]}, "got .os:system., want a class of cute_kernels"),
        ({"kernels": [{"spec": "cute_kernels.runtime.wanted:Path", "config": {}}]}, "want a KernelSpec"),
        (
            {"kernels": [{"spec": "cute_kernels.gemm.experts.spec:ExpertSpec", "config": {"no": 1}}]},
            "no list of kernels",
        ),
        ({"kernels": None}, "got no list of kernels"),
    ],
)
def test_what_is_no_list_is_refused(tmp_path: Path, change: dict, words: str):
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"format": 1, "arch": ARCH, "kernels": [], **change}))
    with pytest.raises(ValueError, match=words):
        wanted.read(path, ARCH)


def test_a_bundle_is_built_from_a_list(tmp_path: Path):
    from cute_kernels.gemm.experts.config import CombineConfig
    from cute_kernels.gemm.experts.spec import ExpertSpec

    specs = [ExpertSpec(CombineConfig("bf16")), ExpertSpec(CombineConfig("fp16"))]
    wanted.write(tmp_path / "list.json", specs, ARCH)
    bundle = tmp_path / "bundle"
    command = ["aot", "build", "--arch", ARCH, "--list", str(tmp_path / "list.json"), "-o", str(bundle)]
    assert main(command) == 0
    assert aot.open_bundle(bundle).symbols == sorted(spec.symbol for spec in specs)
