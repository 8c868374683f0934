"""The consumer warps of a CTA. They multiply its work tiles, then reduce and store the results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.gemm.wgmma.config import WARPGROUP_WARPS, WgmmaConfig
from cute_kernels.gemm.wgmma.epilogue import Store
from cute_kernels.gemm.wgmma.places import Places, parts_of
from cute_kernels.gemm.wgmma.reading import Channel, Lane, StageReader
from cute_kernels.gemm.wgmma.reduction import TileReduction


class TileMainloop(Protocol):
    """Computes W X^T of a work tile; `.register_mainloop` documents the methods."""

    def masks(self, shape, lane) -> Any: ...

    def multiply(self, acc, memory, work_tile, place, channel, state, releases, tile_m: int) -> Any: ...

    def finish(self, acc, shape, memory, work_tile, place, channel, last, releases) -> None: ...


class Consumers:
    """The consumer warps of a CTA, with their mainloop and their reduction, which has a store."""

    def __init__(
        self, config: WgmmaConfig, stages: StageReader, places: Places, mainloop: TileMainloop, reduction: TileReduction
    ):
        self.config, self.stages, self.places = config, stages, places
        self.mainloop, self.reduction = mainloop, reduction
        self.channel = Channel(config, stages, places)

    def lane(self, shape, warp, lane) -> Lane:
        """Returns a thread's offsets within a stage."""
        return self.stages.lane(shape, warp, lane, self.mainloop.masks)

    @cute.jit
    def multiply(self, operands, shape, memory, scheduler, place: Lane):
        """Processes all of a warp's work tiles. place: as `lane` returns it."""
        config, warp, lane = self.config, place.warp, place.lane
        group = warp // WARPGROUP_WARPS
        store = Store(
            staging=memory.staging + group * config.staging_bytes,
            warpgroup=group,
            tid=warp % WARPGROUP_WARPS * WARP_THREADS + lane,
            row_warp=warp % WARPGROUP_WARPS,
            lane=lane,
        )
        releases = lane == 0  # that a stage is free
        if const_expr(config.multicast > 1):
            releases = lane < config.multicast  # each tells one of the CTAs that fill it
        here = memory.pipeline.consumer_state(self.stages.k_rank(group))
        last = memory.pipeline.consumer_state()
        acc = cute.make_rmem_tensor(config.thread_acc, Float32)
        self.reduction.begin()
        for index in cutlass.range(scheduler.first, scheduler.count, scheduler.stride, unroll=1):
            work_tile = scheduler.work_tile(index)
            first_tile, k_rank = self.stages.first_tile(group), self.stages.k_rank(group)
            if const_expr(self.reduction.prepares):
                # Nothing of these places is kept for the tile's end: all registers belong to the products.
                alone = (
                    replace(store, tid=ptx.pinned(Int32(store.tid))),
                    replace(work_tile, split=ptx.pinned(Int32(work_tile.split))),
                )
                self.reduction.prepare(operands, shape, *alone, first_tile, k_rank)
            acc.fill(0.0)
            channel = self.channel.load(operands, shape, work_tile, first_tile, place)
            state, present = (here, last), parts_of(config, self.places, shape, work_tile)
            here, last = self.multiply_parts(acc, memory, work_tile, place, channel, state, releases, present, 1)
            self.mainloop.finish(acc, shape, memory, work_tile, place, channel, last, releases)
            self.reduction.finish(operands, shape, memory, store, work_tile, acc, first_tile, k_rank)

    @cute.jit
    def multiply_parts(self, acc, memory, work_tile, place: Lane, channel, state, releases, present, count: int):
        """Multiplies a work tile in which ``present`` row parts have rows, by the loop for ``count`` or more parts.
        MMAs are only as wide as the parts that have rows, so a loop is compiled for each number of parts, or for most
        numbers.

        All loops use the same registers. Results of parts that were not loaded are never stored. state and result: as
        in `RegisterMainloop.multiply`.
        """
        here, last = state
        tile_m = count * self.config.part_m
        if const_expr(count not in self.config.loop_parts):
            here, last = self.multiply_parts(
                acc, memory, work_tile, place, channel, state, releases, present, count + 1
            )
        elif const_expr(count == self.config.row_parts):
            here, last = self.mainloop.multiply(acc, memory, work_tile, place, channel, state, releases, tile_m)
        else:
            if in_loop_of(self.config, present, count):
                here, last = self.mainloop.multiply(acc, memory, work_tile, place, channel, state, releases, tile_m)
            else:
                here, last = self.multiply_parts(
                    acc, memory, work_tile, place, channel, state, releases, present, count + 1
                )
        return here, last


def in_loop_of(config: WgmmaConfig, present, count: int):
    """Returns whether the loop for ``count`` row parts is the one for a tile with ``present`` row parts. Loops for
    fewer row parts have been tested before.
    """
    every = len(config.loop_parts) == config.row_parts
    return present == count if every else present <= count
