"""Limits of architectures: who names one, and what a spec refuses."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import cute_kernels
from cute_kernels.architecture import HOPPER, LIMITS, Limits, least_of
from cute_kernels.runtime.device import SUPPORTED_ARCHS
from cute_kernels.runtime.spec import KernelSpec
from tests import golden

PACKAGE = Path(cute_kernels.__file__).parent
# The spec, and what is written for an architecture's instructions: a configuration, or a mainloop.
MOST_IMPORTERS = 9


@dataclass(frozen=True)
class Config:
    shared_bytes: int
    limits: ClassVar[Limits] = HOPPER


@dataclass(frozen=True, eq=False)
class Spec(KernelSpec):
    config: Any
    family: ClassVar[str] = "toy"

    def compile(self, arch: str) -> Any:
        raise NotImplementedError


class OlderSpec(Spec):
    archs: ClassVar[tuple[str, ...]] = ("sm_86", "sm_90a")


def imports(path: Path, module: str) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.ImportFrom) and node.module == module for node in nodes)


def test_few_files_name_an_architectures_limits():
    found = [path for path in PACKAGE.rglob("*.py") if imports(path, "cute_kernels.architecture")]
    assert 0 < len(found) <= MOST_IMPORTERS, found


def test_every_architecture_that_is_compiled_for_has_limits():
    assert LIMITS.keys() >= set(SUPPORTED_ARCHS.values())


def test_a_cta_that_exceeds_a_limit_is_refused_with_both_numbers():
    assert HOPPER.refuses(1024, 227 * 1024) is None
    assert HOPPER.refuses(1056, 0) == "1056 threads are more than the 1024 of a CTA"
    assert HOPPER.refuses(32, 232449) == "232449 bytes of shared memory exceed the 232448 of a CTA"


def test_the_least_of_some_architectures_fits_each():
    least = least_of(LIMITS)
    assert least.shared_bytes == 99 * 1024
    assert all(limits.holds(least) for limits in LIMITS.values())
    assert not LIMITS["sm_86"].holds(HOPPER) and not HOPPER.holds(replace(HOPPER, threads=2048))
    assert not replace(HOPPER, reserved_shared_bytes=2048).holds(HOPPER)


def test_a_kernel_that_counts_with_more_than_an_architecture_has_is_refused():
    spec = OlderSpec(Config(0))
    spec.check_arch("sm_90a")
    with pytest.raises(ValueError, match="want no more than sm_86 has: .*101376"):
        spec.check_arch("sm_86")
    with pytest.raises(ValueError, match="want 'sm_90a'"):
        Spec(Config(0)).check_arch("sm_86")


def test_shipped_kernels_count_with_what_their_architectures_have():
    specs = {spec for spec, _ in golden.inventory()}
    assert specs
    for spec in specs:
        for arch in spec.archs:
            spec.check_arch(arch)
