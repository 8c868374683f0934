"""Weight-only GEMM for few rows of x, whose digits are made once and stay in shared memory: one launch.

A launch that makes digits beforehand (:mod:`.digit_kernel`) takes a microsecond; making them as x comes through the
ring sets its pace. But nothing is to be done until the first weights have come, two microseconds after the start: in
that time the multiplying warps turn all of x that the CTA needs into digits (:mod:`.resident_rows`). The copying warp
waits for none of it.

Warpgroups may take units in turn, so that one decodes while another waits for its MMAs; their sums are parts of K like
those of the other CTAs of a cluster, and go the same way (:mod:`.cluster_parts`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.device import ptx, wgmma
from cute_kernels.linear.wgmma.config import MMA_TOKENS, WARPGROUP_WARPS
from cute_kernels.linear.wgmma.digits_ahead import AheadUnits
from cute_kernels.linear.wgmma.kernel import WgmmaKernel
from cute_kernels.linear.wgmma.reading import Lane
from cute_kernels.linear.wgmma.resident_config import ResidentConfig
from cute_kernels.linear.wgmma.resident_rows import ROW_BYTES, ResidentRows
from cute_kernels.linear.wgmma.tiles import Shape
from cute_kernels.linear.work import Operands

START_BARRIER = 0  # of the CTA, before the first stage is waited for


@dataclass(frozen=True)
class TurnLane(Lane):
    """A thread's places in a stage, and whose turn is its warpgroup's."""

    turn: Any


class ResidentUnits(AheadUnits):
    """What a multiplying warpgroup does with the units of an item whose digits are resident."""

    @cute.jit
    def multiply(self, sums, memory, item, place, ring, teller, tokens: int):
        if const_expr(self.config.ahead):
            stage, phase, last = self.multiply_ahead(sums, memory, item, place, ring, teller, tokens)
        else:
            stage, phase, last = self.multiply_each(sums, memory, item, place, ring, teller, tokens)
        return stage, phase, last

    @cute.jit
    def multiply_each(self, sums, memory, item, place, ring, teller, tokens: int):
        """As `DigitUnits.multiply`."""
        stage, phase, last = ring
        x_place, start = self.x_scale_place(item), self.kernel.first_resident(item)
        for unit in cutlass.range(item.begin + place.turn, item.end, self.config.turns, unroll=1):
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            self.multiply_unit(sums, self.at(memory, unit - start, tokens), stage, place, x_place, tokens)
            cute.arch.sync_warp()
            self.kernel.release(memory, stage, teller)
            last = stage
            stage, phase = self.advance(stage, phase)
        return stage, phase, last

    @cute.jit
    def multiply_ahead(self, sums, memory, item, place, ring, teller, tokens: int):
        """As `AheadUnits.multiply`, of an item that has a unit for each turn."""
        stage, phase, last = ring
        x_place, start = self.x_scale_place(item), self.kernel.first_resident(item)
        between = self.nothing_yet(tokens)
        turns = self.config.turns
        cute.arch.mbarrier_wait(memory.full + stage, phase)
        self.take(memory, stage, place, between)
        for unit in cutlass.range(item.begin + place.turn, item.end, turns, unroll=1):
            here = self.at(memory, unit - start, tokens)
            started, scales, x_scales = self.multiply_but_last(sums, here, stage, place, x_place, between, tokens)
            last = stage
            stage, phase = self.advance(stage, phase)
            if unit + turns < item.end:
                cute.arch.mbarrier_wait(memory.full + stage, phase)
            # Behind the item's last unit these are bytes of some other, and not used.
            self.take(memory, stage, place, between)
            self.keep(between, wgmma.wait_for_dots(started, 0), scales, x_scales)
            cute.arch.sync_warp()
            self.kernel.release(memory, last, teller)
        self.add_kept(sums, between)
        return stage, phase, last

    def at(self, memory, index, tokens: int):
        """Memory as units read it, of the ``index``-th resident one."""
        index = cute.arch.make_warp_uniform(index)
        return replace(
            memory,
            x_address=memory.x_address + index * (2 * tokens * ROW_BYTES),
            x_scales=memory.x_scales + index * (4 * tokens),
        )

    def advance(self, stage, phase):
        """The stage of the warpgroup's next unit, and the parity of its barrier."""
        stage = stage + self.config.turns
        wrapped = stage >= self.config.num_stages
        stage = cutlass.select_(wrapped, stage - self.config.num_stages, stage)
        return stage, cutlass.select_(wrapped, phase ^ 1, phase)


class ResidentKernel(WgmmaKernel):
    """One compiled variant; :class:`.resident_config.ResidentConfig` says which."""

    config: ResidentConfig

    def __init__(self, config: ResidentConfig):
        super().__init__(config)
        self.digits = ResidentUnits(self)
        self.rows = ResidentRows(config)

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        x: cute.Tensor,
        codes: Int64,
        scales: Int64,
        zeros: Int64,
        bias: Int64,
        residual: Int64,
        out: Int64,
        workspace: Int64,
        n: Int32,
        num_tiles: Int32,
        units: Int32,
        whole: Int32,
        splits: Int32,
        num_ctas: Int32,
        activation: Int32,
        out_kind: Int32,
        stream,
    ):
        """As :class:`WgmmaKernel`. There is room for the boxes of all units of K that a CTA has of the rows there are,
        and a unit for each turn in every part of K.
        """
        shape = Shape(*self.sizes(x, n, num_tiles, units, whole, splits, activation, out_kind))
        operands = Operands(ptx.address(x), codes, scales, zeros, bias, residual, out, workspace)
        self.kernel(operands, shape).launch(**self.launch_options(num_ctas, stream))

    def x_layout(self):
        return self.boxes_layout(MMA_TOKENS, 2 * self.config.boxes)

    @cute.kernel
    def kernel(self, operands, shape):  # type: ignore[override]
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = self.allocate()
        items = self.items_of(shape, cta, num_ctas)
        if warp == config.math_warps:
            if lane == 0:
                self.init_barriers(memory)
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=config.num_threads)
            if const_expr(config.part_slots > 0):
                cute.arch.cluster_arrive()  # for whoever sends parts, as all threads of the cluster
            self.copy_weights(operands, shape, memory, items)
        else:
            if const_expr(config.part_slots > 0):
                cute.arch.cluster_arrive()
            self.make_digits(operands, shape, memory, items, warp, lane)
            cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=config.num_threads)
            self.multiply(operands, shape, memory, items, warp, lane)

    @cute.jit
    def make_digits(self, operands, shape, memory, items, warp, lane):
        """Digits of what the CTA needs of x: of a cluster, which has one item, a part of K."""
        item = items.item(items.first)
        begin, end = Int32(0), shape.units
        if const_expr(self.config.cluster > 1):
            begin, end = item.begin, item.end
        tokens = self.parts_of(shape, item) * MMA_TOKENS
        self.rows.make(operands.x, shape, memory, begin, end, tokens, warp, lane)

    def first_resident(self, item):
        """The first unit that an item's CTA has the digits of."""
        return item.begin if self.config.cluster > 1 else Int32(0)

    def lane_places(self, shape, warp, lane) -> TurnLane:
        place = super().lane_places(shape, warp, lane)
        values = {field.name: getattr(place, field.name) for field in fields(place)}
        return TurnLane(**values, turn=self.turn(warp // WARPGROUP_WARPS))

    def turn(self, group):
        """Whose turn is a warpgroup's."""
        return group // (self.config.warpgroups // self.config.turns)

    def first_tile(self, group):
        return group % (self.config.warpgroups // self.config.turns) * self.config.m_tiles

    def first_stage(self, group):
        return Int32(self.turn(group))

    def part_of(self, item, group):
        return item.split * self.config.turns + self.turn(group)
