"""Limbs of scaled or reordered rows: inputs lane by lane in NumPy, what is launched, and in which order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm import PackedWeight, quantized_linear, served
from cute_kernels.gemm.plan import problem_of
from cute_kernels.gemm.reference import prepare_input
from cute_kernels.gemm.wgmma import factored_limbs
from cute_kernels.gemm.wgmma.factored_limbs_compile import FactoredLimbsSpec
from cute_kernels.gemm.wgmma.factored_limbs_config import FactoredLimbsConfig
from cute_kernels.gemm.wgmma.factored_limbs_launch import FactoredLimbProduct
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, NORMED, ORDERED, SCALED
from cute_kernels.runtime import default_cache, native
from cute_kernels.runtime.gpu import standing_in
from tests.attention import warp as machine
from tests.launchers import cpu_as_gpu, recording
from tests.linear import machine_code
from tests.linear.warpgroup import WarpgroupWarp

K = 32 * 8  # a piece for each lane
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = {SCALED: 1, ORDERED: 2}  # pieces of 16 bytes of factors, or of numbers, of eight inputs


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1).copy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_limbs_are_made_of_the_inputs_that_a_launch_before_would_make(dtype: str, kind: str, run_on):
    generator = torch.Generator().manual_seed(0)
    x, factors = torch.randn(2, K, generator=generator).to(DTYPES[dtype])
    order = torch.randperm(K, generator=generator).to(torch.int32)
    parts = [bytes_of(part) for part in (x, order if kind == ORDERED else factors)]
    run_on(WarpgroupWarp(np.zeros(16, np.uint8), np.concatenate(parts)))
    subject: Any = factored_limbs.FactoredLimbsKernel(FactoredLimbsConfig(dtype, kind))
    own = subject.ask(machine.Int64(parts[0].size), machine.LANES)
    words = subject.inputs(machine.Int64(0), machine.LANES, own)
    bits = np.stack([np.asarray(word, np.uint32) for word in words], axis=1).reshape(-1)
    found = torch.from_numpy(bits.view(np.int16).copy()).view(DTYPES[dtype])
    want = prepare_input(x, order, None) if kind == ORDERED else prepare_input(x, None, factors)
    assert torch.equal(found, want)


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_behind_begins_when_all_before_have_ended(kind: str, tmp_path):
    """It reads weights without a wait. Factors and orders are asked for before the wait, in the machine code too."""
    (artifact,) = default_cache().artifacts([FactoredLimbsSpec(FactoredLimbsConfig("bf16", kind))], "sm_90a")
    code = [opcode for _, opcode, _ in machine_code.instructions(artifact.object_code, tmp_path)]
    wait = code.index("ACQBULK")
    assert sum(opcode.startswith("LDG.E") for opcode in code[:wait]) == KINDS[kind]
    assert wait < code.index("PREEXIT")


def test_both_launches_are_given_what_they_take():
    calls: list[tuple[Any, ...]] = []
    product = FactoredLimbProduct(
        lambda *arguments: calls.append(("limbs", *arguments)),
        lambda *arguments: calls.append(("product", *arguments)),
        rows=16,
        groups=5,
    )
    x = torch.zeros(15, LIMB_GROUP * 5, dtype=torch.bfloat16)
    numbers = {"n": 8, "num_tiles": 9, "k_blocks": 10, "whole": 11, "splits": 12, "num_ctas": 13}
    addresses = {"codes": 1, "scales": 2, "zeros": 3, "bias": 4, "residual": 5, "out": 6, "workspace": 7}
    made: list[torch.Tensor] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty_strided(shape, strides, dtype=dtype))
        return made[-1]

    with standing_in(cpu_as_gpu(empty=empty)):
        send = product.bound(numbers | {"activation": 14, "out_kind": 15, "eps": 1, "offset": 1})
        send(x=x, **addresses, factors=77)
    (blocks,) = made
    assert calls == [
        ("limbs", x, blocks.data_ptr(), 77, 16, 5),
        ("product", x, 1, 2, blocks.data_ptr(), 4, 5, 6, 7, *range(8, 16), 16),
    ]


N, WIDE_K = 28_672, 4096


def weight(**options: Any) -> PackedWeight:
    codes = torch.zeros(N // 64, WIDE_K // 64, 2048, dtype=torch.uint8)
    scales = torch.zeros(N // 64, WIDE_K // 128, 64, dtype=torch.bfloat16)
    return PackedWeight(codes, scales, None, integers(4), (N, WIDE_K), **options)


@pytest.mark.parametrize("m", [16, 17, 24])
def test_rows_that_come_in_limbs_have_no_launch_before_these(m: int):
    """But for the order of up to 16 rows, which CTAs make limbs of, and for both at once."""
    x = torch.ones(m, WIDE_K, dtype=torch.bfloat16)
    scale, order = torch.ones(WIDE_K, dtype=torch.bfloat16), torch.arange(WIDE_K, dtype=torch.int32)
    found: dict[str, list[str]] = {}
    for name, given in (
        ("scaled", {"input_scale": scale}),
        ("ordered", {"perm": order}),
        ("both", {"input_scale": scale, "perm": order}),
    ):
        with recording() as recorded:
            quantized_linear(x, weight(**given))
        found[name] = [launch.symbol for launch in recorded.launches]
    assert found["both"][0] == "linear_inputs_bf16_order8192_scaled"
    if m <= 16:
        (only,) = found["scaled"]
        assert only.endswith("scaled") and found["ordered"][0] == "linear_inputs_bf16_order8192"
    else:
        assert [found[kind][0] for kind in KINDS] == [f"linear_limb_blocks_bf16_{kind}" for kind in KINDS]
        assert all(len(found[kind]) == 2 and found[kind][1] == found["both"][-1] for kind in KINDS)


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize("m", [1, 17])
def test_an_option_is_a_launch_where_its_kernel_would_have_to_be_compiled_and_cannot(m: int, noted: bool):
    """Without the compiler, whatever a bundle holds of options, and in a server, whose steps wait for nothing."""
    x, ones = torch.ones(m, WIDE_K, dtype=torch.bfloat16), torch.ones(WIDE_K, dtype=torch.bfloat16)
    order = torch.arange(WIDE_K, dtype=torch.int32)
    options: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "linear_inputs": ({"input_scale": ones}, {}),
        "linear_inputs_": ({"perm": order}, {}),
        "norm_rms": ({}, {"norm": ones}),
    }
    try:
        with recording() as recorded, nullcontext() if noted else native.having(dsl_version=lambda: None):
            if noted:
                served.note_ready(problem_of(1, N, WIDE_K, integers(4), torch.bfloat16, 0, False), [m])
            quantized_linear(x, weight())
            plain = [launch.symbol for launch in recorded.launches]
            for first, (of_weight, of_call) in options.items():
                del recorded.launches[:]
                quantized_linear(x, weight(**of_weight), **of_call)
                found = [launch.symbol for launch in recorded.launches]
                assert found[0].startswith(first) and found[1:] == plain
    finally:
        served.forget_ready()


def test_a_norm_is_refused():
    reason = FactoredLimbsConfig("bf16", NORMED).can_implement()
    assert reason and "normed" in reason
