"""A spec is a value: equal by family and configuration, with an identity that survives the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from cute_kernels.runtime import KernelSpec, compile_options
from cute_kernels.runtime.artifact import compile_artifact
from tests.runtime.tiny import BrokenSpec, TinyConfig, TinySpec


def test_equal_configurations_are_one_spec():
    assert TinySpec(TinyConfig(scale=3.0)) == TinySpec(TinyConfig(scale=3.0))
    assert hash(TinySpec(TinyConfig(scale=3.0))) == hash(TinySpec(TinyConfig(scale=3.0)))
    assert TinySpec(TinyConfig(scale=3.0)) != TinySpec(TinyConfig(scale=4.0))
    assert TinySpec() != BrokenSpec()


def test_the_default_symbol_names_family_and_configuration():
    one, other = TinySpec(TinyConfig(scale=3.0)), TinySpec(TinyConfig(scale=4.0))
    assert one.symbol.startswith("tiny_") and one.symbol.isidentifier()
    assert one.symbol != other.symbol
    assert one.symbol == TinySpec(TinyConfig(scale=3.0)).symbol


def test_the_configuration_is_canonical_json():
    assert TinySpec().config_json() == '{"scale":2.0,"smem_floats":256}'


def test_options_always_name_the_architecture():
    assert compile_options("sm_90a", "--opt-level 3") == "--enable-tvm-ffi --gpu-arch sm_90a --opt-level 3"


def test_an_architecture_that_a_kernel_is_not_written_for_is_refused_by_name():
    TinySpec().check_arch("sm_90a")
    with pytest.raises(ValueError, match=r"arch: got 'sm_100' for tiny:tiny_\w+, want 'sm_90a'"):
        TinySpec().check_arch("sm_100")
    with pytest.raises(ValueError, match="arch: got 'sm_80'"):
        compile_artifact(TinySpec(), "sm_80")


@dataclass(frozen=True)
class OddConfig:
    value: Any = 1


@dataclass(frozen=True)
class OddSpec(KernelSpec):
    config: Any
    family: ClassVar[str] = "odd"

    def compile(self, arch: str) -> Any:
        return "not a compiled kernel"


@pytest.mark.parametrize("config", [{"a": 1}, None, OddConfig])
def test_a_configuration_must_be_a_dataclass_instance(config: Any):
    with pytest.raises(TypeError, match=r"config of OddSpec must be a dataclass instance"):
        OddSpec(config).config_json()


def test_a_configuration_must_hold_json_values():
    with pytest.raises(TypeError, match=r"config of OddSpec must hold JSON values only"):
        OddSpec(OddConfig(value=object())).config_json()


def test_a_symbol_must_be_a_c_identifier():
    class Dashed(OddSpec):
        symbol = "with-dash"  # pyright: ignore[reportAssignmentType]

    with pytest.raises(ValueError, match=r"symbol of .*Dashed must be a C identifier, got 'with-dash'"):
        Dashed(OddConfig()).check()
