"""`TileSchedule`, the layout of one launch of tiles, and `MainloopCost`, the base of the cost models in `.costs`.

A reduction (`.results`) lays out a launch, and computes the launch's time from the cost model of its mainloop. Plain
Python, no GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.config import WgmmaConfig

K_BLOCK_CLOCKS = 90  # added for each k block that is decoded
# Added where all tiles are cut and their parts added in global memory. That costs nothing in a launch, 2.6 us in a
# graph of one launch. So other tiles are taken unless they are expected to take this much longer.
ALL_CUT_US = 0.6


@dataclass(frozen=True)
class TileSchedule:
    """The layout of one launch. The tiles of a last, incomplete round are cut, along K or along rows of x.

    Attributes:
        config: the compiled variant.
        num_tiles: number of tiles of 64 output features.
        m_tiles: number of tiles of rows of x.
        k_blocks: k blocks of the padded K.
        splits: number of parts into which a cut tile is divided, along K or along rows of x. No part of K is empty.
        num_ctas: number of CTAs that run.
        whole: number of tiles that are not cut.
    """

    config: WgmmaConfig
    num_tiles: int
    m_tiles: int
    k_blocks: int
    splits: int
    num_ctas: int
    whole: int = 0

    @property
    def blocks(self) -> int:
        """The number of blocks of output features. With TMA multicast, the neighbouring blocks of CTAs that share
        activations count as one.
        """
        return -(-self.num_tiles // (self.config.block_tiles * self.config.multicast))

    @property
    def num_tiles_cut(self) -> int:
        return self.blocks * self.m_tiles - self.whole

    @property
    def num_work_tiles(self) -> int:
        """Number of work tiles: whole tiles and parts of tiles."""
        return self.whole + self.num_tiles_cut * self.splits

    @property
    def split_k_blocks(self) -> int:
        return -(-self.k_blocks // self.splits)

    @property
    def sizes(self) -> dict[str, int]:
        """The launch arguments that the schedule decides, by name."""
        return {name: getattr(self, name) for name in ("num_tiles", "k_blocks", "whole", "splits", "num_ctas")}

    @property
    def workspace_words(self) -> int:
        """Number of fp32 words that partial accumulators take in the workspace."""
        return self.config.reduction.partial_words(self)


class TileRates(NamedTuple):
    """The coefficients of a model of time, in clocks, for tiles whose weights are decoded.

    ``decode`` to ``mma_row`` count for each k16 step of a tile of 64 features, ``work_tile`` to ``join_acc`` for each
    work tile.

    Attributes:
        decode: clocks of decoding, for any number of rows.
        row: additional clocks of decoding per row.
        mma: clocks of MMAs in addition to the tensor cores' half clock per row.
        mma_row: additional clocks of MMAs per row.
        k_block: additional clocks per decoded k block.
        work_tile: clocks of storing a work tile's results.
        work_tile_acc: additional clocks of storing per accumulator of a thread.
        combine: clocks of exchanging parts of K through the workspace.
        combine_part: additional clocks of this exchange per other part and accumulator of a thread.
        join: clocks of exchanging rows in a cluster.
        join_acc: additional clocks of this exchange per other CTA and accumulator of a thread.
        all_cut_us: microseconds, as in `MainloopCost`.
        in_flight_gain: fraction of a k block's time that two commit groups of MMAs in flight save, outside clusters.
    """

    decode: float
    row: float
    mma: float
    mma_row: float = 0.0
    k_block: float = K_BLOCK_CLOCKS
    work_tile: float = 3100.0
    work_tile_acc: float = 0.0
    combine: float = 2100.0
    combine_part: float = 46.0
    join: float = 2800.0
    join_acc: float = 40.0
    all_cut_us: float = ALL_CUT_US
    in_flight_gain: float = 0.0


NO_RATES = TileRates(0, 0, 0, work_tile=0, combine=0, combine_part=0, join=0, join_acc=0)


class MainloopCost(ABC):
    """The cost model of a mainloop and its store; a reduction computes a launch's clocks from it.

    Attributes:
        dsmem: clocks of a DSMEM reduction in a cluster of two.
        dsmem_row: additional clocks for each row of a tile and each CTA beyond two.
    """

    dsmem: float = 0
    dsmem_row: float = 0

    @abstractmethod
    def k_block_clocks(self, problem: LinearProblem, schedule: TileSchedule) -> float:
        """Returns the clocks that a CTA takes for a k block, averaged over all tiles of rows."""

    def start_clocks(self, problem: LinearProblem, schedule: TileSchedule) -> float:
        """Returns the clocks that a launch's start takes beyond `.costs.START_CLOCKS`."""
        return 0

    def rates_of(self, problem: LinearProblem, config: WgmmaConfig) -> TileRates:
        """Returns the rates from which reductions compute their own clocks; all are 0 unless a cost model overrides
        this."""
        return NO_RATES

    def work_tile_clocks(self, problem: LinearProblem, config: WgmmaConfig) -> float:
        """Returns the clocks of storing a whole tile's results, during which no MMAs run."""
        rates = self.rates_of(problem, config)
        return rates.work_tile + rates.work_tile_acc * config.thread_acc

    def all_cut_us(self, problem: LinearProblem, schedule: TileSchedule) -> float:
        """Returns additional microseconds if all tiles of a launch are cut and their parts are added through the
        workspace. `Reduction.launch_clocks` does not include this time."""
        return self.rates_of(problem, schedule.config).all_cut_us
