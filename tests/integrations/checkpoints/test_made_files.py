"""Files that the projects' own code wrote are read as it would dequantise them; `make_files` made them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cute_kernels.formats.weights import ShiftedFormat
from cute_kernels.integrations.checkpoints import load_safetensors
from tests.integrations.checkpoints.make_files import FLOATS as FLOAT_FILES
from tests.integrations.checkpoints.make_files import MADE, MODELOPT, K

FLOATS = {
    *FLOAT_FILES,
    *MODELOPT,
    *(f"torchao_{name}" for name in ("nvfp4", "nvfp4_blocked", "mxfp4", "mxfp8", "fp8_row", "fp8_tensor")),
}
NAMES = sorted({path.name for path in MADE.iterdir()} - FLOATS)


def read(path: Path, dtype: torch.dtype) -> Any:
    ((_, layer),) = load_safetensors(path, dtype=dtype, activations="16bit")
    return layer


def test_all_the_files_are_there():
    assert len(NAMES) == 17


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_with_the_weight_that_the_project_dequantises(name, tmp_path):
    want = load_file(MADE / name / "want.st")["want"].double()
    layer = read(MADE / name, torch.float16)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(0)).half()
    exact = x.double() @ want.T
    w = layer.weight.dequantize(torch.float64)
    # What is in fp16 or is a small integer is kept; bf16 and fp32 scales are rounded to fp16 once.
    assert (w - want).abs().max() <= 2.0**-11 * want.abs().max()
    assert ((layer(x).double() - exact).norm() / exact.norm()) < 2e-3


def test_zero_points_that_are_no_integers_stay_floating_and_others_become_codes():
    forms = {name: read(MADE / name, torch.float16).weight_format for name in NAMES}
    floating = {name for name, form in forms.items() if isinstance(form, ShiftedFormat)}
    assert floating == {"hqq4", "hqq8", "torchao_int4"}
    assert read(MADE / "hqq4_round_zero", torch.float16).zeros is not None


def test_the_files_say_themselves_what_they_are_where_they_do(tmp_path):
    """HQQ and torchao need no configuration."""
    for name in NAMES:
        if name.startswith(("hqq", "torchao")):
            shutil.copy(MADE / name / "model.safetensors", tmp_path / "model.safetensors")
            layer, other = read(tmp_path, torch.float16), read(MADE / name, torch.float16)
            assert torch.equal(layer.codes, other.codes)


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_a_layer_of_floats_is_what_the_project_dequantises_bit_by_bit(name):
    want = load_file(MADE / name / "want.st")["want"]
    layer = read(MADE / name, torch.bfloat16)
    found = layer.weight.dequantize(torch.float32)
    if "nvfp4" in name:  # the project rounds scale times, or by, the second level first; here it meets whole sums
        assert (found - want).abs().max() <= 2.0**-22 * want.abs().max()
    else:
        assert torch.equal(found, want)
    assert torch.equal(layer.weight.dequantize(), found.bfloat16())
    x = torch.randn(5, want.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ layer.weight.dequantize().double().T
    assert ((layer(x).double() - exact).norm() / exact.norm()) < 3e-3


@pytest.mark.parametrize("name", ["ct_nvfp4", "modelopt_nvfp4", "torchao_nvfp4"])
def test_nvfp4_with_a_second_level_that_is_a_power_of_two_is_exact(name, tmp_path):
    tensors = load_file(MADE / name / "model.safetensors")
    (second,) = (key for key in tensors if key.endswith(("global_scale", "per_tensor_scale", "weight_scale_2")))
    tensors[second] = torch.full_like(tensors[second], 2.0**-9)
    with safe_open(MADE / name / "model.safetensors", "pt") as file:
        save_file(tensors, tmp_path / "model.safetensors", metadata=file.metadata())
    shutil.copy(MADE / name / "config.json", tmp_path)
    before, after = (read(path, torch.bfloat16).weight for path in (MADE / name, tmp_path))
    codes, scales, _ = (before.unpack_tiles(0, 1)[:, :K], before.scales, None)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).long()] * (1 - 2.0 * (codes >> 3))
    groups = K // 16
    plain = scales[0, :groups].T.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    wanted = numbers * plain * (2.0**9 if name == "ct_nvfp4" else 2.0**-9)
    assert torch.equal(after.dequantize(torch.float32), wanted[: after.shape[0]])
