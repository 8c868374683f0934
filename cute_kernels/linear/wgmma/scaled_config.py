"""Tiles whose rows of x meet factors in shared memory, between TMA and the MMAs. No GPU types here.

Two warps that load nothing multiply each stage in place. Shared memory has room for that where tiles have few rows: of
64 rows a k block of 128 features is 64 KB of its traffic already, in 650 clocks, and reading and writing x is 32 more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar

from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.mainloops import SCALED, TMA_TILE_K, WARPGROUP_THREADS, RegisterWgmma
from cute_kernels.linear.wgmma.regions import Barriers
from cute_kernels.linear.wgmma.stages import with_stages

FACTOR_BYTES = 2
SCALING_WARPS = 6  # in pairs, one for each TMA tile of a stage, which take stages in turn
PAIRS = SCALING_WARPS // 2
SCALED_K = 2 * TMA_TILE_K  # inputs of a k block, all of which x has


@dataclass(frozen=True)
class ScaledWgmma(RegisterWgmma):
    """As `RegisterWgmma`, of rows of which each input has a factor.

    A stage's activations and factors have a barrier of their own, which the scaling warps wait for. They and the
    weights fill the stage.
    """

    probe: int = 0
    factors: ClassVar[str] = SCALED
    registers: ClassVar[dict[int, int]] = {1: 240, 2: 208, 3: 128}
    producer_registers: ClassVar[int] = 48
    more_threads: ClassVar[int] = 2 * WARPGROUP_THREADS
    copies: ClassVar[int] = 3  # of weights, and both halves of the products
    multicasts: ClassVar[bool] = False
    rows_apart: ClassVar[bool] = False
    block_k_sizes: ClassVar[tuple[int, ...]] = (SCALED_K,)

    def kernel_name(self, config: WgmmaConfig) -> str:
        return f"{super().kernel_name(config)}_scaled{self.probe or ''}"

    def x_scale_stage_bytes(self, config: WgmmaConfig) -> int:
        """Factors of a k block."""
        return FACTOR_BYTES * config.block_k

    def barriers(self, config: WgmmaConfig) -> tuple[Barriers, ...]:
        return (*super().barriers(config), Barriers("x_barrier", config.num_stages, 1))

    def more_barriers(self, config: WgmmaConfig) -> tuple[Barriers, ...]:
        return ()


def scaled(config: WgmmaConfig) -> WgmmaConfig[ScaledWgmma] | None:
    """The same kernel of rows that meet factors; None where there is none."""
    loop = config.mainloop
    if type(loop) is not RegisterWgmma or config.multicast > 1:
        return None
    own = ScaledWgmma(**{one.name: getattr(loop, one.name) for one in fields(loop)})
    changed = with_stages(replace(config, mainloop=own), config.num_stages)
    return changed if changed.can_implement() is None else None
