"""Configurations whose CTAs make limbs of x themselves. Plain Python, no GPU.

These configurations take one launch instead of two, and x does not go through the pipeline. So they are the fastest up
to eight rows. From 9 to 16 rows they are the fastest in two cases:

- A CTA has at least four tiles of 64 features, so loading weights takes as long as making limbs.
- All limbs of the CTA's part of K are made before the first product.

With more rows, making limbs in every CTA takes longer than a launch that makes limbs once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.config import RESIDENT_TILE_M, ResidentConfig
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, TMA_TILE_K, ResidentLimbs, row_columns
from cute_kernels.gemm.wgmma.results import Dsmem
from cute_kernels.gemm.wgmma.stages import of_format, with_stages

MOST_LOADED_ROWS = 4  # rows up to which warps load x faster than TMA fills in missing rows
MOST_STAGES = 16


@dataclass(frozen=True)
class WarpgroupsOf:
    """How the warpgroups of a CTA divide a block of output features and K. Fields that are not listed are those of
    `WgmmaConfig`, `ResidentLimbs` and the reduction.

    Attributes:
        most_stages: the largest number of pipeline stages, even if more would fit. With more loads in flight, every
            load would arrive later.
        loaded_stages: the largest number of pipeline stages if warps load x.
        chunks: whether a CTA's part of K may be cut into chunks if shared memory has no room for all of its limbs.
        least: the smallest number of k blocks of a CTA's part of K for which the shape is worth a try.
        loaded: whether the shape is only for x that warps load. TMA would write zeros for the missing rows of all k
            blocks at once.
    """

    warpgroups: int
    n_tiles: int = 1
    spare: int = 0
    k_warpgroups: int = 1
    resident_k_blocks: int = 32
    most_stages: int = MOST_STAGES
    loaded_stages: int = MOST_STAGES
    chunks: bool = True
    least: int = 0
    loaded: bool = False


# 28672 features are 128 such parts.
SEVEN_TILES = WarpgroupsOf(4, n_tiles=2, spare=1, resident_k_blocks=16, most_stages=4)
# Clusters of two, each CTA with half of K, by the rows of a tile. Each entry was the fastest for some product.
RESIDENT_SHAPES = {
    8: (
        WarpgroupsOf(4, k_warpgroups=2, loaded_stages=10),  # two tiles
        WarpgroupsOf(2, k_warpgroups=2),  # one tile, of small layers
        WarpgroupsOf(4, resident_k_blocks=16, most_stages=6),  # four
        SEVEN_TILES,
        # One tile, for long rows: all limbs are made at once, since a chunk would wait for its x from L2.
        WarpgroupsOf(2, k_warpgroups=2, resident_k_blocks=64, chunks=False, least=33, loaded=True),
    ),
    # Four, six and seven tiles. With 16 rows a thread needs more registers than four warpgroups leave it.
    16: tuple(
        WarpgroupsOf(2, n_tiles=n_tiles, spare=spare, resident_k_blocks=16, most_stages=most, chunks=False)
        for n_tiles, spare, most in ((2, 0, 7), (3, 0, MOST_STAGES), (4, 1, MOST_STAGES))
    ),
}
# The same where a k block has several groups. Each group has accumulators of its own, which take registers, and scales,
# which take longer than decoding. So four warpgroups share a tile's k blocks.
FINE_SHAPES = {
    8: (
        WarpgroupsOf(4, k_warpgroups=2, loaded_stages=10),  # two tiles
        WarpgroupsOf(4, k_warpgroups=4),  # one tile
        WarpgroupsOf(4, resident_k_blocks=16, most_stages=6),  # four
        WarpgroupsOf(4, k_warpgroups=4, resident_k_blocks=64, chunks=False, least=33, loaded=True),
    )
}
# The same of limbs in E4M3. Two tiles of a warpgroup share the descriptors of limbs and the loop's other instructions.
E4M3_SHAPES = {
    8: (
        WarpgroupsOf(4, n_tiles=2, k_warpgroups=4, loaded_stages=10),  # two tiles
        WarpgroupsOf(4, k_warpgroups=4),  # one tile
        WarpgroupsOf(4, n_tiles=2, k_warpgroups=2, resident_k_blocks=16, most_stages=6),  # four
        SEVEN_TILES,
        WarpgroupsOf(4, k_warpgroups=4, resident_k_blocks=64, chunks=False, least=33, loaded=True),
    ),
    16: (*RESIDENT_SHAPES[16][:2], replace(SEVEN_TILES, chunks=False)),
}
# The same of FP8 in groups of 128. Two interleaved tiles spill where TMA brings x, as do smaller groups. With 9 to 16
# rows no shape was the fastest by the model.
FP8_SHAPES = {
    8: tuple(
        replace(shape, loaded=shape.loaded or (shape.n_tiles > 1 and shape.k_warpgroups > 1))
        for shape in E4M3_SHAPES[8]
    )
}
RESIDENT_CLUSTER = 2
SPARE_BYTES = 2048  # of shared memory, for alignment


def resident_configs(problem: LinearProblem) -> list[ResidentConfig]:
    """Returns configurations that multiply few rows of x as resident limbs."""
    form, columns = problem.format, problem.m * row_columns(problem.format)
    tile_m = next((count for count in RESIDENT_TILE_M if columns <= count), None)
    # Groups of 32 and 64 may end within one of limbs. Only products of integers are corrected by sums of x.
    if tile_m is None or problem.k_pad % LIMB_GROUP or (form.bytes_in_e4m3 and form.sums_inputs):
        return []
    shapes = FINE_SHAPES if form.group_size < LIMB_GROUP else RESIDENT_SHAPES
    if form.bytes_in_e4m3:
        shapes = E4M3_SHAPES if form.bits == 4 else FP8_SHAPES if form.group_size >= LIMB_GROUP else {}
    k_blocks = part_k_blocks(problem)
    configs = (
        resident_config(problem, tile_m, loads, shape)
        for loads in load_choices(problem)
        for shape in shapes.get(tile_m, ())
        if (loads or not shape.loaded) and shape.least <= k_blocks
        if shape.chunks or k_blocks <= shape.resident_k_blocks
    )
    return [config for config in configs if config.can_implement() is None]


def resident_config(problem: LinearProblem, tile_m: int, loads: bool, shape: WarpgroupsOf) -> ResidentConfig:
    """Returns the configuration of a shape, for tiles of ``tile_m`` rows of a problem's weights."""
    config = of_format(
        problem,
        tile_m=tile_m,
        block_k=LIMB_GROUP,
        warpgroups=shape.warpgroups,
        n_tiles=shape.n_tiles,
        mainloop=ResidentLimbs(shape.resident_k_blocks, loads=loads, spare=shape.spare),
        reduction=Dsmem(RESIDENT_CLUSTER, shape.k_warpgroups),
    )
    most = min(shape.most_stages, shape.loaded_stages) if loads else shape.most_stages
    return with_stages(config, most, SPARE_BYTES)


def part_k_blocks(problem: LinearProblem) -> int:
    """Returns the number of k blocks, of 128 inputs each, in a CTA's part of K. The padded K is a multiple of 128."""
    return -(-problem.k_pad // (LIMB_GROUP * RESIDENT_CLUSTER))


def load_choices(problem: LinearProblem) -> tuple[bool, ...]:
    """Returns the values of `ResidentLimbs.loads` that are worth considering for a problem."""
    if problem.k % TMA_TILE_K or row_columns(problem.format) > 1:
        return (True,)  # TMA takes whole TMA tiles, and stores a row once
    return (True, False) if problem.m <= MOST_LOADED_ROWS else (False,)
