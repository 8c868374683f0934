"""Machine code of the grouped warpgroup kernel: MMAs of every number of parts, nothing written early, no spills."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts.spec import ExpertSpec
from cute_kernels.gemm.experts.wgmma.schedule import layouts
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.limbs import MMA_K
from cute_kernels.gemm.wgmma.mainloops import MmaSync, RegisterWgmma
from cute_kernels.gemm.wgmma.results import RowCuts, SequentialSplitK, WorkspaceSplitK
from cute_kernels.runtime import default_cache
from cute_kernels.runtime.artifact import Artifact
from cute_kernels.runtime.doctor import ToolMissingError, find_tool
from tests import golden
from tests.linear.machine_code import MMAS, early_writes, instructions
from tools.resources import resource_report

ALL = [layout.config for layout in layouts(GroupedProblem(4096, 8, 4096, 4096, 4096, integers(4), "bf16"))]
TILES = golden.worth_compiling(ALL, ExpertSpec)
CONFIGS = [config for config in TILES if not isinstance(config.mainloop, MmaSync) and not config.limbs]
LIMBS = [config for config in TILES if config.limbs]
SYNCHRONOUS = [config for config in TILES if isinstance(config.mainloop, MmaSync)]


@pytest.fixture(scope="module")
def artifacts() -> dict[WgmmaConfig, Artifact]:
    """Compiled by workers, all at once: tracing leaves functions changed that other tests run as plain Python."""
    try:
        find_tool("nvdisasm")
    except ToolMissingError as error:
        pytest.skip(str(error))
    found = default_cache().artifacts([ExpertSpec(config) for config in TILES], "sm_90a")
    return dict(zip(TILES, found, strict=True))


def loops_around_mmas(code: list[tuple[str, str, str]]) -> dict[str, list[tuple[str, str, str]]]:
    """For each kind of MMA the shortest loop that has it and no other: waits stand apart and jump back from afar."""
    places = {label: place for place, (labels, _, _) in enumerate(code) for label in labels.split()}
    found: dict[str, list[tuple[str, str, str]]] = {}
    for place, (_, opcode, operands) in enumerate(code):
        target = re.search(r"\.L_x_\d+", operands) if opcode == "BRA" else None
        body = code[places[target[0]] : place + 1] if target else []
        kinds = {opcode for _, opcode, _ in body if opcode.startswith(MMAS)}
        if len(kinds) == 1:
            (kind,) = kinds
            found[kind] = min(found.get(kind, body), body, key=len)
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_number_of_parts_has_a_loop(config, tmp_path, artifacts):
    artifact = artifacts[config]
    (resources,) = resource_report(artifact)
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    # No more waits and fences than are written: the compiler has not put MMAs one after the other.
    groups = len(config.loop_parts) * config.k_block_steps // config.mainloop.group_steps
    assert resources.opcodes["WARPGROUP"] == 2 * groups + 1
    loops = loops_around_mmas(instructions(artifact.object_code, tmp_path))
    widths = (count * config.part_m for count in config.loop_parts)
    wanted = {f"HGMMA.64x{tokens}x16.F32.BF16" for tokens in widths}
    assert loops.keys() == wanted
    for kind, loop in loops.items():
        count = sum(opcode == kind for _, opcode, _ in loop)
        assert count == config.n_tiles * config.k_block_steps and early_writes(loop) == []


@pytest.mark.parametrize("config", LIMBS, ids=lambda config: config.name)
def test_limbs_are_multiplied_by_mmas_of_bytes(config, tmp_path, artifacts):
    """Every number of parts has its loop, of MMAs with two columns a row, none of which waits for the one before."""
    artifact = artifacts[config]
    (resources,) = resource_report(artifact)
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    assert resources.opcodes["WARPGROUP"] == 2 * config.row_parts * config.n_tiles
    loops = loops_around_mmas(instructions(artifact.object_code, tmp_path))
    widths = range(config.part_m, config.tile_m + 1, config.part_m)
    assert loops.keys() == {f"IGMMA.64x{2 * tokens}x32.S8.S8" for tokens in widths}
    for kind, loop in loops.items():
        count = sum(opcode == kind for _, opcode, _ in loop)
        assert count == config.n_tiles * config.block_k // MMA_K and early_writes(loop) == []


@pytest.mark.parametrize("config", SYNCHRONOUS, ids=lambda config: config.name)
def test_synchronous_tiles_multiply_each_warp_for_itself(config, artifacts):
    """Every number of parts has its MMAs, of 8 rows each, and ldmatrix once for all tiles of a warp."""
    artifact = artifacts[config]
    (resources,) = resource_report(artifact)
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    blocks = sum(range(1, config.row_parts + 1)) * config.part_m // 8
    assert resources.opcodes["HMMA"] == blocks * config.n_tiles * config.k_block_steps
    assert resources.opcodes["LDSM"] == config.row_parts * config.k_block_steps
    assert not resources.opcodes.get("HGMMA") and not resources.opcodes.get("WARPGROUP")


@pytest.mark.parametrize(
    "changes, message",
    [({"reduction": WorkspaceSplitK()}, "want none"), ({"warpgroups": 1}, "got 4 consumer warps, want 8")],
)
def test_what_a_grouped_product_has_no_kernel_for_is_refused(changes, message):
    config = next(config for config in ALL if not isinstance(config.mainloop, MmaSync) and not config.limbs)
    with pytest.raises(ValueError, match=message):
        ExpertSpec(replace(config, **changes)).compile("sm_90a")


@pytest.mark.parametrize("changes", [{"multicast": 2}, {"reduction": RowCuts()}, {"reduction": SequentialSplitK()}])
def test_tiles_that_the_table_of_experts_does_not_have_are_refused_before_they_are_compiled(changes):
    """Dense products have kernels of them."""
    config = replace(
        next(one for one in ALL if type(one.mainloop) is RegisterWgmma and one.row_parts == 2), row_parts=1
    )
    config = replace(config, **changes, **({"row_parts": 2} if "reduction" in changes else {}), tile_m=64, n_tiles=1)
    assert config.can_implement() is None
    GemmSpec(config).check()
    with pytest.raises(ValueError, match="config: got tiles that are cut or multicast, want whole ones of one CTA"):
        ExpertSpec(config).check()
