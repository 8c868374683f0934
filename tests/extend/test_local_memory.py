"""Where keys times queries spill: in the warps that fill the ring, which wait for memory. None that multiplies does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cute_kernels.attention.compile import CAUSAL_PAGES, AttentionSpec
from cute_kernels.attention.extend_schedule import choose, choose_key_rows
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.runtime import default_cache, native
from cute_kernels.runtime.doctor import find_tool
from tools.resources import cubins_in

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")
FORMAT = "int8_token_head"


def test_no_warp_that_multiplies_touches_local_memory(tmp_path: Path):
    """Machine code of filling warps comes first: what they spill is read before the first product stands."""
    few, _ = choose_key_rows(choose(AttentionProblem.ragged(128, FORMAT, FORMAT, "bf16", 64, CAUSAL_PAGES)))
    (artifact,) = default_cache().artifacts([AttentionSpec(few)], "sm_90a")
    (image,) = cubins_in(artifact.object_code)
    (tmp_path / "kernel.cubin").write_bytes(image)
    command = [find_tool("nvdisasm"), "-c", str(tmp_path / "kernel.cubin")]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    local = [i for i, line in enumerate(code) if "LDL" in line or "STL" in line]
    products = [i for i, line in enumerate(code) if "HGMMA" in line]
    assert local and products and max(local) < products[0]
