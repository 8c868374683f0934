"""What holds of every registered weight format; a format has these tests by being registered.

Importing `tests.weight_formats` registers those of this folder, which are no part of the package.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import PackedWeight, quantize_experts, quantize_model, quantize_weight, quantized_linear
from cute_kernels.formats.weights import (
    FP8,
    MXFP4,
    NVFP4,
    IntegerFormat,
    WeightFormat,
    integers,
    register,
    registered_formats,
    shifted,
)
from cute_kernels.formats.weights import weight_format as format_of
from cute_kernels.formats.weights.base import spelling
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.experts import choice as moe_choice
from cute_kernels.gemm.experts.compile import specs_of as grouped_specs_of
from cute_kernels.gemm.problem import GroupedProblem, LinearProblem
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.slices import slice_inputs, slice_outputs
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.mainloops import MmaSync, RegisterWgmma
from cute_kernels.model_config import describe_layers
from cute_kernels.runtime import KernelSpec, default_cache
from cute_kernels.runtime.sources import reached
from layouts.weights import hopper
from tests import golden
from tests.linear.cases import random_weight
from tests.weight_formats import codebook

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
FORMATS = registered_formats()
# One of each kind for what takes long: tests/linear goes through all integers.
SMALL = [form for form in FORMATS if form.group_size in (16, 32)]
GROUPS_OF_16 = [integers(4, 16), integers(8, 16, True), shifted(4, 16)]
KINDS = [*{(type(form), form.bits, form.has_zeros): form for form in SMALL}.values(), FP8]
every_format = pytest.mark.parametrize("form", FORMATS, ids=str)
every_kind = pytest.mark.parametrize("form", KINDS, ids=str)
decoded = pytest.mark.parametrize(
    ("form", "dtype"),
    [pytest.param(form, dtype, id=f"{form}-{dtype}") for form in KINDS + GROUPS_OF_16 for dtype in form.dtypes],
)


def dtype_of(form: WeightFormat) -> torch.dtype:
    return TORCH_DTYPES[form.dtypes[0]]


def weights(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n))


def test_a_format_in_a_file_of_its_own_is_among_them():
    assert codebook.CODEBOOK in KINDS and not isinstance(codebook.CODEBOOK, IntegerFormat)


def test_fp4_numbers_are_those_of_the_standard():
    """As torch's E2M1 has them where there is one; scales of two levels multiply."""
    codes = torch.arange(16, dtype=torch.uint8).view(1, 1, 16)
    one = torch.tensor([[127]], dtype=torch.uint8)
    wanted = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert MXFP4.dequantize(codes, one, None).flatten().tolist() == wanted
    w = torch.tensor([[1.0, -6.0, 0.5, 3.0] * 4 + [384.0] * 16]) * 2.0**-10
    weight = quantize_weight(w, format=NVFP4)
    assert torch.equal(weight.dequantize(torch.float32), w)
    assert weight.scales.shape == (1, 4 + 4, 64), "groups of the padded K, and four bytes of each row's own scale"
    exact = weight.dequantize(torch.float64)
    scaled = replace(weight, scales=weight.scales.clone(), check_values=False)
    rows, more = weight.scales.shape[1] - NVFP4.more_groups, torch.tensor([0.3]).view(torch.uint8)
    scaled.scales[0, rows:, 0] = more
    ratio = scaled.dequantize(torch.float64)[0, 1] / exact[0, 1]
    assert ratio.item() == pytest.approx(0.3 / NVFP4.choose_row_scales(w).item(), rel=1e-6)


@pytest.mark.parametrize("form", [form for form in FORMATS if form.codes_as_bytes and not form.has_zeros], ids=str)
def test_bytes_of_codes_are_a_power_of_two_times_their_numbers(form, run_on):
    """16 times as integers. A word's lower nibbles are those of row g, its upper ones of row g + 8; of 8-bit codes the
    even bytes of two words, in turn, and the odd ones."""
    pytest.importorskip("cutlass")
    from cute_kernels.device import packed_math
    from tests.attention.warp import LANES, Uint32
    from tests.linear.warp import LinearWarp
    from tests.linear.warpgroup import e4m3_numbers

    run_on(LinearWarp(np.zeros(16, np.uint8), np.zeros(0, np.uint8)))
    decoder = form.byte_decoder(packed_math.HopperMath(form.dtypes[0]))
    words = np.random.default_rng(0).integers(0, 1 << 32, (form.bits // 4, 32), np.uint32)
    found = decoder.fragment([Uint32(word) for word in words], decoder.masks(Uint32(np.zeros_like(LANES))))
    codes = torch.arange(1 << form.bits, dtype=torch.uint8).view(1, 1, -1)
    one = form.stored_scales(torch.ones(1, 1), dtype_of(form))
    numbers = form.dequantize(codes, one, None).flatten().numpy() * 2.0**form.byte_exponent
    for half, word in enumerate(found):
        of_bytes = np.asarray(word, np.uint32).view(np.int8).reshape(32, 4)
        of_bytes = e4m3_numbers(of_bytes.view(np.uint8)) if form.bytes_in_e4m3 else of_bytes
        for byte in range(4):
            if form.bits == 4:
                own = words[0] >> (8 * byte + 4 * half) & 15
            else:
                own = words[byte % 2] >> (8 * (byte // 2 * 2 + half)) & 255
            assert np.array_equal(of_bytes[:, byte], numbers[own], equal_nan=True)


# -- identity ----------------------------------------------------------------------------------------------------------


@every_format
def test_there_is_one_object_of_a_format(form):
    assert format_of(form.key) is form
    assert copy.deepcopy(form) is form and pickle.loads(pickle.dumps(form)) is form
    assert register(form) is form
    with pytest.raises(ValueError, match=f"^{form.key}: got another format of that name"):
        register(replace(form))


def test_what_is_no_format_is_refused_by_name():
    with pytest.raises(ValueError, match="^format: got 'w5_g32', want one such as 'w4g128'.*mxfp4.* did you mean"):
        format_of("w5_g32")
    for arguments, message in (((5, 32), "bits: got 5, want 4 or 8"), ((4, 48), "group_size: got 48, want one of 16")):
        with pytest.raises(ValueError, match=f"^{message}"):
            integers(*arguments)
    with pytest.raises(ValueError, match="together with bits, group_size or zero_point, want it alone"):
        quantize_weight(weights(64, 64), 8, format=codebook.CODEBOOK)
    with pytest.raises(TypeError, match="^dtype: got torch.float16, want bf16 for a weight in the format book4g32e8m0"):
        quantize_weight(weights(64, 64), format=codebook.CODEBOOK, dtype=torch.float16)


# -- values ------------------------------------------------------------------------------------------------------------


@every_format
def test_the_layout_of_its_codes_is_proved(form):
    assert "fragments" in hopper.prove_thread_load(form.bits).claim  # ProofError if it is not so


@every_format
def test_every_weight_that_there_is_keeps_its_code(form):
    """With scales of several sizes, and zero points; the nearest code of what a code stands for is itself."""
    rows = 8
    numbers = [code for code in range(1 << form.bits) if code not in form.nan_codes]
    codes = torch.tensor(numbers, dtype=torch.uint8).expand(rows, 1, -1)
    scales = form.stored_scales(2.0 ** torch.arange(-4, rows - 4).view(rows, 1).float(), dtype_of(form))
    zeros = torch.arange(rows, dtype=torch.uint8).view(rows, 1) if form.has_zeros else None
    w = form.dequantize(codes, scales, zeros)
    assert w.dtype == torch.float32 and torch.equal(form.choose_codes(w, scales, zeros), codes)


@every_format
def test_quantised_weights_are_near(form):
    w = weights(70, 200)
    error = (quantize_weight(w, format=form).dequantize(torch.float64) - w).norm() / w.norm()
    # E4M3 has three bits behind the first: half a step is up to 1/16 of a number.
    assert error < {"e4m3": 0.03}.get(form.codes_name, {4: 0.2, 8: 0.02}[form.bits])


@every_format
def test_a_product_on_the_cpu_is_that_of_the_reference(form):
    packed = quantize_weight(weights(70, 200), format=form)
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)).to(packed.dtype)
    exact = x.double() @ packed.dequantize(torch.float64).to(packed.dtype).double().T
    found = quantized_linear(x, packed, out_dtype=torch.float32).double()
    assert (found - exact).norm() <= 1e-6 * exact.norm()


@every_format
def test_parts_and_copies_of_a_weight_are_those_of_its_values(form):
    packed = random_weight(form, dtype_of(form), 128, 512)
    whole = packed.dequantize(torch.float64)
    parts = {
        "rows": (packed.shard_n(1, 2), whole[64:]),
        "inputs": (packed.shard_k(1, 2), whole[:, 256:]),
        "some rows": (slice_outputs(packed, 3, 99), whole[3:99]),
        "some inputs": (slice_inputs(packed, 256, 400), whole[:, 256:400]),
        "state": (PackedWeight.from_state_dict(packed.state_dict()), whole),
        "moved": (packed.to("cpu"), whole),
    }
    for name, (part, wanted) in parts.items():
        assert torch.equal(part.dequantize(torch.float64), wanted), name
        assert part.format.codes_name == form.codes_name, name


@every_kind
def test_experts_are_weights_of_the_format(form):
    w = torch.stack([weights(64, 64) / 2**power for power in range(4)])  # scales of a tensor with several bytes
    experts = quantize_experts(w, format=form)
    assert experts.format is form
    state = type(experts).from_state_dict(experts.state_dict())
    for i, one in enumerate(state):
        wanted = quantize_weight(w[i], format=form)
        assert torch.equal(one.dequantize(torch.float64), wanted.dequantize(torch.float64))


@every_kind
def test_layers_of_a_model_take_it_and_say_so(form):
    model: Any = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).bfloat16()
    wanted = [quantize_weight(layer.weight, format=form).dequantize(torch.float32) for layer in (model[0], model[2])]
    bias = model[0].bias.detach().clone()
    quantize_model(model, format=form, skip=())
    for layer, weight in zip((model[0], model[2]), wanted, strict=True):
        assert layer.weight_format is form and torch.equal(layer.weight.dequantize(torch.float32), weight)
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(model[0](x), quantized_linear(x, model[0].weight, bias))
    model.to(torch.bfloat16)  # of floating tensors alone
    assert torch.equal(model[0].weight.dequantize(torch.float32), wanted[0])
    other: Any = quantize_model(torch.nn.Sequential(torch.nn.Linear(96, 64)).bfloat16(), bits=8, group_size=64, skip=())
    other[0].load_state_dict(model[0].state_dict())  # takes on the format that is loaded
    assert other[0].weight_format is form and torch.equal(other[0](x), model[0](x))
    (said,) = {json.dumps(group | {"names": []}) for group in describe_layers(other)["linear"]}
    kind = {"bits", "group_size"} if isinstance(form, IntegerFormat) else {"format"}
    assert kind <= json.loads(said).keys() and json.loads(said).get("format", form.key) == form.key


@every_format
def test_a_configuration_is_a_format_as_json(form):

    problem = LinearProblem(16, 4096, 4096, 4096, form, form.dtypes[0])
    spec = GemmSpec(chosen(problem).config)
    assert json.loads(spec.config_json())["format"]["group_size"] == form.group_size
    assert form.symbol_name(form.dtypes[0]) in spec.symbol
    assert Path(str(sys.modules[type(form).__module__].__file__)).resolve() in reached(spec).files


# -- kernels, lane by lane ---------------------------------------------------------------------------------------------


def near(found: np.ndarray, x: torch.Tensor, w: torch.Tensor) -> None:
    exact = (x.double() @ w.T).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


def activations(m: int, k: int, dtype: str) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(TORCH_DTYPES[dtype])


@decoded
def test_the_streaming_kernel_multiplies_it_exactly(form, dtype, run_on):
    pytest.importorskip("cutlass")
    from cute_kernels.device import packed_math
    from cute_kernels.gemm.stream.config import StreamConfig
    from tests.linear.test_products import run_warps

    config = StreamConfig(form, dtype, block_k=128, chunk_k_blocks=2)
    weight = random_weight(form, TORCH_DTYPES[dtype], config.block_rows, 256)
    x = activations(5, 256, dtype)
    w = weight.dequantize(torch.float64)
    scales = form.decoder(dtype, packed_math.HopperMath(dtype)).scales_weights  # and rounds
    near(run_warps(config, weight, x, run_on)[0], x, w.to(weight.dtype).double() if scales else w)


@decoded
@pytest.mark.parametrize("mainloop", [RegisterWgmma(), MmaSync()], ids=lambda mainloop: type(mainloop).__name__)
def test_the_kernel_for_many_rows_multiplies_it(form, dtype, mainloop, run_on):
    pytest.importorskip("cutlass")
    from cute_kernels.gemm.wgmma.config import WgmmaConfig
    from tests.linear.test_wgmma_products import Machine, rounded

    config = WgmmaConfig(form, dtype, tile_m=16, block_k=128, num_stages=2, mainloop=mainloop)
    weight = random_weight(form, TORCH_DTYPES[dtype], config.block_rows, config.block_k)
    x = activations(config.tile_m, config.block_k, dtype)
    near(Machine(config, weight, x, run_on).stage(packed=False), x, rounded(config, weight))


@decoded
@pytest.mark.parametrize("mainloop", [RegisterWgmma(), MmaSync()], ids=lambda mainloop: type(mainloop).__name__)
def test_one_hot_rows_return_the_weights_exactly_lane_by_lane(form, dtype, mainloop, run_on):
    pytest.importorskip("cutlass")
    from cute_kernels.gemm.wgmma.config import WgmmaConfig
    from tests.linear.test_wgmma_products import Machine, rounded

    config = WgmmaConfig(form, dtype, tile_m=16, block_k=64, num_stages=2, mainloop=mainloop)
    weight = random_weight(form, TORCH_DTYPES[dtype], config.block_rows, config.block_k)
    inputs = torch.arange(config.tile_m) * 4 + 1
    x = torch.zeros(config.tile_m, config.block_k, dtype=TORCH_DTYPES[dtype])
    x[torch.arange(config.tile_m), inputs] = 1
    wanted = rounded(config, weight)[:, inputs].T
    found = torch.from_numpy(Machine(config, weight, x, run_on).stage(packed=False))
    assert torch.equal(found.float(), wanted.float())


def takes(form: WeightFormat, scales: torch.Tensor) -> bool:
    """Whether a format has such stored scales."""
    with contextlib.suppress(ValueError):
        form.check_values(scales, None)
        return True
    return False


@every_kind
def test_every_scale_is_decoded(form, run_on):
    """Of one byte: of two `tests/linear/test_decode.py` has all that matter."""
    pytest.importorskip("cutlass")
    if form.scale_bytes > 1:
        return
    from cute_kernels.device import packed_math
    from tests.attention.warp import LANES, Uint32, bf16_values, halves
    from tests.linear.warp import LinearWarp

    run_on(LinearWarp(np.zeros(16, np.uint8), np.zeros(0, np.uint8)))
    decoder = form.decoder("bf16", packed_math.HopperMath("bf16"))
    ones = torch.ones(1, 1, 1)
    unscaled = form.stored_scales(ones[0], torch.bfloat16)
    code = form.choose_codes(ones, unscaled, None)
    unit = form.dequantize(code, unscaled, None).double().flatten()
    for first in range(0, 255 - 31, 31):
        stored = torch.from_numpy(first + LANES).to(torch.uint8)
        if not takes(form, stored):
            break
        wanted = form.dequantize(code.expand(32, 1, 1), stored.view(32, 1), None).double().flatten() / unit
        found = bf16_values(halves(decoder.scale_word(Uint32(stored.numpy()))))[:, 0]
        assert np.array_equal(found, wanted.numpy()), first


# -- kernels, compiled -------------------------------------------------------------------------------------------------


def kernels_of(form: WeightFormat) -> list[KernelSpec]:
    """Dense and of experts, of few rows and of many."""
    problems = [LinearProblem(m, 4096, 4096, 4096, form, form.dtypes[0]) for m in (1, 16, 512)]
    grouped = [GroupedProblem(places, 8, 4096, 4096, 4096, form, form.dtypes[0]) for places in (8, 4096)]
    specs = [GemmSpec(chosen(problem).config) for problem in problems]
    specs += [spec for problem in grouped for spec in grouped_specs_of(moe_choice.chosen(problem).config)]
    return list(dict.fromkeys(specs))


@pytest.mark.parametrize("form", KINDS, ids=str)
def test_a_format_has_one_spelling_which_asks_for_it(form):
    assert format_of(spelling(form)) is form
    assert "_" not in spelling(form) or spelling(form) in ("fp8_block", "fp8_block_e8m0")


FROM_ELSEWHERE = [form for form in KINDS if not isinstance(form, IntegerFormat)]
COMPILED = {form: golden.worth_compiling(kernels_of(form), lambda spec: spec) for form in FROM_ELSEWHERE}


@pytest.mark.parametrize("form", FROM_ELSEWHERE, ids=str)
def test_the_kernels_that_serve_it_compile_without_spills(form):
    pytest.importorskip("cutlass")
    assert len(kernels_of(form)) >= 4
    found = golden.measure(COMPILED[form], default_cache())
    assert found
    for symbol, kernels in found.items():
        for kernel in kernels:
            assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0, symbol
