"""The kernels that convert whole caches: numbers to rows, and rows to numbers.

Several lanes of a warp form a *team*, which converts several rows. Neighbouring teams take neighbouring rows, so a CTA
reads one run of bytes at a time. A team starts loading all its rows before it converts the first.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from cute_kernels.device import ptx
from cute_kernels.device.rows import Elements
from cute_kernels.device.write_row import divide_by, encode_row, load_given, store_row
from cute_kernels.kv_cache.config import BULK_THREADS, BulkConfig
from cute_kernels.kv_cache.operands import Transforms
from cute_kernels.kv_cache.row_transform import RowTransformer
from cute_kernels.kv_cache.rows import make_row

ROWS_IN_FLIGHT = 4  # rows that a team loads before it works on the first


@dataclass(frozen=True)
class RowBlocks:
    """Rows in blocks; run-time values. Blocks begin ``stride`` bytes apart, and each holds ``inner`` dense rows. A
    tensor without gaps is one block.

    divisor: the result of `divisor_of` for ``inner``.
    """

    base: Int64
    row_bytes: int
    inner: Int32
    stride: Int64
    divisor: Int64

    def address(self, row):
        block = divide_by(Int64(row), self.divisor)
        within = row - block.to(Int32) * self.inner
        return self.base + block * self.stride + Int64(within) * self.row_bytes


class BulkKernel:
    """One compiled variant of the bulk kernels, as :class:`BulkConfig` describes it."""

    def __init__(self, config: BulkConfig):
        self.config = config
        self.elements = Elements(config.dtype, config.head_dim, config.lanes)
        self.cache_row: Any = make_row(config.kv_format, config.head_dim, config.lanes)
        self.transformer = RowTransformer(config.transform, (config.head_dim, config.head_dim), config.lanes, 1)
        self.row_bytes = config.format.row_bytes(config.head_dim)
        quantize = config.direction == "quantize"
        self.code_words = (self.elements.piece if quantize else self.cache_row.codes).num_words
        self.row_words = self.code_words + (0 if quantize else int(self.cache_row.has_header))

    def launch(self, given, stream):
        """Launches over blocks of rows; ``given`` has the arguments of
        :func:`cute_kernels.kv_cache.arguments.bulk_arguments`."""
        of_numbers = given.number_rows, given.number_stride, given.number_divisor
        numbers = RowBlocks(ptx.address(given.numbers), self.elements.row_bytes, *of_numbers)
        rows = RowBlocks(given.rows, self.row_bytes, given.cache_rows, given.cache_stride, given.cache_divisor)
        transforms = None
        if self.config.transform is not None:
            nothing = Int64(0)
            transforms = Transforms(given.center, given.factor, nothing, nothing, nothing, Int32(0), Int32(0))
        self.kernel(numbers, rows, given.scale, given.num_rows, given.num_heads, given.head_divisor, transforms).launch(
            grid=(cute.ceil_div(given.num_rows, self.config.teams * ROWS_IN_FLIGHT), 1, 1),
            block=(BULK_THREADS, 1, 1),
            preferred_smem_carveout=0,  # all of it for L1
            stream=stream,
        )

    @cute.kernel
    def kernel(self, numbers, rows, scale: Int64, num_rows: Int32, num_heads: Int32, head_divisor: Int64, transforms):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        team, lane = thread // config.lanes, thread % config.lanes
        first = block * (config.teams * ROWS_IN_FLIGHT) + team
        raw = cute.make_rmem_tensor(ROWS_IN_FLIGHT * self.row_words, Uint32)
        source = numbers if const_expr(config.direction == "quantize") else rows
        for u in cutlass.range_constexpr(ROWS_IN_FLIGHT):
            row = first + u * config.teams
            if row < num_rows:
                self.fetch(raw, u, source, row, lane)
        values = cute.make_rmem_tensor(self.elements.count, Float32)
        constants = cute.make_rmem_tensor(max(self.transformer.num_constants, 1), Float32)
        count = cute.ceil_div(num_rows - block * (config.teams * ROWS_IN_FLIGHT), config.teams)
        for u in cutlass.range(cutlass.min(count, ROWS_IN_FLIGHT), unroll=1):
            row = first + u * config.teams
            head = row - divide_by(Int64(row), head_divisor).to(Int32) * num_heads
            if const_expr(config.direction == "quantize"):
                if const_expr(config.transform is not None):
                    self.transformer.ask_k(constants, transforms, head, lane)  # before the row is waited for
                for i, value in enumerate(self.elements.unpack(raw)):
                    values[i] = value
                if const_expr(config.transform is not None):
                    self.transformer.apply_constants(values, constants)
                    self.transformer.k_hadamard.apply(values, lane)
                given = load_given(self.cache_row, scale, head, lane)
                encoded = encode_row(self.cache_row, values, given)
                if row < num_rows:
                    store_row(self.cache_row, encoded, rows.address(row), lane)
            else:
                self.restore(raw, numbers, row, scale, head, row < num_rows, lane)
            for i in cutlass.range_constexpr((ROWS_IN_FLIGHT - 1) * self.row_words):
                raw[i] = raw[i + self.row_words]

    def fetch(self, raw, u: int, source, row, lane):
        """Starts loading a row into slot ``u`` of ``raw``. The row is numbers, or codes and the header word of the
        lane's group.
        """
        if self.config.direction == "quantize":
            words = self.elements.piece.load(source.address(row), lane)
        else:
            address = source.address(row)
            words = self.cache_row.codes.load(address, lane)
            if self.cache_row.has_header:
                words = [*words, self.cache_row.load_header(address, lane)]
        for i, word in enumerate(words):
            raw[u * self.row_words + i] = word

    @cute.jit
    def restore(self, raw, numbers, row, scale, head, valid, lane):
        """Dequantises the first row in ``raw``, and stores the row's numbers at row ``row`` of ``numbers``."""
        words = [raw[i] for i in range(self.code_words)]
        header = raw[self.code_words] if const_expr(self.cache_row.has_header) else None
        if valid:
            given = load_given(self.cache_row, scale, head, lane)
            values = self.cache_row.decode(words, header, given)
            self.elements.piece.store(numbers.address(row), lane, self.elements.pack(values))
