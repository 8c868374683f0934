"""The kernel that writes MLA tokens: RoPE, quantisation and scatter of new tokens in one launch, or quantisation in
bulk.

A warp writes a token. A lane has 16 neighbouring latent columns, so a tile that shares a scale belongs to 8 lanes (128
columns) or 4 (64). The lanes of a tile exchange their largest magnitudes by xor shuffles. A lane also has two
neighbouring RoPE columns. With interleaved RoPE, the two columns are a pair. With half-split RoPE, they belong to two
pairs, whose other columns are in lane xor 16. All loads of a token are issued before the first wait. Warps share
nothing.

448 latent columns take 28 lanes. The last four lanes have the same columns as the four before them, and write the same
bytes to the same addresses, so that lanes do not diverge.

The scale is FlashMLA's, ``2 ** ceil(log2(max(absmax / 448, 1e-4)))`` (:mod:`layouts.kv.mla`). 448 is 1.75 * 2**8. So
the scale's exponent is absmax's exponent minus 8, plus 1 if the mantissa exceeds 1.75. The smallest scale, 2**-13, is
the power of two above 1e-4. So a scale needs no division and no logarithm.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_max, neighbours
from cute_kernels.device.rows import Elements
from cute_kernels.device.types import extents
from cute_kernels.device.write_row import divide_by
from cute_kernels.kv_cache.rotate import Rotator
from cute_kernels.mla.cache.config import LANE_COLUMNS, WIDE_POSITIONS, WriteConfig
from layouts.kv.mla import BF16_MAX, ROPE_DIM, MlaDense, MlaModel1

ABOVE_1_75 = 0x1FFFFF  # added to an fp32's bits, it carries into the exponent where the mantissa exceeds 1.75
EXPONENT_OF_448 = 8
SMALLEST_EXPONENT = 127 - 13  # biased, of the scale that is used for tiles of zeros


class WriteKernel:
    """One compiled variant; :class:`WriteConfig` says which."""

    def __init__(self, config: WriteConfig):
        self.config = config
        token = config.token
        self.latent = Elements(config.dtype, config.latent_dim, config.latent_lanes)
        self.rope = Elements(config.dtype, ROPE_DIM, WARP_THREADS)
        self.rotator = Rotator(config.rope, ROPE_DIM, ROPE_DIM, WARP_THREADS)
        self.is_dense = isinstance(token, MlaDense)
        self.limit = token.limit if isinstance(token, MlaDense) else BF16_MAX
        self.rope_offset = config.field("rope").offset
        stored = token.dtype if isinstance(token, MlaDense) else "bf16"
        self.stored_latent = Elements(stored, config.latent_dim, config.latent_lanes)
        self.stored_rope = Elements(stored, ROPE_DIM, WARP_THREADS)

    def launch(self, given, stream):
        """Launches a CTA for each block of tokens; ``given`` has the arguments of :data:`.arguments.WRITE`."""
        config = self.config
        num_tokens = extents(given.latent)[0]
        source = Source(
            latent=ptx.address(given.latent),
            k_rope=ptx.address(given.k_rope),
            latent_stride=_byte_stride(given.latent),
            rope_stride=_byte_stride(given.k_rope),
            num_tokens=num_tokens,
        )
        place = Place(**{own.name: getattr(given, own.name) for own in dataclasses.fields(Place)})
        angle = Angle(given.position_ids, given.phase_steps, given.rope_factor, given.mode)
        self.kernel(source, place, angle).launch(
            grid=(cute.ceil_div(num_tokens, config.tokens_per_cta), 1, 1),
            block=(config.num_threads, 1, 1),
            preferred_smem_carveout=0,  # all of it for L1
            stream=stream,
        )

    @cute.kernel
    def kernel(self, source: Source, place: Place, angle: Angle):
        config = self.config
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        token = block * config.tokens_per_cta + warp
        if token < source.num_tokens:
            own = cutlass.select_(lane < config.latent_lanes, lane, lane - (WARP_THREADS - config.latent_lanes))
            columns = self.latent.piece.load(source.latent + Int64(token) * source.latent_stride, own)
            pair = self.rope.piece.load(source.k_rope + Int64(token) * source.rope_stride, lane)
            slot = Int64(token)
            if const_expr(config.placed):
                slot = _load_wide(place.slots, token)
            turned = self.rope.unpack(pair)
            if const_expr(config.rope != "none"):
                turned = self.rotate(turned, angle, token, lane)
            if (slot >= 0) & (slot < place.num_slots):
                page = divide_by(slot, place.page_divisor)
                row = slot - page * Int64(place.page_size)
                base = place.cache + page * place.page_stride
                self.store_token(self.latent.unpack(columns), turned, base, row, place, own, lane)

    def rotate(self, values, angle: Angle, token, lane) -> list[Any]:
        """Rotates the lane's two RoPE columns to the token's position."""
        # Of 64-bit positions the lower half: they fit it.
        width = cutlass.select_((angle.mode & WIDE_POSITIONS) != 0, Int64(8), Int64(4))
        position = ptx.load_global_words(angle.position_ids + Int64(token) * width, 0, 1)[0].to(Int32)
        steps = self.rotator.load_steps(angle.phase_steps, lane)
        cos, sin = (cute.make_rmem_tensor(self.rotator.num_angles, Float32) for _ in range(2))
        self.rotator.make_angles(cos, sin, steps, position, angle.factor, lane)
        turned = cute.make_rmem_tensor(self.rope.count, Float32)
        for i, value in enumerate(values):
            turned[i] = value
        self.rotator.rotate(turned, cos, sin, lane)
        return [turned[i] for i in range(self.rope.count)]

    # -- storing ------------------------------------------------------------------------------------------------------

    def store_token(self, columns, turned, base, row, place: Place, own, lane) -> None:
        """Quantises a lane's columns of a token and writes them to row ``row`` of the page at ``base``."""
        split = self.config.form.split_pages
        stride = Int64(MlaModel1.DATA_BYTES) if split else place.token_stride
        address = base + row * stride
        scales = base + Int64(place.page_size) * MlaModel1.DATA_BYTES + row * 8 if split else address
        words = self.stored_rope.pack([self.repair(value) for value in turned])
        numbers.store_global_words(address + Int64(lane * 4), self.rope_offset, words)
        columns = [self.repair(value) for value in columns]
        if self.is_dense:
            self.store_runs(address, own, self.stored_latent.pack(columns))
            return
        exponent = self.scale_exponent(columns)
        self.store_runs(address, own, self.encode(columns, exponent))
        self.store_scale(scales, exponent, lane)

    def store_runs(self, address, own, words) -> None:
        """Stores the latent bytes of the lane, in accesses of ``unit`` bytes."""
        count = self.config.unit // 4
        start = address + Int64(own * (4 * len(words)))
        for first in range(0, len(words), count):
            numbers.store_global_words(start, 4 * first, words[first : first + count])

    def store_scale(self, scales, exponent, lane) -> None:
        """Stores the scale of the lane's tile. All lanes of a tile store the same scale at the same address."""
        tile = lane // self.config.tile_lanes
        if self.config.form.split_pages:
            # The last four lanes' byte is the pad.
            byte = cutlass.select_(lane < self.config.latent_lanes, exponent, Int32(0))
            numbers.store_global_part(scales + Int64(tile), 0, Uint32(byte), 1)
        else:
            word = Uint32(exponent << 23)
            numbers.store_global_words(scales + Int64(tile * 4), self.config.field("scales").offset, [word])

    # -- numbers ------------------------------------------------------------------------------------------------------

    def repair(self, value: Float32) -> Float32:
        """Replaces NaN by 0, and clamps all other numbers to the format's limits."""
        number = cutlass.select_(value == value, value, Float32(0.0))
        return ptx.fmax(numbers.fmin(number, Float32(self.limit)), Float32(-self.limit))

    def scale_exponent(self, columns) -> Int32:
        """Returns the biased exponent of the scale of the lane's tile, from 114 to 247."""
        largest = functools.reduce(ptx.fmax, [ptx.absolute(value) for value in columns])
        largest = lane_max(largest, neighbours(self.config.tile_lanes))
        above = ((numbers.bits(largest) + Uint32(ABOVE_1_75)) >> 23).to(Int32)
        return Int32(cutlass.max(above - EXPONENT_OF_448, Int32(SMALLEST_EXPONENT)))

    def encode(self, columns, exponent) -> list[Uint32]:
        """Returns the E4M3 codes of the lane's columns, four to a word."""
        inverse = numbers.from_bits(Uint32((254 - exponent) << 23))
        ratios = [numbers.multiply(value, inverse) for value in columns]
        pairs = [numbers.pack_e4m3x2(ratios[i], ratios[i + 1]) for i in range(0, LANE_COLUMNS, 2)]
        return [ptx.prmt(pairs[i], pairs[i + 1], Uint32(0x5410)) for i in range(0, len(pairs), 2)]


def _byte_stride(tensor) -> Any:
    """Returns the bytes from one token to the next."""
    return Int64(tensor.stride[0]) * (tensor.element_type.width // 8)


def _load_wide(base: Int64, index) -> Int64:
    """Loads the int64 at an index of an array."""
    low, high = ptx.load_global_words(base + Int64(index) * 8, 0, 2)
    return (Int64(high.to(Int32)) << 32) | Int64(low)


@dataclass(frozen=True)
class Source:
    """The addresses of the tensors that are read, and the bytes from token to token."""

    latent: Int64
    k_rope: Int64
    latent_stride: Int64
    rope_stride: Int64
    num_tokens: Int32


@dataclass(frozen=True)
class Place:
    """The cache, and where tokens are written; see :mod:`.arguments`."""

    cache: Int64
    slots: Int64
    num_slots: Int64
    page_size: Int32
    page_divisor: Int64
    page_stride: Int64
    token_stride: Int64


@dataclass(frozen=True)
class Angle:
    """The run-time values from which RoPE's angles are computed; see :mod:`.arguments`."""

    position_ids: Int64
    phase_steps: Int64
    factor: Float32
    mode: Int32
