"""Cost models of the mainloops of grouped tiles; `cute_kernels.gemm.wgmma.costs` has the models of dense tiles.

Costs are clocks of an H200, fitted to measured times of experts (tests/facts/moe.json). Plain Python, no GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from cute_kernels.gemm.operands.fp8_config import Fp8Wgmma
from cute_kernels.gemm.operands.fp8_schedule import SLOTS_SHARE, issue_slots
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.costs import FLOAT_RATES, SUM_RATES, scales_in_fp32
from cute_kernels.gemm.wgmma.launch import K_BLOCK_CLOCKS
from cute_kernels.gemm.wgmma.mainloops import Limbs, Mainloop, MmaSync, RegisterWgmma, ScaledSums

WORK_TILE_CLOCKS = 2200  # to store the results of two warpgroups where decoding or memory is the bound
TENSOR_WORK_TILE_CLOCKS = 1500  # the same where the tensor cores are the bound
SCALED_BITS = 4  # bits of codes that were measured with an instruction that scales as it decodes


class MainloopCost(ABC):
    """The cost model of a mainloop, in clocks of one k block of a tile. ``tile_m`` is the number of rows that are
    multiplied.
    """

    def tensor_clocks(self, config: WgmmaConfig, tile_m: int) -> float:
        """Returns the clocks of the tensor cores, which run concurrently with decoding. Returns 0 if `decode_clocks`
        includes them."""
        return 0.0

    @abstractmethod
    def decode_clocks(self, config: WgmmaConfig, tile_m: int) -> float:
        """Returns the clocks of a warpgroup's work, except those that `tensor_clocks` counts."""

    def memory_factor(self, config: WgmmaConfig) -> float:
        """Returns the time of loading weights, divided by the time at the memory's full rate."""
        return 1.0


def scaled_as_decoded(config: WgmmaConfig) -> bool:
    """Returns whether the format's decoder also scales codes, and tests/facts/moe.json has measured times of such
    decoding.
    """
    return config.scales_codes and config.format.bits == SCALED_BITS and not config.format.has_zeros


def steps_of(config: WgmmaConfig) -> int:
    """Returns the k16 steps of a k block, over all its tiles of 64 features."""
    return config.block_tiles * config.k_block_steps


class RegisterCost(MainloopCost):
    """The cost of `RegisterWgmma`."""

    # Per k16 step of a tile of 64 features: however few rows, by the bits of a code; for each row. The same where one
    # instruction scales codes as it decodes them, with the launch that brings rows.
    decode: ClassVar[dict[int, float]] = {4: 25, 8: 30}
    row = 0.2
    scaled, scaled_row = 20, 0.25
    mma = 16  # per k16 step of a tile of 64 features, beside its products
    # Tiles of so many rows take that much longer than a dense product's, as measured.
    wide: ClassVar[dict[int, float]] = {192: 1.04, 224: 1.06, 256: 1.08}

    def tensor_clocks(self, config: WgmmaConfig, tile_m: int) -> float:
        return steps_of(config) * (tile_m / 2 + self.mma) * self.wide.get(config.tile_m, 1.0)

    def decode_clocks(self, config: WgmmaConfig, tile_m: int) -> float:
        clocks, row = self.decode[config.format.bits], self.row
        if scaled_as_decoded(config):
            clocks, row = self.scaled, self.scaled_row
        elif scales_in_fp32(config):
            clocks, row = FLOAT_RATES.decode, FLOAT_RATES.row
        return K_BLOCK_CLOCKS + steps_of(config) * (clocks * config.format.decode_cost + row * tile_m)


class SumsCost(RegisterCost):
    """The cost of `ScaledSums`, with the clocks of dense products."""

    mma = SUM_RATES.mma
    wide: ClassVar[dict[int, float]] = {128: 1.1}

    def memory_factor(self, config: WgmmaConfig) -> float:
        """Returns a factor above 1, larger with fewer stages. So among tiles that all wait for memory, the smallest one
        is chosen, which has the most stages."""
        return 1 + 0.1 / config.num_stages

    def decode_clocks(self, config: WgmmaConfig, tile_m: int) -> float:
        return K_BLOCK_CLOCKS + steps_of(config) * (SUM_RATES.decode + SUM_RATES.row * tile_m)


class SynchronousCost(MainloopCost):
    """The cost of `MmaSync`. Each warp multiplies for itself, so every warp applies scales to its accumulators."""

    step: ClassVar[dict[int, float]] = {4: 20, 8: 25}
    row = 0.43

    def decode_clocks(self, config: WgmmaConfig, tile_m: int) -> float:
        clocks = self.step[config.format.bits] * config.format.decode_cost
        return K_BLOCK_CLOCKS + steps_of(config) * (clocks + self.row * tile_m)


class LimbCost(MainloopCost):
    """The cost of `Limbs`, tensor cores included. Each row of x adds clocks, for its columns of limbs and for its
    scales."""

    step, row = 12, 0.62
    short_pipeline, short_pipeline_factor = 5, 1.05  # with so few stages

    def decode_clocks(self, config: WgmmaConfig, tile_m: int) -> float:
        return K_BLOCK_CLOCKS + steps_of(config) * (self.step + self.row * tile_m)

    def memory_factor(self, config: WgmmaConfig) -> float:
        return self.short_pipeline_factor if config.num_stages <= self.short_pipeline else 1.0


class Fp8Cost(MainloopCost):
    """Models `Fp8Wgmma`, tensor cores included: see docs/design/fp8_gemm.md."""

    def decode_clocks(self, config: WgmmaConfig, tile_m: int) -> float:
        return config.block_tiles * 2 * tile_m + SLOTS_SHARE * issue_slots(config, tile_m)


COSTS: dict[type[Mainloop], MainloopCost] = {
    RegisterWgmma: RegisterCost(), ScaledSums: SumsCost(), MmaSync: SynchronousCost(), Limbs: LimbCost(),
    Fp8Wgmma: Fp8Cost(),
}  # fmt: skip


def cost_of(mainloop: Mainloop) -> MainloopCost:
    """Returns the cost model of a mainloop; KeyError if it has none."""
    return COSTS[type(mainloop)]
