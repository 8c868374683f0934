"""Queries as operands: fp16 for the latent columns, bf16 for the RoPE columns. Each head is scaled by a power of 2.

E4M3 codes become fp16 numbers, so queries for latent columns have to be fp16. A head's largest query is scaled into
[2**14, 2**15). Then fp16 keeps every bit of queries that are at least 2**-28 of the largest; smaller queries are
rounded to a multiple of 2**-24. The RoPE columns are bf16 in the cache. Their queries are scaled by the same power, so
that all products of a head can be added up. This scaling is exact.

An operand (B of m16n8k16) is two words of a lane for 16 columns. The words may hold any of these columns, if the
operand of the keys has the same columns in the same order. For latent columns, lane (g, t) has columns 4t to 4t + 3,
since a word of the keys has the codes of these columns. For RoPE columns, it has the usual 2t, 2t + 1, 2t + 8, 2t + 9.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device import numbers, ptx
from cute_kernels.device.cuda import WARP_THREADS
from cute_kernels.device.lanes import lane_max
from cute_kernels.mla.config import HEAD_DIM, V_HEAD_DIM
from cute_kernels.mla.few_heads.config import LATENT_STEPS, VALUE_WARPS, FewHeadsConfig

VECTOR_COLUMNS = 8  # of 16 bytes
LATENT_VECTORS = V_HEAD_DIM // VECTOR_COLUMNS // WARP_THREADS  # of a lane
ROPE_LANES = (HEAD_DIM - V_HEAD_DIM) // VECTOR_COLUMNS
EXPONENT = 14  # of the largest query
MIN_EXPONENT = -30  # smaller queries are scaled by no more: RoPE queries must stay finite

assert VALUE_WARPS == 8  # warp w has heads w, w + 8, ...: column g = w of every MMA


class Queries:
    """The queries of a CTA in shared memory: value warps write them, score warps read them."""

    def __init__(self, config: FewHeadsConfig):
        self.config = config

    def load(self, q, work, warp, lane) -> list[list[Any]]:
        """Starts loading the queries of a warp's heads. Returns [block of 8 heads][word]; zeros for heads that do not
        exist."""
        blocks = []
        for block in range(self.config.head_blocks):
            head = 8 * block + warp
            exists = cutlass.select_(work.first_head + head < work.shape.num_heads, Int32(1), Int32(0))
            rope = cutlass.select_(lane < ROPE_LANES, exists, Int32(0))
            address = q + Int64(work.query_row(head)) * (HEAD_DIM * 2) + Int64(lane) * 16
            words = []
            for i in range(LATENT_VECTORS):
                words += numbers.load_global_if(exists, address, i * WARP_THREADS * 16)
            blocks.append(words + numbers.load_global_if(rope, address, V_HEAD_DIM * 2))
        return blocks

    @cute.jit
    def publish(self, blocks, memory, warp, lane):
        """Scales the result of :meth:`load`, and stores it and the inverse scales in shared memory."""
        for block in cutlass.range_constexpr(self.config.head_blocks):
            to_fp16, from_fp16 = self.store_latent(blocks[block], memory, block, warp, lane)
            pair = ptx.pack_bf16x2(to_fp16, to_fp16)
            if lane < ROPE_LANES:
                self.store_rope(blocks[block], pair, memory, block, warp, lane)
            if lane == 0:
                ptx.store_shared(memory.query_scales + (8 * block + warp) * 4, 0, [from_fp16])

    def store_latent(self, words, memory, block: int, warp, lane):
        """Stores a head's queries for the latent columns. Returns (the power of 2 that they are multiplied by, its
        inverse)."""
        halves = (ptx.bf16x2_low_to_float, ptx.bf16x2_high_to_float)
        values = [half(word) for word in words[: 4 * LATENT_VECTORS] for half in halves]
        largest = Float32(0.0)
        for value in values:
            largest = ptx.fmax(largest, ptx.absolute(value))
        to_fp16, from_fp16 = scaling(lane_max(largest, (1, 2, 4, 8, 16)))
        packed = [ptx.pack_f16x2(values[i] * to_fp16, values[i + 1] * to_fp16) for i in range(0, len(values), 2)]
        for i in range(LATENT_VECTORS):
            step = 16 * i + lane // 2
            for half in range(2):
                place = self.place(memory, step, 4 * warp + lane % 2 * 2 + half, block)
                ptx.store_shared(place, 0, packed[4 * i + 2 * half : 4 * i + 2 * half + 2])
        return to_fp16, from_fp16

    def store_rope(self, words, factors, memory, block: int, warp, lane) -> None:
        """Stores a head's queries for the RoPE columns. Only the lanes that hold such queries store."""
        step = LATENT_STEPS + lane // 2
        for t in range(4):
            word = numbers.multiply_bf16x2(words[4 * LATENT_VECTORS + t], factors)
            place = self.place(memory, step, 4 * warp + t, block) + lane % 2 * 4
            ptx.store_shared(place, 0, [word])

    def place(self, memory, step, lane, block: int):
        """Returns the address of the two words that a lane reads for a step of 16 columns and a block of 8 heads."""
        words = self.config.vector_words
        vector, word = divmod(2 * block, words)
        index = (step * self.config.step_vectors + vector) * WARP_THREADS + lane
        return memory.queries + index * (4 * words) + word * 4

    def operands(self, address, step: int) -> list[list[Any]]:
        """Returns a step's operands, two words for each block of 8 heads. address: from :meth:`reading_place`."""
        words: list[Any] = []
        count = self.config.vector_words
        for vector in range(self.config.step_vectors):
            index = step * self.config.step_vectors + vector
            words += ptx.load_shared_vector(address, index * WARP_THREADS * 4 * count, count)
        return [words[i : i + 2] for i in range(0, len(words), 2)]

    def reading_place(self, memory, lane):
        return memory.queries + lane * (4 * self.config.vector_words)


def scaling(largest: Float32):
    """Returns (2**k, 2**-k). 2**k scales ``largest``, a head's largest query, into [2**14, 2**15). A ``largest`` below
    2**-30 is treated as 2**-30.
    """
    exponent = cutlass.max((Int32(largest.bitcast(Int32)) >> 23) - 127, Int32(MIN_EXPONENT))
    to_fp16 = Uint32((127 + EXPONENT - exponent) << 23).bitcast(Float32)
    from_fp16 = Uint32((127 - EXPONENT + exponent) << 23).bitcast(Float32)
    return to_fp16, from_fp16
