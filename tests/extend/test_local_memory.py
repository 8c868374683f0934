"""Where keys times queries spill: between work tiles, and where a reference is raised. No loop over tiles does, but for
addresses of rows that begin anywhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cute_kernels.extend.compile import CAUSAL_PAGES, ExtendSpec
from cute_kernels.extend.schedule import ExtendProblem, choose, choose_key_rows
from cute_kernels.runtime import default_cache, native
from cute_kernels.runtime.resources import cubins_in, find_tool

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")


@pytest.mark.parametrize("name, most", [("e4m3_tensor", 0), ("int4_g4", 0), ("int8_token_head", 6)])
def test_warps_that_multiply_touch_no_local_memory_in_their_loop(name, most, tmp_path: Path):
    """From the first product of keys to the vote on their probabilities, and from there to the last one of values."""
    _, wide = choose_key_rows(choose(ExtendProblem(128, name, name, "bf16", 64, CAUSAL_PAGES)), mapped=True)
    (artifact,) = default_cache().artifacts([ExtendSpec(wide)], "sm_90a")
    (image,) = cubins_in(artifact.object_code)
    (tmp_path / "kernel.cubin").write_bytes(image)
    command = [find_tool("nvdisasm"), "-c", str(tmp_path / "kernel.cubin")]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    local, products, votes = (
        [i for i, line in enumerate(code) if any(kind in line for kind in kinds)]
        for kinds in (("LDL", "STL"), ("HGMMA",), ("BAR.RED",))
    )
    first, again = votes
    loop = [i for i in local if products[0] <= i <= first or again <= i <= products[-1]]
    assert len(loop) <= most
