"""Policies for the results of kernels of tiles: stores, and reductions, which add up the parts of K of a tile.

A policy has fields, limits, shared memory, barriers, and a part of the kernel's name. The docstring of a policy names
the module of its device code. A reduction lists the stores that can be combined with it. There are no GPU types here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from cute_kernels.gemm.activations.base import ActivationFunction
from cute_kernels.gemm.arguments import CompiledAs
from cute_kernels.gemm.wgmma.regions import Barriers, Region
from cute_kernels.runtime.spec import one_of

if TYPE_CHECKING:
    from cute_kernels.gemm.problem import LinearProblem
    from cute_kernels.gemm.wgmma.config import WgmmaConfig
    from cute_kernels.gemm.wgmma.launch import MainloopCost, TileSchedule

_ROOM = "cute_kernels.gemm.wgmma"
CHUNK_M = 64  # rows of x that a warpgroup stores at a time, if nothing else is said
STAGING_PAD = 4  # words between the tokens of the staging buffer
STAGING_ALIGNMENT = 128
DSMEM_CLUSTERS = (2, 3, 4)
K_WARPGROUPS = (1, 2, 3, 4)
# Clocks to publish a work range's partials and load others; a factor of a k block's time, since CTAs of a launch read
# as many parts of K at a time as there are CTAs.
RANGE_CLOCKS, RANGE_SPREAD = 4600, 1.05
# Rows of all tiles of a warpgroup whose accumulators a thread has twice: 2 x 80 of its 240 registers, by arithmetic.
MOST_SEQUENTIAL_M = 160
TMA_TILE_ALIGNMENT = 1024
WGMMA_N_STEP = 8  # the fewest columns of an MMA; also the rows among which the 128-byte swizzle exchanges pieces


# -- stores ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StagedStore(ABC):  # noqa: B024 - JSON tells the classes of such values: `DeferredNorm` is one
    """The store policy in which each warpgroup has a staging buffer. Its code is in `.epilogue`.

    Attributes:
        chunk: the largest number of rows of x that a warpgroup stores at a time. A smaller chunk leaves memory for
            another stage.
        activation: the activation function that is compiled into the kernel. None: the launch selects a standard
            activation, or none.
    """

    chunk: int = CHUNK_M
    activation: ActivationFunction | None = None

    @property
    def name(self) -> str:
        """The store's part of a kernel's name, after all others."""
        return ""

    def kernel(self) -> CompiledAs | None:
        """Returns how configurations with this store are compiled. None: the mainloop decides."""
        return None

    def regions(self, config: WgmmaConfig) -> tuple[Region, ...]:
        """Returns the store's shared memory: the staging buffers of all warpgroups."""
        return (Region("staging", config.warpgroups * config.staging_bytes, STAGING_ALIGNMENT),)

    def problem(self, config: WgmmaConfig) -> str | None:
        return one_of(self.chunk, (32, 64), "chunk")


# -- reductions --------------------------------------------------------------------------------------------------------


class Reduction(ABC):
    """The reduction policy. It says how parts of a tile are added up, how a launch is laid out, and how long the launch
    takes. The methods of this class implement split-K through the workspace and, with ``cluster`` or ``dsmem``, in a
    cluster. Other reductions override them.

    Attributes:
        cluster: number of CTAs of a cluster that have equal parts of K of one tile.
        k_warpgroups: number of warpgroups of a CTA that interleave the k blocks of one tile: one decodes while another
            waits for its MMAs.
        splits_k: whether K may be cut into parts, by CTAs.
        cuts_rows: whether tiles of a last round are cut along their rows of x, not along K.
        dsmem: whether each tile of 64 output features is stored by one CTA of the cluster, to which the other CTAs
            publish their partials: `.cluster_reduction`.
        sequential: whether a CTA has all parts of K of a tile, one after the other.
        mainloops: types of mainloops that can be combined with the reduction, in addition to mainloops that name the
            reduction.
        made_by: "module:name" of the device code, a `.reduction.TileReduction`, which is imported when a kernel is
            compiled.
        multicasts: whether neighbouring CTAs may multicast activations. False if the CTAs of a cluster divide K.
    """

    cluster: int = 1
    k_warpgroups: int = 1
    splits_k: ClassVar[bool] = True
    cuts_rows: ClassVar[bool] = False
    dsmem: ClassVar[bool] = False
    sequential: ClassVar[bool] = False
    mainloops: ClassVar[tuple[type, ...]] = ()
    made_by: ClassVar[str] = f"{_ROOM}.reduction:WorkspaceReduction"
    multicasts: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The reduction's part of a kernel's name."""

    @property
    def code(self) -> tuple[str, ...]:
        """The import paths of the reduction's device code, which is part of kernels' keys."""
        return (self.made_by,)

    def partial_slots(self, config: WgmmaConfig) -> int:
        """Returns the number of tiles of 64 output features for which a CTA can receive partials from its cluster."""
        return -(-config.block_tiles // self.cluster) if self.dsmem else 0

    def received_bytes(self, config: WgmmaConfig) -> int:
        """Returns the bytes of shared memory for the partials that a CTA receives from its cluster."""
        return self.partial_slots(config) * (self.cluster - 1) * config.partial_bytes

    def regions(self, config: WgmmaConfig) -> tuple[Region, ...]:
        """Returns the reduction's shared memory: partials from other CTAs of the cluster, and from other warpgroups of
        the CTA."""
        own = config.block_tiles * (self.k_warpgroups - 1) * config.partial_bytes
        return (Region("partials", self.received_bytes(config) + own),)

    def barriers(self, config: WgmmaConfig) -> tuple[Barriers, ...]:
        """Returns the mbarriers: one for each tile whose partials other CTAs send. A barrier counts the bytes of all
        partials of its tile."""
        expected = (self.cluster - 1) * config.partial_bytes
        return (Barriers("partial_barriers", self.partial_slots(config), 1, expected),)

    def problem(self, config: WgmmaConfig) -> str | None:
        """Returns why a configuration cannot have this reduction, or None."""
        return None

    # What a launch's schedule asks. Compiled kernels have nothing of it.

    def is_fitted(self, config: WgmmaConfig) -> bool:
        """Returns whether the time model is fitted to measurements of this configuration with few rows. A configuration
        that is not fitted is never chosen for few rows (`cute_kernels.gemm.choice`).
        """
        return config.limbs or self.k_warpgroups > 1

    def can_cut(self, config: WgmmaConfig, splits: int, k_blocks: int) -> bool:
        """Returns whether tiles may be cut into ``splits`` parts, none of them empty."""
        cut = splits == self.cluster if self.cluster > 1 else splits == 1 or self.splits_k
        return cut and -(-k_blocks // -(-k_blocks // splits)) == splits

    def laid_out(self, schedule: TileSchedule, num_sms: int, share: float) -> TileSchedule | None:
        """Returns the schedule with ``whole`` and ``num_ctas`` filled in. Returns None if full rounds leave no tile to
        cut, or if the clusters cannot all run at once.

        Full rounds of all CTAs compute whole tiles. CTAs that multicast activations count as one CTA. The CTAs of a
        cluster divide the K of one tile. share: the fraction of SMs on which clusters can run, since clusters cannot
        occupy all SMs.
        """
        if self.cluster > 1:
            work_tiles = schedule.num_work_tiles
            fits = work_tiles <= num_sms * share and not (self.dsmem and schedule.m_tiles > 1)
            return replace(schedule, num_ctas=work_tiles) if fits else None
        multicast = schedule.config.multicast
        teams = num_sms // multicast
        if schedule.splits > 1:
            schedule = replace(schedule, whole=schedule.num_tiles_cut // teams * teams)
            if not schedule.num_tiles_cut:
                return None
        return replace(schedule, num_ctas=min(teams, schedule.num_work_tiles) * multicast)

    def partial_words(self, schedule: TileSchedule) -> int:
        """Returns the number of fp32 words of partial accumulators in the workspace."""
        if self.cluster > 1:
            return 0  # they meet in shared memory
        config = schedule.config
        parts = schedule.num_tiles_cut * config.multicast * (schedule.splits - 1)
        return parts * config.block_rows * config.tile_m

    def launch_clocks(self, problem: LinearProblem, schedule: TileSchedule, cost: MainloopCost) -> float:
        """Returns the clocks of a launch: rounds of whole tiles, then rounds of parts of tiles."""
        resident, k_block = schedule.num_ctas // schedule.config.multicast, cost.k_block_clocks(problem, schedule)
        tile = schedule.k_blocks * k_block + cost.work_tile_clocks(problem, schedule.config)
        clocks = -(-schedule.whole // resident) * tile
        parts = -(-schedule.num_tiles_cut * schedule.splits // resident)
        return clocks + parts * self.cut_clocks(problem, schedule, cost, k_block)

    def cut_clocks(self, problem: LinearProblem, schedule: TileSchedule, cost: MainloopCost, k_block: float) -> float:
        """Returns the clocks that a CTA takes to compute and reduce a part of a cut tile. k_block: clocks of one k
        block.
        """
        products = schedule.split_k_blocks * k_block + cost.work_tile_clocks(problem, schedule.config)
        if schedule.splits == 1:
            return products
        rates = cost.rates_of(problem, schedule.config)
        return products + (rates.combine + rates.combine_part * schedule.config.thread_acc * (schedule.splits - 1))


@dataclass(frozen=True)
class WholeK(Reduction):
    """The policy without a reduction: a work tile has all of K."""

    splits_k: ClassVar[bool] = False
    multicasts: ClassVar[bool] = True
    name: ClassVar[str] = ""


@dataclass(frozen=True)
class RowCuts(Reduction):
    """The policy without a reduction in which the tiles of a last round are cut along their rows of x."""

    splits_k: ClassVar[bool] = False
    cuts_rows: ClassVar[bool] = True
    multicasts: ClassVar[bool] = True
    name: ClassVar[str] = "_rows"

    def problem(self, config: WgmmaConfig) -> str | None:
        return "tiles are cut along rows into more than 1 part" if config.row_parts == 1 else None

    def can_cut(self, config: WgmmaConfig, splits: int, k_blocks: int) -> bool:
        return splits == config.row_parts

    def laid_out(self, schedule: TileSchedule, num_sms: int, share: float) -> TileSchedule | None:
        """Returns the schedule of `Reduction.laid_out`. Returns None if there are fewer tiles than a full round has,
        since smaller tiles with longer k blocks are then faster.
        """
        found = super().laid_out(schedule, num_sms, share)
        return found if found is not None and found.whole else None

    def partial_words(self, schedule: TileSchedule) -> int:
        return 0

    def cut_clocks(self, problem: LinearProblem, schedule: TileSchedule, cost: MainloopCost, k_block: float) -> float:
        config = schedule.config
        small = replace(config, tile_m=config.part_m, row_parts=1, reduction=WHOLE_K)
        k_block = cost.k_block_clocks(
            problem, replace(schedule, config=small, m_tiles=schedule.m_tiles * config.row_parts)
        )
        return schedule.k_blocks * k_block + cost.work_tile_clocks(problem, config) / config.row_parts


@dataclass(frozen=True)
class WorkspaceSplitK(Reduction):
    """Split-K through the workspace: partials are published in global memory. Its code is
    `.reduction.WorkspaceReduction`."""

    multicasts: ClassVar[bool] = True
    name: ClassVar[str] = "_split"


@dataclass(frozen=True)
class RangeSplitK(Reduction):
    """Stream-K: the k blocks of all tiles are one sequence, which is cut into equal work ranges, one for each CTA. Its
    code is in `.ranges`.

    If tiles were not cut, 144 tiles on 132 SMs would take two rounds, and most CTAs would idle in the second. A work
    range is at least as long as a tile. A CTA computes the tiles of its range from last to first. If the last tile ends
    after the range, the CTA publishes this tile's accumulators. If the first tile begins before the range, the CTA adds
    the previous CTA's partials.

    A CTA waits only for the previous CTA, and only after it has published its own partial
    (docs/design/forward_progress.md). This requires that no range is shorter than a tile. A shorter range could be the
    middle of a tile. The CTA would publish its partial only at the end of the range, and another CTA would wait for it,
    4 us on an H200.

    Attributes:
        end: the time of storing a tile's results, in k blocks. Ranges are cut as if each tile had ``end`` additional k
            blocks, so a CTA that stores more tiles has fewer k blocks. No range ends within the additional k blocks.
    """

    end: int = 5
    made_by: ClassVar[str] = f"{_ROOM}.ranges:RangeReduction"

    @property
    def name(self) -> str:
        return f"_ranges{self.end}"

    def can_cut(self, config: WgmmaConfig, splits: int, k_blocks: int) -> bool:
        return splits == 1

    def laid_out(self, schedule: TileSchedule, num_sms: int, share: float) -> TileSchedule | None:
        """Returns the schedule in which every SM has one CTA, with an equal work range. All tiles are listed as whole
        tiles. Returns None if a range would be shorter than a tile.
        """
        tiles = schedule.num_tiles_cut
        return replace(schedule, whole=tiles, num_ctas=num_sms) if tiles >= num_sms else None

    def partial_words(self, schedule: TileSchedule) -> int:
        return schedule.num_ctas * schedule.config.block_rows * schedule.config.tile_m

    def launch_clocks(self, problem: LinearProblem, schedule: TileSchedule, cost: MainloopCost) -> float:
        """Returns the clocks of a CTA: for the k blocks of its range, for storing results, and for the exchange of
        partials.
        """
        units = schedule.whole * (schedule.k_blocks + self.end) / schedule.num_ctas
        products = (units - self.end) * cost.k_block_clocks(problem, schedule) * RANGE_SPREAD
        return products + cost.work_tile_clocks(problem, schedule.config) + RANGE_CLOCKS

    def problem(self, config: WgmmaConfig) -> str | None:
        if self.end < 0:
            return f"end {self.end} is negative"
        if config.n_tiles > 1 or config.row_parts > 1 or config.one_m_tile:
            return "ranges want one tile a warpgroup, in one part"
        return None


@dataclass(frozen=True)
class SequentialSplitK(Reduction):
    """A CTA computes all parts of K of a tile, one after the other, with accumulators that begin at 0 in each part.

    The CTA adds the parts in the order of `WorkspaceSplitK`. So results have the same bits as with `WorkspaceSplitK`,
    but no partial results go to memory.
    """

    splits_k: ClassVar[bool] = False
    sequential: ClassVar[bool] = True
    made_by: ClassVar[str] = f"{_ROOM}.reduction:SequentialReduction"
    name: ClassVar[str] = "_sequential"

    def can_cut(self, config: WgmmaConfig, splits: int, k_blocks: int) -> bool:
        return splits > 1 and -(-k_blocks // -(-k_blocks // splits)) == splits

    def laid_out(self, schedule: TileSchedule, num_sms: int, share: float) -> TileSchedule | None:
        """Returns the schedule in which every CTA has whole tiles."""
        tiles = schedule.num_tiles_cut
        return replace(schedule, whole=tiles, num_ctas=min(num_sms, tiles))

    def partial_words(self, schedule: TileSchedule) -> int:
        return 0

    def problem(self, config: WgmmaConfig) -> str | None:
        if config.n_tiles * config.tile_m > MOST_SEQUENTIAL_M:
            return f"a thread has no registers for two sets of accumulators of {config.n_tiles * config.tile_m} rows"
        return None


@dataclass(frozen=True)
class RowExchange(Reduction):
    """CTAs of a cluster exchange accumulators. Each CTA stores its share of the tile's rows. Its code is
    `.reduction.RowReduction`.

    Each CTA has one work tile.
    """

    cluster: int = 2
    made_by: ClassVar[str] = f"{_ROOM}.reduction:RowReduction"

    @property
    def name(self) -> str:
        return f"_cluster{self.cluster}"

    def problem(self, config: WgmmaConfig) -> str | None:
        if reason := one_of(self.cluster, (2, 4), "cluster"):
            return reason
        if config.n_tiles > 1 or config.own_m < 2 * WGMMA_N_STEP or config.row_parts > 1:
            return f"a cluster of {self.cluster} wants one tile a warpgroup and {2 * WGMMA_N_STEP} rows for each CTA"
        if config.acc_bytes > config.num_stages * config.x_stage_bytes:
            return f"accumulators of {config.acc_bytes} bytes do not fit into the stages of activations"
        return None

    def cut_clocks(self, problem: LinearProblem, schedule: TileSchedule, cost: MainloopCost, k_block: float) -> float:
        config, rates = schedule.config, cost.rates_of(problem, schedule.config)
        join = rates.join + rates.join_acc * (self.cluster - 1) * config.own_m / 2
        results = cost.work_tile_clocks(problem, config)
        return schedule.split_k_blocks * k_block + results / self.cluster + join


@dataclass(frozen=True)
class Dsmem(Reduction):
    """CTAs of a cluster publish partials to the CTA that stores a tile. It is for few rows. Its code is in
    `.cluster_reduction`.

    Warpgroups may interleave the k blocks of a tile (intra-CTA split-K).
    """

    cluster: int = 2
    k_warpgroups: int = 1
    dsmem: ClassVar[bool] = True
    made_by: ClassVar[str] = f"{_ROOM}.cluster_reduction:ClusterReduction"

    @property
    def name(self) -> str:
        return f"_dsmem{self.cluster}{f'k{self.k_warpgroups}' if self.k_warpgroups > 1 else ''}"

    def problem(self, config: WgmmaConfig) -> str | None:
        count = self.k_warpgroups
        if reason := one_of(self.cluster, DSMEM_CLUSTERS, "cluster") or one_of(count, K_WARPGROUPS, "k_warpgroups"):
            return reason
        if config.warpgroups % count:
            return f"{config.warpgroups} warpgroups are no multiple of {count} that interleave k blocks"
        if config.num_stages < 2 * count or config.num_stages % count:
            # Else a stage could have the parity of two rounds before; and a warpgroup holds two stages at once.
            return f"num_stages {config.num_stages} is no multiple of {count} warpgroups, or less than two for each"
        return None

    def cut_clocks(self, problem: LinearProblem, schedule: TileSchedule, cost: MainloopCost, k_block: float) -> float:
        config = schedule.config
        products = schedule.split_k_blocks * k_block + cost.work_tile_clocks(problem, config)
        return products + cost.dsmem + cost.dsmem_row * config.tile_m * (self.cluster - 2)


# What a configuration has where nothing else is said.
WHOLE_K, STAGED = WholeK(), StagedStore()
