"""Machine code of the kernel of runs: MMAs side by side, nothing written early, no spills, weights asked for soon."""

from __future__ import annotations

import pytest

from cute_kernels.gemm.experts.ranges.config import EntryLimbs

pytest.importorskip("cutlass")

from cute_kernels.gemm.experts.compile import shipped_specs
from cute_kernels.gemm.experts.ranges.config import RangeConfig
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.wgmma.limbs import MMA_K
from cute_kernels.runtime import default_cache
from cute_kernels.runtime.artifact import Artifact
from cute_kernels.runtime.doctor import ToolMissingError, find_tool
from tests import golden
from tests.linear.machine_code import MMAS, early_writes, instructions, main_loop
from tools.resources import resource_report

SHIPPED = [spec.config for spec in shipped_specs() if isinstance(getattr(spec.config, "activations", None), EntryLimbs)]
CONFIGS = golden.worth_compiling(SHIPPED, ExpertSpec)
INSTRUCTION_BYTES = 16
# Before the first weights each instruction comes from memory itself, a line after the other.
MOST_CODE_BEFORE = 6 * 1024

every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


@pytest.fixture(scope="module")
def artifacts() -> dict[RangeConfig, Artifact]:
    """Compiled by workers, all at once: tracing leaves functions changed that other tests run as plain Python."""
    try:
        find_tool("nvdisasm")
    except ToolMissingError as error:
        pytest.skip(str(error))
    found = default_cache().artifacts([ExpertSpec(config) for config in CONFIGS], "sm_90a")
    return dict(zip(CONFIGS, found, strict=True))


@every_config
def test_k_blocks_are_multiplied_side_by_side(config: RangeConfig, tmp_path, artifacts):
    """Both of a chunk's parts are started before the first one is waited for, with no more waits than are written."""
    artifact = artifacts[config]
    (resources,) = resource_report(artifact)
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    parts = config.n_tiles * config.chunk_k_blocks
    assert resources.opcodes["WARPGROUP"] == 2 * parts
    loop = main_loop(instructions(artifact.object_code, tmp_path))
    opcodes = [opcode for _, opcode, _ in loop]
    assert opcodes.count(f"IGMMA.64x{2 * config.tile_m}x32.S8.S8") == parts * config.block_k // MMA_K
    assert sum(opcode.startswith(MMAS) for opcode in opcodes) == resources.opcodes["IGMMA"]
    groups = [opcode for opcode in opcodes if opcode.startswith("WARPGROUP")]
    assert groups == ["WARPGROUP.ARRIVE"] * 2 + ["WARPGROUP.DEPBAR.LE"] * 2 and parts == 2
    assert early_writes(loop) == []


@every_config
def test_the_way_to_the_first_weights_is_short(config: RangeConfig, tmp_path, artifacts):
    opcodes = [opcode for _, opcode, _ in instructions(artifacts[config].object_code, tmp_path)]
    copies = [place for place, opcode in enumerate(opcodes) if opcode.startswith("UBLKCP")]
    assert len(copies) == 2 * config.n_tiles, "codes and scales of each tile"
    assert copies[0] * INSTRUCTION_BYTES < MOST_CODE_BEFORE
    mmas = [place for place, opcode in enumerate(opcodes) if opcode.startswith(MMAS)]
    assert copies[-1] < mmas[0]


def test_kernels_of_all_numbers_of_rows_ship():
    assert {config.tile_m for config in SHIPPED} == {8} and {config.n_tiles for config in SHIPPED} == {1, 2}
