"""Weight-only GEMM for few rows of x that come in limbs: :mod:`.kernel`, behind the launch that makes them."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.consumers import Consumers
from cute_kernels.gemm.wgmma.epilogue import TileEpilogue
from cute_kernels.gemm.wgmma.few_rows import FewRowsSizes, few_rows_scheduler, few_rows_sizes
from cute_kernels.gemm.wgmma.kernel import TileRoles, launch_options, make_mainloop, make_reduction
from cute_kernels.gemm.wgmma.limb_rows import GROUP_BYTES
from cute_kernels.gemm.wgmma.loads import WeightLoads, product
from cute_kernels.gemm.wgmma.mainloops import ROW_SCALE_BYTES
from cute_kernels.gemm.wgmma.places import DensePlaces
from cute_kernels.gemm.wgmma.reading import StageReader
from cute_kernels.gemm.work import Operands, operands_of


@dataclass(frozen=True)
class LimbBlocksSizes(FewRowsSizes):
    """Sizes of a launch whose x comes in limbs, and where they are."""

    limbs: Int64  # address of blocks of `.limb_blocks`,
    block_rows: Int32  # of so many rows


class LimbBlockLoads:
    """Limbs of x in blocks, and their scales, by bulk copies: see `.loads.ActivationLoads`."""

    def __init__(self, config: WgmmaConfig):
        self.config = config

    @cute.jit
    def copy(self, shape, memory, scheduler, copy_x, x_view):
        """Brings the limbs of every k block, and their scales; one warp."""
        config = self.config
        limb_bytes, scale_bytes = shape.block_rows * GROUP_BYTES, shape.block_rows * ROW_SCALE_BYTES
        scales = shape.limbs + product(shape.k_blocks, limb_bytes)  # behind all blocks
        # The launch before made them. All else it had waited for itself, before it let this one begin.
        cute.arch.griddepcontrol_wait()
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            for k_block in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
                cute.arch.mbarrier_wait(memory.empty + stage, phase)
                with cute.arch.elect_one():
                    barrier = memory.full + stage
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, limb_bytes + scale_bytes)
                    address = Int32(barrier.toint())
                    x = memory.x_address + stage * config.x_stage_bytes
                    x_scales = memory.x_scales + stage * config.x_scale_stage_bytes
                    ptx.bulk_copy_to_shared(x, shape.limbs + product(k_block, limb_bytes), limb_bytes, address)
                    ptx.bulk_copy_to_shared(x_scales, scales + product(k_block, scale_bytes), scale_bytes, address)
                stage, phase = advance(stage, phase, config.num_stages)


class LimbWgmmaKernel:
    """One compiled variant; its configuration says ``limbs``."""

    def __init__(self, config: WgmmaConfig):
        self.config = config
        places, stages = DensePlaces(config), StageReader(config)
        mainloop = make_mainloop(config, stages, places)
        reduction = make_reduction(config, TileEpilogue(config), places)
        self.consumers = Consumers(config, stages, places, mainloop, reduction)
        weights = WeightLoads(config, places, asks_first=True)
        self.roles = TileRoles(config, places, weights, LimbBlockLoads(config), self.consumers, dense=True)

    def launch(self, given, stream):
        """``given`` has the arguments `LIMB_TILES` of :mod:`cute_kernels.gemm.arguments`. It may begin before the
        launch before it, which makes limbs, has ended."""
        sizes = few_rows_sizes(self.config, given)
        shape = LimbBlocksSizes(*sizes, limbs=given.limbs, block_rows=given.block_rows)
        operands = operands_of(Operands, given, x=Int64(0), zeros=Int64(0))
        self.kernel(operands, shape).launch(**launch_options(self.config, given.num_ctas, stream, use_pdl=True))

    @cute.kernel
    def kernel(self, operands, shape):
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.roles.allocate()
        scheduler = few_rows_scheduler(self.config, shape, cta, num_ctas)
        self.roles.begin(operands, shape, memory, scheduler, warp, lane)
        self.roles.take(operands, shape, memory, scheduler, None, None, warp, lane)
