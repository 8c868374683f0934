"""Shipped kernels compile without a GPU and keep what they must: no spill, their instructions, room on an SM."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest

from cute_kernels import families
from cute_kernels.formats.weights import FP8_BLOCK, MXFP4, NVFP4, WeightFormat, integers
from cute_kernels.gemm.experts.ranges.schedule import among_assignments, make_ranges
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.problem import GroupedProblem, LinearProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.resident_schedule import resident_configs
from cute_kernels.runtime import KernelSpec, default_cache, native
from tests import golden
from tests.each import each
from tests.golden import rules

SPECS = families.shipped_specs()
FULL = tuple(
    f"decode_{rows}_bf16_d128_h2q1s4b1_*_map_strided_p64_units_paged" for rows in ("int4_g4", "int8_token_head")
)
"""Kernels of paged decode that have no register to spare: the first to spill, and much used."""
WITHOUT_A_REGISTER_TO_SPARE = [spec for spec in SPECS if any(fnmatchcase(spec.symbol, name) for name in FULL)]

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")


@cache
def drawn() -> list[KernelSpec]:
    return list(dict.fromkeys([*golden.sample(SPECS, golden.SHIPPED_SAMPLE), *WITHOUT_A_REGISTER_TO_SPARE]))


@pytest.fixture(scope="module")
def measured() -> dict[str, golden.Entry]:
    return golden.measure(drawn(), default_cache())


@each("spec", drawn)
def test_a_kernel_keeps_what_it_must(spec: KernelSpec, measured: dict[str, golden.Entry]):
    assert [line for kernel in measured[spec.symbol] for line in rules.broken(spec, kernel)] == []


def test_the_kernels_without_a_register_to_spare_are_measured():
    assert all(any(fnmatchcase(spec.symbol, name) for spec in drawn()) for name in FULL)


LIMB_CASES = [(form, case) for form in (MXFP4, NVFP4, FP8_BLOCK, integers(4)) for case in ((1, 4096), (8, 4096))]


@pytest.mark.parametrize(("form", "case"), LIMB_CASES, ids=str)
def test_rules_know_the_mmas_of_limbs(form: WeightFormat, case: tuple[int, int]):
    """Formats whose kernels of limbs do not ship have them compiled elsewhere."""
    m, size = case
    wanted = "QGMMA" if form.bytes_in_e4m3 else "IGMMA"
    dense = resident_configs(LinearProblem(m, size, size, size, form, "bf16"))
    assert bool(dense) == (m == 1 or form is not NVFP4)
    experts = [make_ranges(GroupedProblem(m, 8, size, size, size, form, "bf16"))]
    experts += [found for one in experts if (found := among_assignments(one, m))]
    specs: list[KernelSpec] = [*map(GemmSpec, dense), *(ExpertSpec(one.config) for one in experts)]
    for spec in specs:
        names = next(names for pattern, names in rules.INSTRUCTIONS.items() if fnmatchcase(spec.symbol, pattern))
        assert rules.MMA & set(names.split()) == {wanted}, spec.symbol


GOOD: dict[str, Any] = {
    "registers": 168,
    "threads": 384,
    "stack_bytes": 0,
    "spill_store_bytes": 0,
    "spill_load_bytes": 0,
    "dynamic_smem_bytes": 200_000,
    "static_smem_bytes": 1024,
    "num_instructions": 2000,
    "opcodes": {"HGMMA": 16, "UTMALDG": 4, "UBLKCP": 6},
}
SERIALISED = "a fence and a wait for each MMA: ptxas serialised them, want one for each commit group"
TILES = next(spec for spec in SPECS if spec.symbol.startswith("linear_wgmma_w4bf16_g128_m256n64x2k64_"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"spill_store_bytes": 8}, ["8 bytes of a thread in local memory, want at most 0"]),
        ({"registers": 176}, ["67584 registers of 1 CTAs, want at most 65536"]),
        ({"dynamic_smem_bytes": 232_449}, ["233473 bytes of shared memory of 1 CTAs, want at most 233472"]),
        ({"opcodes": {"HMMA": 16, "UTMALDG": 4, "UBLKCP": 6}}, ["MMA instructions ['HMMA'], want ['HGMMA']"]),
        ({"opcodes": {"HGMMA": 16, "UBLKCP": 6}}, ["copies by ['UBLKCP'], want ['UBLKCP', 'UTMALDG']"]),
        ({"opcodes": GOOD["opcodes"] | {"WARPGROUP": 31}}, []),
        ({"opcodes": GOOD["opcodes"] | {"WARPGROUP": 32}}, [SERIALISED]),
    ],
)
def test_a_broken_rule_is_said(change: dict[str, Any], said: list[str]):
    assert list(rules.broken(TILES, GOOD | change)) == said
