"""What compute-sanitizer is shown: every kind of kernel, and calls whose results are looked at."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from bench.linear import Format
from bench.workloads import MoeModel, MoeShape
from cute_kernels.runtime import KernelCache
from cute_kernels.runtime.spec import KernelSpec
from tests.gpu import sanitize, sanitize_cases
from tests.gpu.sanitize_cases import (
    CASES,
    DEFERRED,
    EXPERTS,
    EXTEND,
    LAYERS,
    NORMS,
    STEPS,
    Case,
    DeferredNormCase,
    LayerCase,
    LayerProductsCase,
    LinearCase,
    NormCase,
    StepCase,
)

KINDS = {
    "tiles by TMA": "extend_bf16",
    "producers that decode bytes": r"extend_int8_token_head_bf16_d128_t128\w*p8",
    "producers that decode groups": r"extend_int4_g4_bf16_d128_t128\w*p8",
    "unpacking": "extend_unpack_int8",
    "unpacked keys": "extend_int8_token_head_\\w+_unpacked$",
    "splits put together": "extend_combine",
    "FP8 products": r"extend_e4m3_tensor\w*_fp8",
    "values transposed for them": r"extend_unpack_e4m3\w*e4m3",
    "keys times queries, 40 rows": r"extend_int4_g4\w*_q40",
    "keys times queries, 72 rows": r"extend_e4m3_tensor\w*_q72",
    "keys times queries of two heads, rows behind scales": r"extend_int8_token_head\w*_q72",
    "limbs that stay, rows loaded": "resident32loads",
    "limbs that stay, rows by TMA": "resident32$",
    "blocks of seven tiles": "resident16less1$",
    "two warpgroups in turn": "m32p4n128x2k128_s2r10_dsmem2k2",
    "three warpgroups in turn": "m16n128x3k128_s2r12_dsmem2k3",
    "clusters that exchange accumulators": "cluster2",
    "zero points in limbs": r"w4bf16_g128z\w*resident32loads$",
    "zero points in limbs, blocks of many tiles": r"w4bf16_g128z\w*resident16",
    "small groups in limbs": r"w4bf16_g32_\w*resident32$",
    "mma.sync": "linear_w4fp16_g32z_m8",
    "8 bits": "linear_wgmma_w8",
    "many rows": "m256n64x2",
    "tiles as work ranges": r"m128n64x2\w*_ranges3$",
    "tiles of fewer rows as work ranges": r"m96n64x2\w*_ranges5$",
    "experts' work ranges": "ranges1",
    "assignments as they are": "assigned1",
    "tiles of entries": r"m16n64x2k\w*entries1",
    "tiles of entries, a long K": r"m8n64x2k512\w*entries1",
    "experts' tiles in limbs": "grouped_linear_wgmma_w4bf16_g128_m32p4n128x2k128_s2limbs",
    "experts' tiles in bf16": "grouped_linear_wgmma_w4bf16_g128_m48p6",
    "a norm deferred in limbs": "resident32.*_gives_norm$",
    "a norm deferred in clusters": r"m32\w*dsmem2k2_takes_norm$",
    "a norm deferred by clusters that exchange rows": "cluster2_takes_norm$",
    "a norm deferred by clusters of two tiles": r"m64n64x2\w*dsmem2_takes_norm$",
    "tiles of 48 rows in clusters": r"m48n64x2\w*dsmem2$",
    "tiles of 256 features": r"m64n128x2\w*_split$",
    "norms that put rows in order": r"norm_rms_bf16\w*_ordered_scaled$",
    "a norm deferred by whole tiles": "m80n64x1.*_split_gives_norm$",
    "products of a layer": "layer_products_bf16_m1_",
    "a norm behind a sum": "norm_rms_bf16.*_residual$",
    "steps in one launch, rows in bulk": r"^step_decode_int4_g4_bf16_d128\w*_bulk_p64_units",
    "steps in one launch, tiles by TMA": r"^step_decode_bf16_bf16_d128\w*_tma_p64_units",
    "steps in one launch, no pages": r"^step_decode_e4m3_tensor\w*_tma_head_major",
    "sorting": "moe_routing",
    "adding up": "moe_combine",
}


@cache
def symbols() -> set[str]:
    cases = {**STEPS, **EXTEND, **LAYERS, **DEFERRED, **NORMS, **EXPERTS}.values()
    return {spec.symbol for case in cases for spec in case.specs()}


@pytest.mark.parametrize("pattern", KINDS.values(), ids=list(KINDS))
def test_every_kind_of_kernel_is_run(pattern: str):
    assert any(re.search(pattern, symbol) for symbol in symbols())


SMALL = {
    "linear": LinearCase(200, 256, 3),
    "zeros": LinearCase(128, 256, 2, Format(4, 32, True, "fp16")),
    "layer": LayerCase(MoeShape(MoeModel("tiny", 4, 2, 256, 128), 5)),
    "deferred norm": DeferredNormCase(256, 256, 200, 3),
    "products of a layer": LayerProductsCase(256, 256, 256, 128),
    "norm": NormCase(3, 256),
    "attention": CASES["bf16"],
    "extend": CASES["extend-int8_token_head"],
    "FP8 products": CASES["extend-fp8"],
    "keys times queries": CASES["extend-int4_g4-key-rows"],
    "step": StepCase("int4_g4", (70, 3)),
}


@pytest.mark.parametrize("case", SMALL.values(), ids=list(SMALL))
def test_references_pass(case: Case):
    assert case.run("cpu")


WRONG_RESULTS = [
    (SMALL["linear"], "quantized_linear"),
    (SMALL["deferred norm"], "quantized_linear"),
    (SMALL["layer"], "fused_moe"),
    (SMALL["step"], "append_and_decode"),
]


@pytest.mark.parametrize("wrong", [0.02, float("nan")])
@pytest.mark.parametrize("case, name", WRONG_RESULTS)
def test_a_wrong_result_is_seen(case: Case, name: str, wrong: float, monkeypatch):
    right = getattr(sanitize_cases, name)

    def slightly_wrong(*args, **options):
        return right(*args, **options).mul_(1 + wrong)

    monkeypatch.setattr(sanitize_cases, name, slightly_wrong)
    with pytest.raises(AssertionError):
        case.run("cpu")


def test_cases_are_listed_and_unknown_ones_refused(capsys):
    assert sanitize.main(["list"]) == 0
    assert capsys.readouterr().out.split() == list(CASES)
    assert sanitize.main(["build", "linear-none"]) == 2
    assert "unknown case linear-none; there are int4_g1," in capsys.readouterr().err


class Bundle(KernelCache):
    """Has every kernel but those whose names begin so."""

    def __init__(self, lacks: str) -> None:
        super().__init__(Path("nothing-is-kept"))
        self.lacks = lacks

    def has(self, spec: KernelSpec, arch: str) -> bool:
        return arch == sanitize.ARCH and not spec.symbol.startswith(self.lacks)


def test_kernels_of_a_bundle_need_not_be_compiled():
    names = ["norm", "linear-one-row", "extend-bf16"]
    assert sanitize.missing(names, Bundle("nothing")) == []
    assert sanitize.missing(names, Bundle("norm_")) == ["norm"]
