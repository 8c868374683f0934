"""Cost models of tile kernels. A model computes the clocks of a mainloop and those of storing results. From both,
`Reduction.launch_clocks` in `.results` computes the clocks of a whole launch.

A k block takes as long as the slowest of four steps: MMAs on the tensor cores, decoding, loading weights at the
memory's rate, and TMA's writes of zeros for rows that x does not have. The models were fitted to times of an H200
(tests/facts/linear.json, docs/design/weight_only_linear.md). The models are not in `.mainloops` and `.results`, since a
new measurement changes the models, but no compiled kernel. Plain Python, no GPU.
"""

from __future__ import annotations

from typing import ClassVar

from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.config import M_TILE_BAND, ResidentConfig, WgmmaConfig
from cute_kernels.gemm.wgmma.launch import MainloopCost, TileRates, TileSchedule
from cute_kernels.gemm.wgmma.mainloops import (
    FLOAT_BYTES,
    TMA_TILE_K,
    Mainloop,
    MmaSync,
    RegisterWgmma,
    ResidentLimbs,
    ScaledSums,
)
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP

CLOCKS_PER_US = 1650.0
MEMORY_BYTES_PER_CLOCK = 4.6e6 / CLOCKS_PER_US
SM_BYTES_PER_CLOCK = 26  # the most bytes that an SM receives in a clock
START_CLOCKS = 7300  # from the launch to the first MMAs
SHORT_ROWS = range(65, 257)  # rows of products that end before the GPU lowers its clock; fewer are often in one tile
# Rates where fp32 scales multiply codes, and where they multiply sums (`ScaledSums`). They are fitted to 72 and 142
# times of FP8 in groups of 128 (bench/results/scaled_sums_study.json).
FLOAT_RATES = TileRates(decode=27.5, row=0.36, mma=14)
SUM_RATES = TileRates(decode=36, row=0.28, mma=22)
MULTICAST_GAIN = 0.02  # share of a k block's time, in a launch between others; 0.05 in launches of the same kind
MULTICAST_CLOCKS = 3000  # for a cluster that multicasts to meet before its first copy and after its last


def present_parts(problem: LinearProblem, config: WgmmaConfig) -> int:
    """Returns how many row parts of a tile have rows, for a problem whose rows fit in one tile."""
    return -(-problem.m // config.part_m)


def scales_in_fp32(config: WgmmaConfig) -> bool:
    """Returns whether decoding multiplies codes by fp32 scales. The rates of such mainloops are `FLOAT_RATES`."""
    return config.scales_codes and config.format.scale_bytes == FLOAT_BYTES


def bytes_per_clock(schedule: TileSchedule) -> float:
    """Returns the rate at which a CTA's weights are loaded, in bytes per clock."""
    return min(MEMORY_BYTES_PER_CLOCK / schedule.num_ctas, SM_BYTES_PER_CLOCK)


class DecodedCost(MainloopCost):
    """The cost of the mainloops that decode weights to 16 bits: `RegisterWgmma` and `MmaSync`."""

    # Rates by the bits of a code.
    rates: ClassVar[dict[int, TileRates]] = {4: TileRates(29.5, 0.1, 14), 8: TileRates(32, 0.1, 14)}
    # Rates where the instruction that decodes codes scales them. `scaled_tiles`: for short products of 4 bits without
    # zero points, without DSMEM reduction and not batch-invariant (tests/facts/linear_tiles.json).
    scaled: ClassVar[TileRates] = TileRates(20, 0.25, 10, in_flight_gain=0.05)
    scaled_tiles: ClassVar[TileRates] = TileRates(
        decode=23, row=0.194, mma=5.7, mma_row=-0.056, k_block=31.5, work_tile=3940, work_tile_acc=13.5,
        combine=1270, combine_part=42.4, join=2950, join_acc=80, all_cut_us=1.03,
    )  # fmt: skip
    # Rates of other 4-bit codes where warpgroups interleave k blocks, and what one scale for a whole row adds to them.
    interleaved, row_scale = TileRates(30.5, 0.2, 14), -5
    # Added for zero points, where decoding scales codes and where not; added for groups of less than a k block.
    scaled_zero, zero, small_group = 6.5, 1, 3.5
    # `scaled_zero` with two groups of MMAs in flight and a DSMEM reduction.
    apart_zero = 4.5
    # Factor of a k block's time: the stall of a warpgroup when no other one can overlap decoding with its MMAs.
    alone = 1.1
    # For each row of a TMA tile of activations that x lacks and TMA fills in; with a DSMEM reduction's small TMA tiles;
    # in clusters of four.
    fill, dsmem_fill, wide_fill = 11, 8.5, 6
    dsmem: float = 1500
    dsmem_row: float = 9

    def rates_of(self, problem: LinearProblem, config: WgmmaConfig) -> TileRates:
        if scales_in_fp32(config):
            return FLOAT_RATES
        if config.scales_codes:
            plain = config.format.bits == 4 and not config.format.has_zeros
            is_short = plain and problem.m in SHORT_ROWS and not problem.batch_invariant
            return self.scaled_tiles if is_short and not config.reduction.dsmem else self.scaled
        if config.k_warpgroups > 1 and config.format.bits == 4:
            return self.interleaved
        return self.rates[config.format.bits]

    def k_block_clocks(self, problem: LinearProblem, schedule: TileSchedule) -> float:
        config = schedule.config
        fragments, rates = config.block_tiles * config.k_block_steps, self.rates_of(problem, config)
        tile_m = config.loop_m(present_parts(problem, config)) if config.reduction.dsmem else config.tile_m
        mma = tile_m / 2 + rates.mma + rates.mma_row * tile_m
        tensor = fragments * mma * (1 - MULTICAST_GAIN * (config.multicast > 1))
        decoding = fragments * (self.decode_clocks(problem, config) + rates.row * tile_m)
        if config.k_warpgroups == 1:
            decoding += rates.k_block  # all of which another warpgroup's products hide
        # Tiles of rows that run side by side read a weight from memory once.
        side_by_side = min(schedule.m_tiles, M_TILE_BAND)
        memory = config.weight_stage_bytes * schedule.num_ctas / MEMORY_BYTES_PER_CLOCK / side_by_side
        k_block = max(tensor, decoding, memory) * self.overlap(problem, config)
        missing = tile_m * schedule.m_tiles - problem.m  # rows of the last tile
        fill = self.dsmem_fill if config.reduction.dsmem else self.fill
        fill = self.wide_fill if config.reduction.dsmem and config.cluster > 2 else fill
        filling = missing * fill * (config.block_k // TMA_TILE_K)
        # Parts of a cluster wait for the slowest; else it is the mean over tiles of rows.
        together = 1 if config.cluster > 1 and rates is self.scaled_tiles else schedule.m_tiles
        return k_block + max(filling - k_block, 0) / together

    def overlap(self, problem: LinearProblem, config: WgmmaConfig) -> float:
        """Returns the factor by which a k block's time is multiplied, as MMAs and decoding overlap more or less. The
        factor is above 1 with one warpgroup, and may be below 1 with several commit groups of MMAs in flight.
        """
        if config.warpgroups == 1:
            return self.alone
        in_flight = config.mainloop.in_flight if isinstance(config.mainloop, RegisterWgmma) else 1
        gains = in_flight > 1 and config.cluster == 1  # in clusters it is in what was fitted
        return 1 - self.rates_of(problem, config).in_flight_gain if gains else 1.0

    def decode_clocks(self, problem: LinearProblem, config: WgmmaConfig) -> float:
        """Returns the clocks of decoding a k16 step of a tile, without the part that grows with the number of rows of
        x.
        """
        rates = self.rates_of(problem, config)
        decode = rates.decode + (self.row_scale if rates is self.interleaved and not config.group_size else 0)
        if config.format.has_zeros:
            decode += self.zero_clocks(config)
        if config.k_block_groups > 1:
            decode += self.small_group
        return decode * config.format.decode_cost

    def zero_clocks(self, config: WgmmaConfig) -> float:
        """Returns the clocks that zero points add to a k16 step of a tile."""
        if not config.scales_codes:
            return self.zero
        in_flight = config.mainloop.in_flight if isinstance(config.mainloop, RegisterWgmma) else 1
        return self.apart_zero if config.reduction.dsmem and in_flight > 1 else self.scaled_zero


class SumsCost(DecodedCost):
    """The cost of `ScaledSums`."""

    # Of two warpgroups with two tiles each, as measured while ptxas still serialised their MMAs.
    waiting = 1.15

    def rates_of(self, problem: LinearProblem, config: WgmmaConfig) -> TileRates:
        return SUM_RATES

    def decode_clocks(self, problem: LinearProblem, config: WgmmaConfig) -> float:
        return SUM_RATES.decode

    def overlap(self, problem: LinearProblem, config: WgmmaConfig) -> float:
        waits = config.warpgroups == config.n_tiles == 2 and config.k_warpgroups == 1
        return self.waiting if waits else super().overlap(problem, config)


class ResidentCost(MainloopCost):
    """The cost of `ResidentLimbs`, the mainloop in which every CTA makes limbs of x itself."""

    start = 3300  # until limbs are made, and the way out of the last work tile
    start_row = 100  # added to `start` for each row beyond eight
    # For a k block of a tile and a warpgroup, by the tile's rows; with 8 loading takes longer.
    tile: ClassVar[dict[int, float]] = {8: 0, 16: 350}
    load = 9  # for 128 inputs of a row that warps load
    limb = 20  # for 128 inputs of a row that TMA loads, shared by warpgroups that interleave k blocks
    # For 128 inputs of a row, more than limbs of integers take: 88 instructions instead of 52 for 16 inputs. Where
    # loading codes takes longer than decoding them, it hides this.
    e4m3 = 6
    fill = 6  # for 128 inputs of a missing row that TMA fills in before the first weights arrive
    # For a further chunk of K, by whether warps load its rows.
    chunk: ClassVar[dict[bool, float]] = {True: 900, False: 300}

    def start_clocks(self, problem: LinearProblem, schedule: TileSchedule) -> float:
        config: ResidentConfig = schedule.config
        mainloop = config.mainloop
        made = first = schedule.split_k_blocks
        chunks = 0.0
        if made > mainloop.k_blocks:  # of a tile's rows each
            first = mainloop.k_blocks // 2
            chunks = self.chunk[mainloop.loads] * made / first
        missing = config.tile_m - problem.m
        rows = self.load * problem.m * made if mainloop.loads else self.fill * missing * first
        if config.k_warpgroups > 1 and not mainloop.loads:
            rows += self.limb / config.warpgroups * problem.m * made
        rows += self.e4m3 * problem.m * made if config.format.bytes_in_e4m3 and config.format.limb_clocks else 0
        return self.start + self.start_row * (config.tile_m - WGMMA_N_STEP) + rows + chunks

    def k_block_clocks(self, problem: LinearProblem, schedule: TileSchedule) -> float:
        """Returns the clocks that a CTA takes for a k block of its tile. The tile has all rows of x, since products by
        resident limbs have few rows.
        """
        config = schedule.config
        loading = config.weight_stage_bytes / bytes_per_clock(schedule)
        decoding = config.format.limb_clocks * config.block_tiles
        return max(loading, self.tile[config.tile_m] * config.n_tiles, decoding)


COSTS: dict[type[Mainloop], MainloopCost] = {
    RegisterWgmma: DecodedCost(), ScaledSums: SumsCost(), MmaSync: DecodedCost(), ResidentLimbs: ResidentCost(),
}  # fmt: skip


def cost_of(config: WgmmaConfig) -> MainloopCost:
    """Returns the cost model of a configuration; KeyError if its mainloop has none."""
    return COSTS[type(config.mainloop)]
