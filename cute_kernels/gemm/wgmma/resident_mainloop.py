"""The mainloop of resident limbs: a CTA makes the limbs of its few rows of x itself, and keeps them.

If shared memory has room for them, a CTA makes the limbs of all x that it needs before its first work tile. If not, K
is cut into chunks, and the memory for limbs into halves. One half holds the limbs of a chunk while warps fill the other
half with the next chunk. Meanwhile the pipeline holds the weights of several k blocks. Resident limbs are addressed by
the index of their k block, weights by their stage.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.gemm.wgmma.config import ResidentConfig
from cute_kernels.gemm.wgmma.limbs import LimbReader, limb_products
from cute_kernels.gemm.wgmma.reading import Channel, StageReader, nothing
from cute_kernels.gemm.wgmma.resident_rows import ROW_BYTES, ResidentLimbLoads


def at(memory, index, tile_m: int):
    """Returns a copy of ``memory`` whose addresses of limbs, scales and sums are those of the ``index``-th resident k
    block."""
    index = cute.arch.make_warp_uniform(index)
    found = replace(
        memory,
        x_address=memory.x_address + index * (2 * tile_m * ROW_BYTES),
        x_scales=memory.x_scales + index * (4 * tile_m),
    )
    return found if memory.x_sums is None else replace(found, x_sums=memory.x_sums + index * (4 * tile_m))


class ResidentMainloop:
    """Multiplies limbs that stay in shared memory. If there is no room for all limbs, it multiplies K in chunks."""

    def __init__(self, config: ResidentConfig, limbs: ResidentLimbLoads, stages: StageReader, channel: Channel):
        self.config, self.limbs, self.stages, self.channel = config, limbs, stages, channel
        self.reader = LimbReader(config, stages, None, in_pairs=True)
        self.products = limb_products(config, stages.decoder.steps)

    def masks(self, shape, lane):
        return self.products.bytes_of.masks(nothing(shape, lane))

    @cute.jit
    def multiply(self, acc, memory, work_tile, place, channel, state, releases, tile_m: int):
        """Multiplies as `RegisterMainloop.multiply` does.

        ``state[0]`` is the state of the weights' pipeline. ``state[1]`` is the phase of `x_barrier` in which the next
        part of x arrives.

        If the limbs of all of x do not fit, K is cut into chunks and the room into halves. Chunk i lies in half i
        modulo 2. While one half is multiplied, the next chunk's limbs are made in the other half. The loop begins with
        chunk -1, which only fills the first half. The producer warp goes on loading weights meanwhile.
        """
        here, x_next = state
        half = self.config.mainloop.k_blocks // 2
        size = cutlass.select_(place.fits != 0, work_tile.end - work_tile.begin, Int32(half))
        count = (work_tile.end - work_tile.begin + half - 1) // half
        count = cutlass.select_(place.fits != 0, Int32(1), count)
        for chunk in cutlass.range(cutlass.select_(place.fits != 0, Int32(0), Int32(-1)), count, 1, unroll=1):
            begin = work_tile.begin + chunk * size
            following, end = begin + size, cutlass.min(begin + size, work_tile.end)
            following_end, buffer = cutlass.min(following + half, work_tile.end), ((chunk + 1) & 1) * half
            if following < work_tile.end:
                self.limbs.bring(place, buffer, following, following_end)
            if chunk >= 0:
                start = cutlass.select_(place.fits != 0, work_tile.begin, begin - (chunk & 1) * half)
                part = replace(work_tile, begin=begin, end=end)
                here = self.multiply_chunk(acc, memory, part, start, place, here, releases, tile_m)
            if following < work_tile.end:
                there = at(memory, buffer, tile_m)
                self.limbs.make(place, there, following, following_end, x_next.phase)
                x_next = replace(x_next, phase=x_next.phase ^ 1)
            if place.fits == 0:
                self.limbs.meet()
        return here, x_next

    @cute.jit
    def multiply_chunk(self, acc, memory, work_tile, start, place, here, releases, tile_m: int):
        """Decodes and multiplies each k block of a chunk, and waits for its MMAs. Returns the pipeline's state after
        the chunk.

        start: the limbs of k block i lie at place i - ``start`` of the room, in k blocks.
        """
        x_place = self.reader.x_scale_place(work_tile)
        for k_block in cutlass.range(work_tile.begin + place.k_rank, work_tile.end, self.config.k_warpgroups, unroll=1):
            memory.pipeline.consumer_wait(here)
            self.multiply_k_block(acc, at(memory, k_block - start, tile_m), here.stage, place, x_place, tile_m)
            cute.arch.sync_warp()
            self.stages.release(memory, here, releases)
            here = self.stages.next_state(memory, here)
        return here

    def multiply_k_block(self, acc, memory, stage, place, x_place, tile_m: int):
        """Decodes a k block, multiplies it by its resident limbs, and waits for its MMAs."""
        words, scales, x_scales = self.reader.load(memory, stage, place, x_place, tile_m)
        x = self.reader.descriptor(memory, stage)
        zeros = self.reader.load_zeros(memory, stage, place, x_place, tile_m)
        shifts = self.reader.load_shifts(memory, stage, place, x_place, tile_m)
        self.products.multiply_words(acc, words, scales, x_scales, x, place.masks, tile_m, zeros, shifts)

    def finish(self, acc, shape, memory, work_tile, place, channel, last, releases) -> None:
        """Adds up the columns of each row, and applies scales that hold for all of K, if there are any."""
        self.products.finish(acc)
        if channel:
            self.channel.scale(acc, [acc[i] for i in range(self.config.thread_acc)], channel)
