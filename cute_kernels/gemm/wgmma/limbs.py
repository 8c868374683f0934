"""The mainloops for few rows in which x is two 8-bit limbs. With int8 limbs, the int32 accumulators are exact.

A format's `ByteDecoder` turns a 4-bit code into a signed byte, 16 times the code's number. For integers this takes
three instructions for 8 codes; decoding to bf16 takes 11. Scales are not applied to weights but to the accumulators of
a group. x is 16-bit fixed point, with a power of two for each row and 128 inputs. An element of x is two signed limbs,
256 times the high limb plus the low limb (`.limb_rows`). The columns of the B operand are the high limbs of all tokens,
then their low limbs. So a code is decoded once and multiplied by both limbs. Int8 MMAs here have twice as many columns
as bf16 MMAs would have, and run at twice the rate. 256 times the sum over high limbs plus the sum over low limbs is the
exact sum of a group's products.

W and x may have any order of inputs, as long as both have the same order. In the blob of `layouts.weights.hopper`, the
four bytes of a thread in a k16 step have the inputs 2t, 2t + 8, 2t + 1, 2t + 9. The lower half of a byte is a code of
row g, the upper half a code of row g + 8. So the limbs of x interleave the first eight and the second eight of 16
inputs.

8 FP4 codes become E4M3 numbers in seven instructions, or signed bytes in eleven. FP8 codes are E4M3 numbers already. So
for these two formats the limbs of x are E4M3 too: see `E4m3Products`.

DeepGEMM and QServe's W4A8 also scale a group's products between two sets of accumulators. Here activations keep 16
bits, and MMAs take no more time than in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.device import numbers, ptx, wgmma
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.formats.weights.decoder import ByteDecoder
from cute_kernels.gemm.device_operands import scale_number
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, limb_groups, row_columns, stored_group
from cute_kernels.gemm.wgmma.reading import MainloopParts, Shift, StageReader, nothing
from layouts.weights.hopper import STEP_K, TILE_BYTES, TILE_N

MMA_K = 2 * STEP_K
CHUNK_WORDS = 4  # of a thread: 16 bytes
LIMB_BASE = 256
CODE_UNIT, SYMMETRIC_ZERO = 16, 8  # bytes of integers are 16 times codes less 8
# Rows of x up to which a thread has registers for the products of two tiles at a time: 40 each, for two limbs a row.
# With the 40 accumulators of both tiles they are half of its registers, by arithmetic; more rows were not measured so.
TOGETHER_TILE_M = 40

Zeros = tuple[list[Any], list[Any]]


@dataclass(frozen=True)
class Part:
    """The codes and limbs of one k block of a tile, which one sequence of MMAs multiplies.

    Attributes:
        tile: the tile whose accumulators the products are added to.
        words: codes of a thread, [chunk][word].
        scales: scales of the thread's two rows, group by group.
        x_scales: scales of the thread's tokens.
        x: the shared memory descriptor of the limbs.
        zeros: (zero points of the thread's two rows, sums of inputs of the thread's tokens), see
            `LimbReader.load_zeros`; None without zero points.
        shifts: (shifts of the thread's two rows, sums of inputs of the thread's tokens), see `LimbReader.load_shifts`;
            None without floating zero points.
    """

    tile: int
    words: Any
    scales: Any
    x_scales: Any
    x: Any
    zeros: Zeros | None = None
    shifts: Zeros | None = None


@dataclass(frozen=True)
class Later:
    """Values that are loaded only when they are used, so that they occupy no registers before."""

    load: Callable[[int], Any]

    def __getitem__(self, some: slice) -> list[Any]:
        return [self.load(i) for i in range(some.start, some.stop)]


class LimbProducts:
    """Multiplies the codes of a k block by limbs of x. The limbs may lie in a stage or be resident.

    Args:
        tiles: number of tiles of 64 output features that are multiplied by the same limbs.
        tile_m: number of rows of x that have accumulators. A thread has accumulators [tile][tile_m / 2].
        word_steps: number of k16 steps in a chunk, which is 16 bytes of a thread's codes.
        bytes_of: the function that decodes codes to bytes.
        groups: number of scale groups of a k block. A lane has accumulators and scales for each of them.
    """

    def __init__(self, tiles: int, tile_m: int, word_steps: int, bytes_of: ByteDecoder, groups: int = 1):
        self.tiles, self.tile_m, self.word_steps, self.groups = tiles, tile_m, word_steps, groups
        self.bytes_of = bytes_of

    def multiply_words(
        self,
        acc,
        words,
        scales,
        x_scales,
        x,
        masks,
        tile_m: int,
        zeros: list[Zeros] | None = None,
        shifts: list[Zeros] | None = None,
    ) -> None:
        """Adds the products of a k block of all tiles to ``acc``.

        Args:
            words: [tile][chunk][word].
            scales: [tile][row].
            zeros, shifts: [tile], as in `Part`.

        All tiles share x_scales [token] and the descriptor x.
        """
        none = [None] * self.tiles
        of_tiles = zip(words, scales, zeros or none, shifts or none, strict=True)
        parts = [Part(i, word, scale, x_scales, x, *more) for i, (word, scale, *more) in enumerate(of_tiles)]
        self.multiply_parts(acc, parts, masks, tile_m)

    def multiply_parts(self, acc, parts: Iterable[Part], masks, tile_m: int) -> None:
        """Adds the products of several parts to ``acc``. While the accumulators of a part are scaled, the MMAs of the
        next part run, if a thread has registers for both parts (`TOGETHER_TILE_M`)."""
        parts = iter(parts)
        first = next(parts)
        started = self.start(self.operands(first.words, masks), first.x, tile_m)
        for part, after in pairwise(chain((first,), parts, (None,))):
            assert part is not None
            following = self.operands(after.words, masks) if after else []
            ahead = after is not None and tile_m <= TOGETHER_TILE_M
            if after and ahead:
                following = self.start(following, after.x, tile_m)
            dots = self.wait(started, 1 if ahead else 0)
            self.add(acc, part.tile, self.join(dots, part.zeros), part.scales, part.x_scales)
            if part.shifts is not None:
                self.add_shifts(acc, part.tile, *part.shifts, part.x_scales)
            if after:
                started = following if ahead else self.start(following, after.x, tile_m)

    def operands(self, words, masks) -> list[Any]:
        """Returns the A operands of a part: two registers for each k16 step."""
        count = CHUNK_WORDS // self.word_steps  # words of a step
        return [
            register
            for chunk in words
            for first in range(0, CHUNK_WORDS, count)
            for register in self.bytes_of.fragment(chunk[first : first + count], masks)
        ]

    def start(self, operands, x, tile_m: int) -> list[Any]:
        """Issues the MMAs of a part. Returns their accumulators, [group][limb][tile_m / 2], high limbs
        first."""
        ready = wgmma.fence(operands)
        found: list[Any] = []
        dots: list[Any] = []
        for step in range(len(ready) // 4):
            b = wgmma.advanced(x, step * wgmma.STEP_BYTES)
            dots = self.mma(dots, tile_m, ready[4 * step : 4 * step + 4], b)
            if (step + 1) % (LIMB_GROUP // MMA_K // self.groups) == 0:
                found, dots = found + dots, []
        wgmma.commit()
        return found

    def mma(self, dots, tile_m: int, a, b) -> list[Any]:
        """Issues the MMA of 32 inputs by both limbs of ``tile_m`` rows."""
        return wgmma.multiply_bytes(dots, tile_m, a, b)

    def wait(self, dots, pending: int) -> list[Any]:
        return wgmma.wait_for_dots(dots, pending)

    def finish(self, acc) -> None:
        """Does nothing: a row of x has one column of accumulators, so there is nothing to join."""

    def join(self, dots, zeros: Any = None) -> list[Any]:
        """Joins the accumulators of both limbs and corrects them for zero points. Returns the products of a tile's
        groups: computed exactly in int32, then converted to fp32.
        """
        # A thread's i-th accumulator is of its row i // 2 % 2 of W (g or g + 8) and its row i // 4 * 2 + i % 2 of x.
        count = len(dots) // (2 * self.groups)
        firsts = [2 * count * group for group in range(self.groups)]
        products = [dots[first + i] * LIMB_BASE + dots[first + count + i] for first in firsts for i in range(count)]
        if zeros is not None:
            points, sums = zeros
            products = [one + points[i // 2 % 2] * sums[i // 4 * 2 + i % 2] for i, one in enumerate(products)]
        return [numbers.to_float(one) for one in products]

    def add(self, acc, tile: int, products, scales, x_scales) -> None:
        """Scales the products of a tile's groups and adds them to its accumulators."""
        first = tile * (self.tile_m // 2)
        if self.groups > 1:
            for i, value in enumerate(self.sum_groups(products, scales)):
                acc[first + i] = ptx.fma(value, x_scales[i // 4 * 2 + i % 2], acc[first + i])
            return
        for i, product in enumerate(products):
            value = product * x_scales[i // 4 * 2 + i % 2]
            acc[first + i] = ptx.fma(value, scales[i // 2 % 2], acc[first + i])

    def add_shifts(self, acc, tile: int, shifts, sums, x_scales) -> None:
        """Adds shifts to a tile's accumulators. The summand is the shift of a row of W times the sum of a token's
        inputs.
        """
        inputs = [numbers.to_float(one * CODE_UNIT) * scale for one, scale in zip(sums, x_scales, strict=True)]
        for i in range(2 * len(inputs)):
            at = tile * (self.tile_m // 2) + i
            acc[at] = ptx.fma(inputs[i // 4 * 2 + i % 2], shifts[i // 2 % 2], acc[at])

    def sum_groups(self, products, scales) -> list[Any]:
        """Returns the products of a part, added up over its groups. Each group's products are multiplied by its
        scales."""
        groups = len(scales) // 2
        count, sums = len(products) // groups, []
        for i in range(count):
            total = products[i] * scales[i // 2 % 2]
            for group in range(1, groups):
                total = ptx.fma(products[group * count + i], scales[2 * group + i // 2 % 2], total)
            sums.append(total)
        return sums


class E4m3Products(LimbProducts):
    """Multiplies E4M3 codes by E4M3 limbs.

    Both limbs of x have the same unit, so their products are added to the same fp32 accumulators; int8 limbs need twice
    as many accumulators. Tensor cores add with some 14 bits, counted from the largest addend. So the products of low
    limbs are added first. If they came after those of high limbs, the sum would be rounded a second time.

    A k block is multiplied in two halves. So accumulators take fewer registers, and the MMAs of the first half run
    while the second half is decoded. Each MMA has its own accumulators, however many inputs share a scale.
    """

    def multiply_parts(self, acc, parts: Iterable[Part], masks, tile_m: int) -> None:
        chunks = LIMB_GROUP // STEP_K // self.word_steps // 2
        halves = (
            replace(
                part,
                words=part.words[chunks * i : chunks * (i + 1)],
                scales=part.scales[self.groups * i : self.groups * (i + 1)],
                x=wgmma.advanced(part.x, i * LIMB_GROUP // 2),
            )
            for part in parts
            for i in range(2)
        )
        super().multiply_parts(acc, halves, masks, tile_m)

    def mma(self, dots, tile_m: int, a, b) -> list[Any]:
        low = wgmma.advanced(b, self.tile_m * wgmma.ROW_BYTES)
        return wgmma.multiply_e4m3(wgmma.multiply_e4m3(dots, tile_m // 2, a, low), tile_m // 2, a, b)

    def wait(self, dots, pending: int) -> list[Any]:
        return wgmma.wait_for(dots, pending)

    def join(self, dots, zeros: Any = None) -> list[Any]:
        return dots


class HalfGroupProducts(E4m3Products):
    """Multiplies E4M3 codes in groups of 16 inputs by limbs. An MMA takes 32 inputs, which are two groups.

    A row of x takes two columns, four columns apart, as `.resident_rows.HalfGroupRows` stores them. The first column
    has the inputs of even groups and zeros for odd groups; the second column has the inputs of odd groups and zeros for
    even groups. So one MMA computes the sums of two groups, in accumulators of different lanes. Each lane scales its
    accumulators by its own group's scale, as with groups of 32.
    """

    def finish(self, acc) -> None:
        """Adds up each row's two columns, which are two lanes apart."""
        for i in range(self.tiles * self.tile_m // 2):
            acc[i] = acc[i] + cute.arch.shuffle_sync_bfly(acc[i], 2)


def limb_products(config: WgmmaConfig | StreamConfig, word_steps: int) -> LimbProducts:
    """Returns the `LimbProducts` of a configuration."""
    bytes_of = config.format.byte_decoder(HopperMath(config.dtype))
    products: type[LimbProducts] = HalfGroupProducts if row_columns(config.format) > 1 else E4m3Products
    products = products if config.format.bytes_in_e4m3 else LimbProducts
    return products(config.n_tiles, config.tile_m, word_steps, bytes_of, limb_groups(config))


class LimbReader:
    """Reads codes, scales and sums of inputs from stages, or from resident k blocks, for consumer warps whose x is in
    limbs.

    Args:
        x_scale_shift: a function of a work tile. It returns how many scales of x a copy brings before the tile's first
            scale, since copies begin at a multiple of 16 bytes. None: 0 for every tile.
        in_pairs: whether a thread loads both of its scales among eight rows of x in one access. A tile's first row must
            then be a multiple of eight.
    """

    def __init__(self, config: WgmmaConfig, stages: StageReader, x_scale_shift: Shift | None, *, in_pairs: bool):
        self.config, self.stages = config, stages
        self.has_shifts = config.format.sums_inputs and not config.format.has_zeros
        self.x_scale_shift, self.in_pairs = x_scale_shift or no_shift, in_pairs
        self.columns = row_columns(config.format)

    def load_codes(self, memory, stage, place) -> list[list[Any]]:
        """Loads the codes of a stage, as `StageReader.load_codes` does."""
        return self.stages.load_codes(memory.codes + stage * self.config.code_stage_bytes + place.code_offset)

    def load(self, memory, stage, place, x_place, tile_m: int) -> tuple[Any, Any, Any]:
        """Loads a thread's operands from a stage. Returns (codes [tile], scales [tile] of the thread's rows of W,
        scales of the thread's rows of x). With limbs in E4M3, codes and scales of W are `Later`, which load them when
        they are used.
        """
        tiles = range(self.config.n_tiles)
        if self.config.format.bytes_in_e4m3:
            words, scales = zip(*(self.load_later(memory, stage, place, i) for i in tiles), strict=True)
        else:
            words = self.load_codes(memory, stage, place)
            scales = [self.load_scales(memory, stage, place, i) for i in tiles]
        return words, scales, self.load_x_scales(memory, stage, x_place, tile_m)

    def load_later(self, memory, stage, place, tile: int) -> tuple[Later, Later]:
        """Returns two `Later` for a tile. The first loads a chunk of codes by the chunk's index. The second loads a
        scale by two indices: that of the group, and 0 or 1 for one of the thread's two rows.
        """
        codes = memory.codes + stage * self.config.code_stage_bytes + place.code_offset
        first = tile * self.config.k_block_tiles

        def scale(number: int) -> Any:
            group = stored_group(self.config, number // 2)
            word = self.load_scale_word(memory, stage, place, tile, group, number % 2)
            return scale_number(self.config, self.stages.decoder, word)

        return Later(lambda chunk: ptx.load_shared_vector(codes, (first + chunk) * TILE_BYTES, 4)), Later(scale)

    def descriptor(self, memory, stage):
        """Returns the matrix descriptor of a stage's limbs."""
        return wgmma.descriptor(memory.x_address + cute.arch.make_warp_uniform(stage) * self.config.x_stage_bytes)

    def load_scales(self, memory, stage, place, tile: int) -> list[Any]:
        """Loads scales of the thread's two rows of a tile, fp32, group by group."""
        if self.has_shifts:
            return self.load_halves(memory, stage, place, tile, upper=0)
        words = self.load_scale_words(memory, stage, place, tile)
        return [scale_number(self.config, self.stages.decoder, word) for word in words]

    def load_scale_words(self, memory, stage, place, tile: int) -> list[Any]:
        """Loads stored scales of the thread's two rows of a tile, group by group."""
        numbers = range(2 * self.config.k_block_groups)
        return [self.load_scale_word(memory, stage, place, tile, i // 2, i % 2) for i in numbers]

    def load_scale_word(self, memory, stage, place, tile: int, group: int, half: int) -> Any:
        """Loads a group's stored scale for one of the thread's two rows. If an MMA has two groups, some lanes load the
        first group's scale and others the second group's."""
        row = (place.row // TILE_N + tile) * (self.config.k_block_groups * TILE_N) + place.row % TILE_N
        if self.columns > 1:
            row = row + place.lane // 2 % 2 * TILE_N
        size = self.config.format.scale_bytes
        address = memory.scales + stage * self.config.scale_stage_bytes + row * size
        return ptx.load_shared_part(address, (8 * half + TILE_N * group) * size, size)

    def load_zeros(self, memory, stage, place, x_place, tile_m: int) -> list[tuple[Any, Any]] | None:
        """Loads zero points and sums of inputs. Returns a pair for each tile: 16 * (8 - zero point) of the thread's two
        rows of W, and the sums of the thread's rows of x. Returns None if weights have no zero points."""
        config = self.config
        if not config.format.has_zeros:
            return None
        sums, found = self.load_sums(memory, x_place, tile_m), []
        for tile in range(config.n_tiles):
            row = (place.row // TILE_N + tile) * TILE_N + place.row % TILE_N
            address = memory.zeros + stage * config.zero_stage_bytes + row
            points = [Int32(ptx.load_shared_part(address, 8 * half, 1)) for half in range(2)]
            found.append(([(SYMMETRIC_ZERO - point) * CODE_UNIT for point in points], sums))
        return found

    def load_sums(self, memory, x_place, tile_m: int) -> list[Any]:
        """Loads the sum of a k block's inputs, in fixed point, for each of the thread's rows of x."""
        pairs = [ptx.load_shared_vector(memory.x_sums + x_place, 4 * 8 * block, 2) for block in range(tile_m // 8)]
        return [Int32(word) for pair in pairs for word in pair]

    def load_shifts(self, memory, stage, place, x_place, tile_m: int) -> list[tuple[Any, Any]] | None:
        """Loads shifts and sums of inputs. Returns a pair for each tile: the shifts of the thread's two rows of W, and
        the sums of the thread's rows of x. Returns None if weights have no shifts."""
        if not self.has_shifts:
            return None
        sums = self.load_sums(memory, x_place, tile_m)
        return [(self.load_halves(memory, stage, place, i, upper=1), sums) for i in range(self.config.n_tiles)]

    def load_halves(self, memory, stage, place, tile: int, upper: int) -> list[Any]:
        """Loads one half of a stored word for each of the thread's two rows of a tile, as fp32. upper: 0 loads lower
        halves, which are scales; 1 loads upper halves, which are shifts."""
        row = (place.row // TILE_N + tile) * TILE_N + place.row % TILE_N
        size = self.config.format.scale_bytes
        address = memory.scales + stage * self.config.scale_stage_bytes + row * size
        places = [8 * size * half + size // 2 * upper for half in range(2)]
        return [self.stages.to_float(ptx.load_shared_part(address, each, size // 2)) for each in places]

    def x_scale_place(self, work_tile):
        """Returns the offset in bytes from a stage's scales of x to the scale of the thread's first row."""
        return (self.x_scale_shift(work_tile) + cute.arch.lane_idx() % 4 * 2) * 4

    def load_x_scales(self, memory, stage, x_place, tile_m: int) -> list[Any]:
        """Loads the scales of the thread's rows of x: two of every eight rows."""
        address = memory.x_scales + stage * self.config.x_scale_stage_bytes + x_place
        if self.in_pairs:
            pairs = [ptx.load_shared_vector(address, 4 * 8 * block, 2) for block in range(tile_m // 8)]
            return [word.bitcast(Float32) for pair in pairs for word in pair]
        return [
            ptx.load_shared(address, 4 * (8 * block + i)).bitcast(Float32)
            for block in range(tile_m // 8)
            for i in range(2)
        ]


def no_shift(work_tile):
    return Int32(0)


class StageByStage:
    """The base of mainloops that decode a k block, multiply it, and wait for its MMAs before the next k block. Rows of
    x have scales."""

    stages: StageReader
    reader: LimbReader

    @cute.jit
    def multiply(self, acc, memory, work_tile, place, channel, state, releases, tile_m: int):
        """Multiplies as `RegisterMainloop.multiply` does. Waits for all MMAs of a k block, then releases its stage,
        also the last one.
        """
        here, last = state
        x_place = self.reader.x_scale_place(work_tile)
        for _ in cutlass.range(work_tile.begin, work_tile.end, 1, unroll=1):
            memory.pipeline.consumer_wait(here)
            self.multiply_k_block(acc, memory, here.stage, place, x_place, tile_m)
            cute.arch.sync_warp()
            self.stages.release(memory, here, releases)
            last = here
            here = memory.pipeline.next(here)
        return here, last

    def multiply_k_block(self, acc, memory, stage, place, x_place, tile_m: int) -> None:
        """Adds the products of a staged or resident k block to ``acc``."""
        raise NotImplementedError


class LimbMainloop(StageByStage):
    """The mainloop that multiplies int8 limbs from pipeline stages."""

    def __init__(self, config: WgmmaConfig, parts: MainloopParts):
        self.config, self.stages = config, parts.stages
        self.reader = LimbReader(config, parts.stages, parts.x_scale_shift, in_pairs=False)
        self.products = limb_products(config, parts.stages.decoder.steps)

    def masks(self, shape, lane):
        return self.products.bytes_of.masks(nothing(shape, lane))

    def multiply_k_block(self, acc, memory, stage, place, x_place, tile_m: int):
        """Decodes a staged k block, multiplies it, and waits for its MMAs."""
        words, scales, x_scales = self.reader.load(memory, stage, place, x_place, tile_m)
        x = self.reader.descriptor(memory, stage)
        self.products.multiply_words(acc, words, scales, x_scales, x, place.masks, tile_m)

    def finish(self, acc, shape, memory, work_tile, place, channel, last, releases) -> None:
        """Does nothing: `multiply` leaves no MMA running and has applied all scales."""
