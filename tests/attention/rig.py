"""The readers of one configuration with an emulated warp, in front of a tile that holds given cache rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cute_kernels.attention.decode_config import DecodeConfig, tiles_of
from cute_kernels.attention.policies import BLOCK_QUERIES, QUERY_VECTOR_BYTES
from cute_kernels.formats.kv import KvFormat, load_code
from layouts.kv.swizzled_tile import CHUNK_BYTES, SwizzledTile
from layouts.kv.tile import BLOCK_TOKENS, WORD_BYTES, RowTile, block_token
from simulator import COLUMN, LANES, ROW, Access, Backend, Float32, Int32, Int64, Warp

SOFTMAX_SCALE = 0.11
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE_SPACE = 4096  # bytes of global memory for the given scales of an operand, which lie in front of the queries


@dataclass
class Operand:
    """What lies in the block for K or for V.

    Attributes:
        rows: cache rows [32, row].
        scale: given scale as the cache has it, of as many KV heads as the tile, or None.
    """

    form: KvFormat
    head_dim: int
    rows: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def values(self) -> np.ndarray:
        """fp64 [32, head_dim]."""
        scale = self.scale
        if scale is not None and scale.ndim:
            scale = scale[-1]  # of the tile's last head
        if self.form.in_blocks:
            return self.form.row(self.head_dim).dequantize(self.rows, torch.float64).numpy()
        return self.form.dequantize(self.rows, self.head_dim, torch.float64, scale).numpy()


@dataclass
class Rig:
    """Readers with their warp. The block is the last one of the last slice of the tile's last head: everything before
    it must be stepped over."""

    config: DecodeConfig
    key_reader: Any
    value_reader: Any
    key_state: Any
    value_state: Any
    warp: Warp
    keys: np.ndarray  # fp64 [32, head_dim]
    values: np.ndarray  # fp64 [32, v_head_dim]
    queries: np.ndarray  # fp64 [query heads of a warp, head_dim]; heads past the group repeat the last one

    @property
    def block(self) -> int:
        return self.config.mainloop.blocks_per_slice - 1

    @property
    def query_start(self) -> int:
        """Where the shared queries begin: behind the tile."""
        return sum(self.config.tile_bytes)

    @property
    def value_address(self) -> Any:
        return Int32(self.config.tile_bytes[0])

    @property
    def value_offset(self) -> int:
        return self.value_reader.block_offset(self.block)

    def token(self, j: int) -> np.ndarray:
        """Token of each lane in row half j."""
        return np.asarray(block_token(self.config.token_bits, ROW, j))

    def scores(self) -> np.ndarray:
        """Scores in powers of two [32 tokens, query heads], as the kernel takes them from the reader."""
        offset = self.key_reader.block_offset(self.block)
        result = np.full((BLOCK_TOKENS, self.config.warp_queries), np.nan)
        for j, columns in enumerate(self.key_reader.scores(self.key_state, Int32(0), offset)):
            for column, score in enumerate(columns):
                result[self.token(j), heads(column)] = score * self.key_state.score_scale
        return result

    def headers(self) -> Any:
        return self.value_reader.load_scales(self.value_state, self.value_address, self.value_offset)

    def weighted_values(self, probabilities: np.ndarray) -> np.ndarray:
        """P V [query heads, v_head_dim] for probabilities [32 tokens, query heads], added to what was there."""
        columns = range(self.config.columns)
        held = [[Float32(probabilities[self.token(j), heads(column)]) for column in columns] for j in range(4)]
        self.value_reader.accumulate(self.value_state, self.value_address, self.value_offset, held, self.headers())
        return self.outputs()

    def outputs(self) -> np.ndarray:
        result = np.full((self.config.warp_queries, self.config.v_head_dim), np.nan)
        for column, first, run in self.value_reader.outputs(self.value_state):
            for i, value in enumerate(run):
                result[heads(column), np.asarray(first) + i] = value
        return result

    def take_queries(self, q: torch.Tensor, group: int) -> None:
        """Puts queries [group, head_dim] into memory and lets the key reader take them."""
        from cute_kernels.attention.readers import common

        config, memory = self.config, self.warp.global_memory
        memory[2 * SCALE_SPACE :] = q.view(torch.uint8).numpy().reshape(-1)
        places = [
            np.minimum(BLOCK_QUERIES * block + ROW, group - 1) for block in range(config.mainloop.blocks_per_warp)
        ]
        addresses = [Int64(2 * SCALE_SPACE + place * config.head_dim * 2) for place in places]
        query = self.key_reader.fetch_query(addresses, Int64(_scale_address(config, 0)), Int32(LANES))
        self.key_reader.take_query(self.key_state, query, Float32(SOFTMAX_SCALE))
        if config.shares_queries:
            # As the kernel does; the last role's queries lie behind others'.
            first = self.query_start + (config.num_roles - 1) * config.role_query_bytes
            self.key_state.shared_query = Int32(first + LANES * QUERY_VECTOR_BYTES)
            common.store_vectors(self.key_state.shared_query, common.query_vectors(self.key_state))
            self.key_state.query = self.key_state.query_sums = None  # they are in shared memory alone
        self.queries = q.double().numpy()[np.minimum(np.arange(config.warp_queries), group - 1)]

    def accesses_of(self, operand: int) -> list[Access]:
        """What was read of the tile of K (0) or V (1)."""
        start = sum(self.config.tile_bytes[:operand])
        ends = range(start, start + self.config.tile_bytes[operand])
        return [access for access in self.warp.accesses if min(access.addresses) in ends]

    def query_accesses(self) -> list[Access]:
        """What was read and written of the shared queries."""
        return [access for access in self.warp.accesses if min(access.addresses) >= self.query_start]


def heads(column: int) -> np.ndarray:
    """Query head of each lane's column."""
    return column // 2 * BLOCK_QUERIES + 2 * COLUMN + column % 2


def make_rig(
    run_on: Callable[[Backend], None], config: DecodeConfig, operands: Sequence[Operand], group: int = 8, seed: int = 0
) -> Rig:
    """A warp in front of a tile whose last head's last block holds the operands' rows, with normal queries."""
    from cute_kernels.attention import readers

    assert group <= config.warp_queries
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 256, sum(config.tile_bytes), dtype=np.uint8)  # the rest of the tile: anything
    for tile, operand, start in zip(tiles_of(config), operands, (0, config.tile_bytes[0]), strict=True):
        _write_block(shared[start:], config, tile, operand.rows)
    shared = np.concatenate([shared, np.zeros(config.query_bytes, dtype=np.uint8)])
    emulated = Warp(shared, np.zeros(2 * SCALE_SPACE + group * config.head_dim * 2, dtype=np.uint8))
    for index, operand in enumerate(operands):
        if operand.scale is not None:
            scales = operand.scale.numpy().reshape(-1).view(np.uint8)
            emulated.global_memory[index * SCALE_SPACE :][: scales.size] = scales
    for place in (place for form in config.formats for place in form.places()):
        load_code(place)  # what is imported later would keep the compiler's scalars
    run_on(emulated)
    # Typed for the GPU's scalars, which the warp's stand for.
    made: Any = readers.make_readers(config)
    key_reader, value_reader = made
    place = (Int32(LANES), Int32(config.mainloop.num_heads - 1), Int32(config.mainloop.num_slices - 1))
    key_state = key_reader.make_state(*place)
    value_state = value_reader.make_state(*place, Int64(_scale_address(config, 1)), key_state)
    keys, values = operands[0].values, operands[1].values
    rig = Rig(config, key_reader, value_reader, key_state, value_state, emulated, keys, values, np.empty(0))
    torch.manual_seed(seed)
    rig.take_queries(torch.randn(group, config.head_dim).to(TORCH_DTYPES[config.q_dtype]), group)
    return rig


def _scale_address(config: DecodeConfig, index: int) -> int:
    """Address of the given scales of the tile's last head, as :class:`kernel.GivenScales` computes it."""
    stride = {"channel": config.head_dims[index], "head": 1}.get(config.formats[index].given_scale or "", 0)
    return index * SCALE_SPACE + 4 * stride * (config.mainloop.num_heads - 1)


def last_block(config: DecodeConfig) -> range:
    return range(config.tile_tokens - BLOCK_TOKENS, config.tile_tokens)


def _write_block(memory: np.ndarray, config: DecodeConfig, tile: RowTile | SwizzledTile, rows: torch.Tensor) -> None:
    for token, row in zip(last_block(config), rows.view(torch.uint8).numpy(), strict=True):
        if isinstance(tile, RowTile):
            first = WORD_BYTES * (tile.token_offset(token) + (config.mainloop.num_heads - 1) * tile.row_words)
            memory[first : first + row.size] = row
            continue
        start = (config.mainloop.num_heads - 1) * tile.head_bytes
        for chunk, piece in enumerate(row.reshape(-1, CHUNK_BYTES)):
            first = start + tile.chunk_address(token, chunk)
            memory[first : first + CHUNK_BYTES] = piece


# -- rows --------------------------------------------------------------------------------------------------------------


def random_operand(config: DecodeConfig, index: int, seed: int, scale_exponents: tuple[int, int] = (-6, 1)) -> Operand:
    """Rows of any codes whose scales are powers of two: times probabilities of few bits, fp16 holds them exactly."""
    form, head_dim = config.formats[index], config.head_dims[index]
    generator = torch.Generator().manual_seed(seed)
    if form.codes == "u4":
        return Operand(form, head_dim, random_int4_rows(form, head_dim, scale_exponents, generator))
    if not form.is_coded:
        rows = torch.randn(BLOCK_TOKENS, head_dim, generator=generator).to(form.cache_dtype)
        return Operand(form, head_dim, rows)
    codes = random_codes(form.codes, (BLOCK_TOKENS, head_dim), generator)
    if form.header_bytes:
        exponents = torch.randint(*scale_exponents, (BLOCK_TOKENS, form.num_groups), generator=generator)
        return Operand(form, head_dim, form.row(head_dim).pack(codes, exponents.float().exp2()))
    shapes = {"tensor": (), "channel": (config.mainloop.num_heads, head_dim), None: None}
    shape = shapes[form.given_scale]
    scale = None if shape is None else 0.5 + torch.rand(shape, generator=generator)
    return Operand(form, head_dim, codes.view(torch.uint8), scale)


def random_int4_rows(
    form: KvFormat, head_dim: int, scale_exponents: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    """Rows of any codes, scales 2**e, shifts in (-3, 3)."""
    shape = (BLOCK_TOKENS, form.num_groups)
    codes = torch.randint(0, 16, (BLOCK_TOKENS, head_dim), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(*scale_exponents, shape, generator=generator).float()
    shifts = (6 * torch.rand(shape, generator=generator) - 3).half()
    return form.row(head_dim).pack(codes, exponents.exp2().half(), shifts)


def random_codes(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Every finite code alike."""
    dtype = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    finite = every.view(torch.uint8)[every.float().isfinite() & (every.float() != -128)]
    return finite[torch.randint(0, len(finite), shape, generator=generator)].view(dtype)


def random_probabilities(config: DecodeConfig, seed: int, bits: int = 6) -> np.ndarray:
    """Multiples of 2**-bits in (0, 1]: exact in bf16 and, times a power-of-two scale, in fp16."""
    shape = (BLOCK_TOKENS, config.warp_queries)
    return np.random.default_rng(seed).integers(1, 2**bits + 1, shape) / 2**bits
