"""Files that the projects' own code wrote are read as it would dequantise them; `make_files` made them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cute_kernels.integrations.checkpoints import load_safetensors
from tests.integrations.checkpoints.make_files import MADE, K

NAMES = sorted(path.name for path in MADE.iterdir())


def read(path: Path, dtype: torch.dtype) -> Any:
    ((_, layer),) = load_safetensors(path, dtype=dtype)
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
    if layer.shifts is not None:
        w += layer.shifts.double().repeat_interleave(layer.group_size or K, dim=1)[:, :K]
    # What is in fp16 or is a small integer is kept; bf16 and fp32 scales are rounded to fp16 once.
    assert (w - want).abs().max() <= 2.0**-11 * want.abs().max()
    assert ((layer(x).double() - exact).norm() / exact.norm()) < 2e-3


def test_zero_points_that_are_no_integers_become_shifts_and_others_codes():
    shifted = {name: read(MADE / name, torch.float16).shifts is not None for name in NAMES}
    assert {name for name, has in shifted.items() if has} == {"hqq4", "hqq8", "torchao_int4"}
    assert read(MADE / "hqq4_round_zero", torch.float16).zeros is not None


def test_the_files_say_themselves_what_they_are_where_they_do(tmp_path):
    """HQQ and torchao need no configuration."""
    for name in NAMES:
        if name.startswith(("hqq", "torchao")):
            shutil.copy(MADE / name / "model.safetensors", tmp_path / "model.safetensors")
            layer, other = read(tmp_path, torch.float16), read(MADE / name, torch.float16)
            assert torch.equal(layer.codes, other.codes)
