"""The value warps: each computes 64 columns of the output, O^T += V^T W^T.

16 columns of the output are the M of an MMA, 16 tokens its K, 8 heads its N. ldmatrix transposes codes: a lane's word
has two neighbouring columns of two tokens. The two columns become rows g and g + 8 of the operand, as in the 8-bit
readers of decode attention. A warp's columns lie in one tile, and the weights already contain that tile's scales.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.ring import advance
from cute_kernels.mla.config import BLOCK_TOKENS, V_HEAD_DIM
from cute_kernels.mla.few_heads.cluster_combine import ClusterCombine, cluster_sync
from cute_kernels.mla.few_heads.config import (
    CONSUMER_THREADS,
    MATRIX_BYTES,
    PARTIAL,
    ROW_BYTES,
    STAGE_BYTES,
    TILE_COLUMNS,
    WARP_COLUMNS,
    WEIGHT_BUFFERS,
    FewHeadsConfig,
)
from cute_kernels.mla.few_heads.queries import Queries
from cute_kernels.mla.few_heads.shared_memory import QUERIES_READY, RESULTS_READY, matrix_lane
from cute_kernels.mla.work import partial_values

CHUNKS = WARP_COLUMNS // 16  # MMAs of a warp's columns
STEPS = BLOCK_TOKENS // 16  # MMAs that contract a block's tokens
LOAD_CHUNKS = 2  # that a load of codes is good for
BY_COLUMNS = 0x3120  # prmt: columns within tokens to tokens within columns


class ValueLoop:
    """The value warps of one configuration; see the module's docstring."""

    def __init__(self, config: FewHeadsConfig):
        self.config = config
        self.queries = Queries(config)
        self.cluster_combine = ClusterCombine(config)

    @cute.jit
    def run(self, q, work, results, memory, warp, lane):
        """Publishes the queries, adds up P V of every block of the CTA's work tile, and writes the result. warp: 0 to
        7."""
        self.queries.publish(self.queries.load(q, work, warp, lane), memory, warp, lane)
        cute.arch.barrier_arrive(barrier_id=QUERIES_READY, number_of_threads=CONSUMER_THREADS)
        acc = cute.make_rmem_tensor(CHUNKS * self.config.head_blocks * 4, Float32)
        acc.fill(0.0)
        tile = warp * WARP_COLUMNS // TILE_COLUMNS
        stage, phase = Int32(0), Int32(0)
        buffer, turn = Int32(0), Int32(0)
        for _ in cutlass.range(work.begin, work.end, 1, unroll=1):
            cute.arch.mbarrier_wait(memory.weighed + buffer, turn)
            cute.arch.mbarrier_wait(memory.full + stage, phase)
            if ptx.load_shared(memory.raised + buffer * 16, 0) != 0:
                self.rescale(acc, memory.factors + buffer * self.config.factor_bytes, tile, lane)
            weights = memory.weights + buffer * self.config.weight_bytes
            weights = weights + tile * (self.config.head_blocks * MATRIX_BYTES)
            self.add(acc, memory.ring + stage * STAGE_BYTES + warp * WARP_COLUMNS, weights, lane)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(memory.added + buffer)
                cute.arch.mbarrier_arrive(memory.empty + stage)
            stage, phase = advance(stage, phase, self.config.stages)
            buffer, turn = advance(buffer, turn, WEIGHT_BUFFERS)
        if const_expr(self.config.cluster > 1):
            cluster_sync()
        cute.arch.barrier(barrier_id=RESULTS_READY, number_of_threads=CONSUMER_THREADS)
        factors = self.load_factors(memory.results, tile, lane)
        if const_expr(self.config.cluster > 1):
            self.send(acc, factors, memory, work.part, warp, lane)
            cluster_sync()
            self.cluster_combine.write(work, results, memory, work.part, warp, lane)
        elif (work.shape.num_parts == 1) | (work.begin < work.end):
            self.write(acc, factors, work, results, warp, lane)

    def place(self, block: int, chunk: int) -> int:
        """Returns the index of the first of a lane's four accumulators for a block of 8 heads and a chunk of 16
        columns. The first two have column 2g of the chunk, for heads 2t and 2t + 1 of the block. The last two have
        column 2g + 1."""
        return 4 * (chunk * self.config.head_blocks + block)

    def load_factors(self, place, tile, lane) -> list[Any]:
        """Loads a tile's fp32 factors for a lane's heads. The result has the factor of head 8 block + 2t + c at index
        [2 * block + c].
        """
        address = place + tile * self.config.head_bytes + lane % 4 * 8
        blocks = range(self.config.head_blocks)
        return [word.bitcast(Float32) for block in blocks for word in ptx.load_shared_vector(address, 32 * block, 2)]

    def rescale(self, acc, place, tile, lane) -> None:
        """Multiplies the accumulators by the tile's factors, which are stored at address ``place``."""
        factors = self.load_factors(place, tile, lane)
        for block in range(self.config.head_blocks):
            for chunk in range(CHUNKS):
                for i in range(4):
                    index = self.place(block, chunk) + i
                    acc[index] = acc[index] * factors[2 * block + i % 2]

    def add(self, acc, rows, weights, lane) -> None:
        """Adds P V of a block to ``acc``. rows: address of the warp's first column of token 0; weights: address of the
        weights of the warp's tile."""
        blocks = range(self.config.head_blocks)
        operands = [self.load_weights(weights, block, lane) for block in blocks]
        address = rows + matrix_lane(lane)
        for step in range(STEPS):
            for load in range(CHUNKS // LOAD_CHUNKS):
                words = ptx.load_matrix_x4(address, 16 * step * ROW_BYTES + 32 * load, transpose=True)
                for half in range(LOAD_CHUNKS):
                    values = fragment(words[2 * half], words[2 * half + 1])
                    for block in blocks:
                        first = self.place(block, LOAD_CHUNKS * load + half)
                        total = [acc[first + i] for i in range(4)]
                        total = ptx.mma_m16n8k16(total, values, operands[block][step], dtype="f16")
                        for i in range(4):
                            acc[first + i] = total[i]

    def load_weights(self, weights, block: int, lane) -> list[list[Any]]:
        """Loads the B operands of a block of 8 heads, one for each step of 16 tokens."""
        found = []
        for first in range(0, STEPS, 2):
            place = block * MATRIX_BYTES + first * 16 * 16
            words = ptx.load_matrix_x4(weights + lane * 16, place, transpose=True)
            found += [words[:2], words[2:]]
        return found

    @cute.jit
    def write(self, acc, factors, work, results, warp, lane):
        """Writes the output, or a part's unnormalised values; 8 lanes write 16 neighbouring columns of a head."""
        column = warp * WARP_COLUMNS + lane // 4 * 2
        for block in cutlass.range_constexpr(self.config.head_blocks):
            for c in cutlass.range_constexpr(2):
                head = 8 * block + c + 2 * (lane % 4)
                if work.first_head + head < work.shape.num_heads:
                    query_row = work.query_row(head)
                    factor = factors[2 * block + c]
                    if work.shape.num_parts > 1:
                        place = partial_values(results, work.shape, query_row, work.part, PARTIAL) + column * 4
                        for chunk in cutlass.range_constexpr(CHUNKS):
                            pair = self.pair(acc, factor, block, chunk, c)
                            ptx.store_global(place, pair, offset=64 * chunk)
                    else:
                        place = results.out + Int64(query_row) * (V_HEAD_DIM * 2) + column * 2
                        for chunk in cutlass.range_constexpr(CHUNKS):
                            word = ptx.pack_bf16x2(*self.pair(acc, factor, block, chunk, c))
                            ptx.store_global(place, [word], offset=32 * chunk)

    def send(self, acc, factors, memory, part, warp, lane) -> None:
        """Stores the accumulators in the CTA of the cluster that adds up their columns."""
        place = self.cluster_combine.destination(memory, warp, lane, part)
        for block in range(self.config.head_blocks):
            for c in range(2):
                for chunk in range(CHUNKS):
                    pair = self.pair(acc, factors[2 * block + c], block, chunk, c)
                    self.cluster_combine.send(place, block, chunk, c, pair)

    def pair(self, acc, factor, block: int, chunk: int, c: int) -> list[Any]:
        """Returns a head's two neighbouring columns of a chunk, multiplied by the head's factor."""
        first = self.place(block, chunk) + c
        return [acc[first] * factor, acc[first + 2] * factor]


def fragment(first, last) -> list[Any]:
    """Returns an A operand of 16 columns and 16 tokens. first, last: words of two columns of two tokens each, from
    tokens 0 to 7 and from tokens 8 to 15."""
    words = []
    for word in (first, last):
        tokens = ptx.prmt(word, word, Uint32(BY_COLUMNS))
        words += [ptx.e4m3x2_low_to_f16x2(tokens), ptx.e4m3x2_high_to_f16x2(tokens)]
    return words
