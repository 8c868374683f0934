"""Weight-only GEMM for many rows of x: out^T = W X^T by warpgroup MMAs with W, decoded, in registers.

16 bytes of the packed codes are a thread's A operands of several k16 steps (`layouts.weights.hopper`). So decoded
weights go straight from a thread's registers to the tensor cores, which read only X from shared memory. One producer
warp loads X as the swizzled B operand through TMA. Another loads codes and scales by bulk copies. Each consumer
warpgroup has 64 or 128 output features. While a warpgroup decodes its next k16 steps, the tensor cores run its last
MMAs and other warpgroups' MMAs.

A kernel is a composition of policies, each a value: loads (`.loads`), a mainloop (`.register_mainloop`, `.synchronous`,
`.limbs`, `cute_kernels.gemm.operands.fp8_mainloop`), a reduction (`.reduction`, `.cluster_reduction`), a tile scheduler
(`.tiles`) and a store (`.epilogue`). `TileRoles` says what each warp does.

CUTLASS's mixed-input mainloop for Hopper also has operands in registers and two consumer warpgroups, and reaches the
full rate. This kernel needs neither that mainloop's shuffles nor its pass over shared memory.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import cutlass.cute as cute
from cutlass import Int64, const_expr

from cute_kernels.formats.code import load_code
from cute_kernels.gemm.device_operands import Operands, operands_of
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.consumers import Consumers, TileMainloop
from cute_kernels.gemm.wgmma.epilogue import TileEpilogue
from cute_kernels.gemm.wgmma.loads import (
    ELEMENTS,
    ActivationLoads,
    TmaLoads,
    WeightLoads,
    prefetch_biases,
    prefetch_k_blocks,
)
from cute_kernels.gemm.wgmma.memory import TileMemory, allocate, init_barriers
from cute_kernels.gemm.wgmma.places import DensePlaces, Places
from cute_kernels.gemm.wgmma.reading import MainloopParts, Shift, StageReader
from cute_kernels.gemm.wgmma.reduction import TileReduction, TileStore
from cute_kernels.gemm.wgmma.tiles import DenseRounds, TileSizes

BEGIN = 8  # number of the barrier that others are there, after those of `.epilogue`

# Who waits for the launch before, which may still be running.
Waits = Literal["nobody", "loader", "all warps"]
NOBODY: Waits = "nobody"
LOADER: Waits = "loader"  # the warp that loads weights, before it asks for the first; others wait for it
ALL_WARPS: Waits = "all warps"  # each by itself, so that x is asked for beside the first weights and not after them


def launch_options(config: WgmmaConfig, num_ctas, stream, *, use_pdl: bool) -> dict[str, Any]:
    """Returns the options of a launch. use_pdl: whether the launch may begin before the previous one has ended."""
    cluster = (config.cluster_size, 1, 1) if config.cluster_size > 1 else None
    sizes = {"grid": (num_ctas, 1, 1), "block": (config.num_threads, 1, 1), "cluster": cluster}
    return sizes | {"min_blocks_per_mp": 1, "use_pdl": use_pdl, "stream": stream}


class SpareWarps(Protocol):
    """The work of the producer warps that copy nothing.

    registers: (number of registers of a producer thread, of a consumer thread).
    """

    registers: tuple[int, int]

    def init_barrier(self, memory: TileMemory) -> None:
        """Initialises the spare warps' barrier in one thread, before the fence of the other barriers."""

    def run(self, operands, shape, memory: TileMemory, scheduler, warp, lane) -> None:
        """Runs the spare warps' work. warp: the warp's index in the CTA."""


class IdleWarps:
    """Spare warps that do nothing."""

    def __init__(self, config: WgmmaConfig):
        self.registers = config.mainloop.producer_registers, config.consumer_registers

    def init_barrier(self, memory) -> None:
        """Does nothing: idle warps have no barrier."""

    def run(self, operands, shape, memory, scheduler, warp, lane) -> None:
        """Does nothing."""


class TileRoles:
    """The roles of a CTA's warps. Two of the four producer warps fill the pipeline; the other two are spare. The
    consumer warps empty the pipeline.

    Args:
        table_bytes: shared memory for a table of tiles, which grouped products have.
        dense: whether the product is dense. Then the first work tile is known without a table.
        waits: which warps wait in `begin` for the previous launch: `NOBODY`, `LOADER` or `ALL_WARPS`.
        spare: the work of the spare warps; None: they are idle.
    """

    def __init__(
        self,
        config: WgmmaConfig,
        places: Places,
        weights: WeightLoads,
        activations: ActivationLoads,
        consumers: Consumers,
        table_bytes: int = 0,
        *,
        dense: bool = False,
        waits: Waits = NOBODY,
        spare: SpareWarps | None = None,
    ):
        self.config, self.places, self.table_bytes = config, places, table_bytes
        self.dense, self.waits, self.spare = dense, waits, spare or IdleWarps(config)
        self.weights, self.activations, self.consumers = weights, activations, consumers

    @property
    def weight_warp(self) -> int:
        """The warp that loads weights."""
        return self.config.consumer_warps + 1

    def allocate(self) -> TileMemory:
        layout = TmaLoads(self.config, self.places).layout()
        return allocate(self.config, layout, ELEMENTS[self.config.dtype], self.table_bytes)

    @cute.jit
    def begin(self, operands, shape, memory, scheduler, warp, lane):
        """Initialises the CTA's barriers. The warp that loads weights does so, and all other warps wait for it.

        The warp that loads weights goes on at once. Waiting until all warps have met and found their work tiles would
        take 1 us of a launch of 6 us. If the product has one tile of rows, this warp loads the first weights before
        anything else.

        Other CTAs of a cluster need to see only the barriers, so a fence for barriers is enough. An arrival that
        releases all writes would wait for the GPU's memory, and delay the first copy by 1.1 us.

        A launch may begin while the previous launch is running. Prefetches into L2 may run at any time. The previous
        launch may have written any data, even weights. So data are read only after the warp that initialises barriers
        has waited for the previous launch. If every warp waits, barriers are initialised before the wait, so that
        copies can start right after the wait.
        """
        config = self.config
        if warp == self.weight_warp:
            if lane == 0:
                cute.arch.griddepcontrol_launch_dependents()
                prefetch_k_blocks(config, self.places, operands, shape, scheduler)
                self.spare.init_barrier(memory)
                init_barriers(config, memory)
                if const_expr(self.waits == LOADER):
                    cute.arch.griddepcontrol_wait()
                if const_expr(self.weights.asks_first and self.waits != ALL_WARPS):
                    self.weights.copy_first(operands, shape, memory, scheduler)
            cute.arch.sync_warp()
        if const_expr(config.multicast > 1):
            cute.arch.cluster_arrive_relaxed()
            if warp != self.weight_warp:
                cute.arch.cluster_wait()  # before anybody copies into, or arrives at, memory of others
        else:
            if warp == self.weight_warp:
                cute.arch.barrier_arrive(barrier_id=BEGIN, number_of_threads=config.num_threads)
            else:
                cute.arch.barrier(barrier_id=BEGIN, number_of_threads=config.num_threads)
            if const_expr(config.reduction.dsmem):
                cute.arch.cluster_arrive_relaxed()  # consumers wait for it in `ClusterReduction.begin`
        if const_expr(self.waits == ALL_WARPS):
            cute.arch.griddepcontrol_wait()
            if const_expr(self.weights.asks_first):
                if warp == self.weight_warp:
                    if lane == 0:
                        self.weights.copy_first(operands, shape, memory, scheduler)
                    cute.arch.sync_warp()

    @cute.jit
    def take(self, operands, shape, memory, scheduler, copy_x, x_view, warp, lane):
        """Runs each warp's role. The producer warps' machine code comes first: code is fetched from memory line by
        line, and a launch waits for the producers' code.
        """
        config = self.config
        loads, multiplies = self.spare.registers
        if warp == self.weight_warp:
            cute.arch.setmaxregister_decrease(loads)
            self.weights.copy(operands, shape, memory, scheduler)
        elif warp >= config.consumer_warps:
            cute.arch.setmaxregister_decrease(loads)
            if warp == config.consumer_warps:
                self.activations.copy(shape, memory, scheduler, copy_x, x_view)
            elif const_expr(self.dense):
                prefetch_biases(config, self.places, operands, shape, scheduler, lane)
                self.spare.run(operands, shape, memory, scheduler, warp, lane)
        else:
            cute.arch.setmaxregister_increase(multiplies)
            self.consumers.multiply(operands, shape, memory, scheduler, self.consumers.lane(shape, warp, lane))

    @cute.jit
    def leave_cluster(self, warp):
        """Waits until no other CTA of the cluster will arrive on this CTA's barriers."""
        if warp == self.weight_warp:
            cute.arch.cluster_wait()  # for what all others waited for before they began
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


class TileScheduling(Protocol):
    """The policy that says which work tiles a kernel has, and where their rows, weights and results are. There is one
    for dense products and one for experts.

    Attributes:
        places: maps the indices of a work tile to the addresses of rows, weights and results.
        is_dense: whether products are dense. Only then may results have a residual. The first work tile is then known
            without a table.
        asks_first: whether the first weights are loaded before other warps know that barriers are initialised.
        masks_by_lane, x_scale_shift: as in `MainloopParts`.
        table_bytes: shared memory for a table of tiles.
    """

    places: Places
    is_dense: bool
    asks_first: bool
    masks_by_lane: bool
    x_scale_shift: Shift | None
    table_bytes: int

    def sizes(self, given) -> Any:
        """Returns the sizes of a launch, on the host: a `TileSizes`."""
        ...

    def begin(self, roles: TileRoles, operands, shape, memory, cta, num_ctas, warp, lane) -> Any:
        """Initialises barriers and returns the CTA's tile scheduler."""
        ...


class DenseTiles:
    """The `TileScheduling` of dense products. The reduction's ``rounds``, a `DenseRounds`, say which tiles, or parts of
    tiles, a CTA computes.
    """

    is_dense, masks_by_lane, table_bytes = True, True, 0

    def __init__(self, config: WgmmaConfig):
        self.config, self.asks_first = config, config.one_m_tile
        self.places: Places = DensePlaces(config)
        self.x_scale_shift: Shift | None = None
        self.rounds: type[DenseRounds] = load_code(config.reduction.made_by).rounds

    def sizes(self, given) -> TileSizes:
        return self.rounds.sizes(self.config, given)

    def begin(self, roles: TileRoles, operands, shape, memory, cta, num_ctas, warp, lane) -> Any:
        """See `TileScheduling`."""
        scheduler = self.rounds.scheduler(self.config, shape, cta, num_ctas)
        roles.begin(operands, shape, memory, scheduler, warp, lane)
        return scheduler


class WgmmaKernel:
    """The kernel of products by tiles, dense or of experts, as one :class:`WgmmaConfig` compiles it.

    | role | warps | waits | arrives |
    |---|---|---|---|
    | loads of weights | 1 | stage empty: all consumer warps that read it | stage full, with the bytes of its copies |
    | loads of activations | 1 | the same | the same; with TMA multicast in every CTA of the cluster |
    | spare | 2 | nobody, or the launch before | makes a norm's factors, or nothing |
    | consumers | 4 a warpgroup | stage full: both loads, and all bytes | stage empty, one lane a warp and CTA |

    A DSMEM reduction has one more barrier for each tile of 64 features that the CTA stores. It expects one arrival, of
    the thread that initialises it, and the bytes of all other CTAs' partials.

    Args:
        scheduling: the `TileScheduling` of dense products or of experts; None: of dense products.
        store: replaces `TileEpilogue`; ``operands`` has the arguments that it needs.
        waits, spare: as `TileRoles` takes them.
    """

    def __init__(
        self,
        config: WgmmaConfig,
        scheduling: TileScheduling | None = None,
        store: TileStore | None = None,
        operands: type[Operands] = Operands,
        waits: Waits = LOADER,
        spare: SpareWarps | None = None,
    ):
        self.config, self.operands = config, operands
        self.scheduling: TileScheduling = DenseTiles(config) if scheduling is None else scheduling
        places, stages, dense = self.scheduling.places, StageReader(config), self.scheduling.is_dense
        self.epilogue: TileStore = TileEpilogue(config, dense=dense) if store is None else store
        parts = MainloopParts(stages, places, self.scheduling.masks_by_lane, self.scheduling.x_scale_shift)
        mainloop: TileMainloop = load_code(config.mainloop.made_by)(config, parts)
        reduction: TileReduction = load_code(config.reduction.made_by)(config, self.epilogue, places)
        self.consumers = Consumers(config, stages, places, mainloop, reduction)
        self.activations = TmaLoads(config, places)
        weights = load_code(config.mainloop.weights_by)(config, places, asks_first=self.scheduling.asks_first)
        loads, table = (weights, self.activations), self.scheduling.table_bytes
        self.roles = TileRoles(config, places, *loads, self.consumers, table, dense=dense, waits=waits, spare=spare)

    def launch(self, given, stream):
        """Launches ``num_ctas`` CTAs. ``given`` has the arguments `TILES` of :mod:`cute_kernels.gemm.arguments`; for
        experts, those of `cute_kernels.gemm.experts.arguments`. It also has the arguments that the class ``operands``
        adds.
        """
        config = self.config
        copy_x, x_view = self.activations.tma(given.x)
        shape = self.scheduling.sizes(given)
        absent = {name: Int64(0) for name in ("zeros", "residual", "workspace") if not hasattr(given, name)}
        operands = operands_of(self.operands, given, x=Int64(0), **absent)
        options = launch_options(config, given.num_ctas, stream, use_pdl=True)
        self.kernel(operands, shape, copy_x, x_view).launch(**options)

    @cute.kernel
    def kernel(self, operands, shape, copy_x, x_view):
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.roles.allocate()
        scheduler = self.scheduling.begin(self.roles, operands, shape, memory, cta, num_ctas, warp, lane)
        self.roles.take(operands, shape, memory, scheduler, copy_x, x_view, warp, lane)
        if const_expr(self.config.multicast > 1):
            self.roles.leave_cluster(warp)
