"""The products of keys with queries: of codes as fp16 in registers, or of FP8 codes as they lie in shared memory.

FP8 codes are an A operand without a register or an instruction, if queries are FP8, too. A bf16 number has 8
significant bits, an E4M3 number 4 and a sign: so a query, times a power of 2, is exactly the sum of two of them, and
both products take as long as one of 16 bits. The tensor cores add products of 8 bits in some 14 bits: those of queries'
lower parts, which are the small ones, come first.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_kernels.device import ptx, wgmma, wgmma_tiles
from cute_kernels.extend.config import GROUP_TOKENS, SLAB_COLUMNS, ExtendConfig
from cute_kernels.extend.fp8 import pack_e4m3x4, start_product
from cute_kernels.extend.key_rows.codes import CHUNK_BYTES, rows_of
from cute_kernels.extend.memory import KEYS
from cute_kernels.extend.queries import TOP_EXPONENTS

KEY_STEPS = 8  # of 16 columns
STEPS_AT_ONCE = 2  # of products whose operands are handed over together
STEP_SLAB = SLAB_COLUMNS // 16  # steps of a slab
FP8_STEPS = 4  # of 32 columns


class HalfScores:
    """Of codes that become fp16 in registers."""

    top_exponent = TOP_EXPONENTS["fp16"]  # of queries

    def __init__(self, config: ExtendConfig):
        self.config, self.rows = config, rows_of(config.formats[0], config.mapped)
        self.count = config.tile_rows // 2  # accumulators of a thread

    def settle(self, block, first_valid, work) -> None:
        """Nothing: rows are loaded by those who have waited for them."""

    def load(self, memory, place, stage) -> list[Any]:
        """The warp's 16 tokens as operands; the keys are free when they are there."""
        words = self.rows.load_keys(place.keys + memory.tile(KEYS, stage))
        address = self.rows.header_start(memory, KEYS, stage, place.group)
        headers = self.rows.load_key_headers(address, place.warp, place.lane)
        operands = self.rows.key_operands(words, headers)
        if self.config.scores_first:
            ready = wgmma.fence([word for a in operands for word in a])
            operands = [ready[4 * step : 4 * step + 4] for step in range(KEY_STEPS)]
        return operands

    def start(self, operands, memory, place, stage) -> list[Any]:
        """Starts the dot products of the warp's 16 tokens, as :meth:`load` has them, with all queries."""
        b, dots = wgmma.descriptor(cute.arch.make_warp_uniform(memory.queries)), []
        slab_bytes = self.config.tile_rows * SLAB_COLUMNS * 2
        for first in range(0, KEY_STEPS, STEPS_AT_ONCE):
            ready = wgmma.fence([word for a in operands[first : first + STEPS_AT_ONCE] for word in a])
            for i in range(STEPS_AT_ONCE):
                step = first + i
                own = wgmma.advanced(b, step // STEP_SLAB * slab_bytes + step % STEP_SLAB * wgmma.STEP_BYTES)
                a = ready[4 * i : 4 * i + 4]
                if dots:
                    dots = wgmma.mma(dots, a, own, dtype="f16")
                else:
                    dots = wgmma.first_mma(self.count, a, own, dtype="f16")
        wgmma.commit()
        return dots

    def store_queries(self, values, tile, warp, lane) -> None:
        """Puts the warp's rows, w, w + 8, ..., into the operand; values: four of each, of the columns that
        ``query_columns`` of rows says."""
        step, t = self.rows.query_step(lane)
        slab, chunk = step // STEP_SLAB, step % STEP_SLAB * 2
        slab_bytes = self.config.tile_rows * SLAB_COLUMNS * 2
        place = tile + slab * slab_bytes + warp * wgmma.ROW_BYTES + 4 * t
        for pair in range(2):
            target = place + ((chunk + pair) ^ warp) * CHUNK_BYTES
            for i, own in enumerate(values):
                low, high = self.rows.query_pairs(own)[pair]
                ptx.store_shared(target, i * 8 * wgmma.ROW_BYTES, [ptx.pack_f16x2(low, high)])


class Fp8Scores:
    """Of FP8 codes where they lie: rows of 128 bytes in the 128-byte swizzle, of codes and of queries' two parts."""

    top_exponent = TOP_EXPONENTS["e4m3"]

    def __init__(self, config: ExtendConfig):
        self.config, self.rows = config, rows_of(config.formats[0], config.mapped)
        self.count = config.tile_rows // 2
        self.kinds = config.formats[0].codes, "e4m3"
        self.part_bytes = config.tile_rows * wgmma.ROW_BYTES
        self.by_tma = config.mapped or all(form.header_bytes == 0 and form.code_bits == 8 for form in config.formats)

    @cute.jit
    def settle(self, block: Int32, first_valid: Int32, work):
        """Before a block's products: rows that threads have copied are to be seen by these."""
        if const_expr(self.by_tma):
            tokens = self.config.tile_tokens
            if (block * tokens < first_valid) | (block * tokens + tokens > work.kv_stop):
                cute.arch.fence_proxy("async.shared", space="cta")
        else:
            cute.arch.fence_proxy("async.shared", space="cta")

    def load(self, memory, place, stage) -> list[Any]:
        """Nothing: products read keys where they lie."""
        return []

    def start(self, operands, memory, place, stage) -> list[Any]:
        """Starts the dot products of the warpgroup's 64 tokens with all queries; keys are read until they are there."""
        first = memory.tile(KEYS, stage) + place.group * (GROUP_TOKENS * wgmma.ROW_BYTES)
        a, b = (wgmma.descriptor(cute.arch.make_warp_uniform(start)) for start in (first, memory.queries))
        dots: list[Any] = []
        wgmma_tiles.begin()
        for part in (1, 0):
            for step in range(FP8_STEPS):
                offset = step * wgmma.STEP_BYTES
                own = wgmma.advanced(b, part * self.part_bytes + offset)
                dots = start_product(dots, self.count, wgmma.advanced(a, offset), own, self.kinds)
        wgmma.commit()
        return dots

    def store_queries(self, values, tile, warp, lane) -> None:
        """As :meth:`HalfScores.store_queries`: upper parts, behind them lower ones."""
        place = tile + warp * wgmma.ROW_BYTES + ((lane // 4) ^ warp) * CHUNK_BYTES + lane % 4 * 4
        for i, own in enumerate(values):
            upper = pack_e4m3x4(own)
            pairs = ptx.e4m3x2_low_to_f16x2(upper), ptx.e4m3x2_high_to_f16x2(upper)
            rounded = [half(pair) for pair in pairs for half in (ptx.half2_low_to_float, ptx.half2_high_to_float)]
            # What is no number does not become the greatest one.
            rest = [ptx.fma(value, Float32(0.0), value - near) for value, near in zip(own, rounded, strict=True)]
            lower = pack_e4m3x4(rest)
            for part, word in enumerate((upper, lower)):
                ptx.store_shared(place, part * self.part_bytes + i * 8 * wgmma.ROW_BYTES, [word])


def scores_of(config: ExtendConfig) -> HalfScores | Fp8Scores:
    """How a configuration's keys are multiplied."""
    return Fp8Scores(config) if config.fp8_keys else HalfScores(config)
