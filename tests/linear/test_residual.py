"""A tile's residual, lane by lane in NumPy: brought, added where accumulators lie, and where their sums are stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.wgmma import residual
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.epilogue import Store
from cute_kernels.gemm.wgmma.places import Corner
from cute_kernels.gemm.wgmma.results import StagedStore
from layouts import banks
from simulator import stand_in
from tests.attention import warp as machine
from tests.linear.warpgroup import WarpgroupWarp

STAGING = 1 << 12
W4 = integers(4)
CONFIGS = [
    WgmmaConfig(W4, "bf16", tile_m=8, n_tiles=2),
    WgmmaConfig(W4, "fp16", tile_m=16),
    WgmmaConfig(W4, "bf16", tile_m=48),
    WgmmaConfig(W4, "bf16", tile_m=208),
    WgmmaConfig(W4, "fp16", tile_m=128, num_stages=4, store=StagedStore(32)),
    WgmmaConfig(W4, "bf16", tile_m=96, n_tiles=2),
]


class Tile:
    """A warpgroup's tile of [tokens, 64] results, whose last rows and columns there may not be."""

    def __init__(self, config: WgmmaConfig, run_on, rows: int, columns: int):
        self.config, self.rows, self.columns = config, rows, columns
        generator = np.random.default_rng(0)
        self.values = torch.from_numpy(generator.normal(size=(rows, columns))).to(
            torch.bfloat16 if config.dtype == "bf16" else torch.float16
        )
        self.shared = np.zeros(1 << 17, np.uint8)
        self.gpu = WarpgroupWarp(self.shared, self.values.view(torch.uint8).numpy().reshape(-1).copy())
        run_on(self.gpu)
        self.chunks: Any = residual.ResidualChunks(config)
        self.acc = generator.normal(size=(4, config.tile_m // 2, 32)).astype(np.float32)

    def store(self, warp: int) -> Any:
        return stand_in(Store)(machine.Int32(STAGING), 0, machine.Int32(warp * 32 + machine.LANES), warp, machine.LANES)

    def bring(self, ordinal: int, chunk: int, token: int, row: int) -> None:
        operands, shape = SimpleNamespace(residual=0), SimpleNamespace(n=self.columns)
        corner = stand_in(Corner)(row, token, self.rows, 0)
        for warp in range(4):
            self.chunks.bring(operands, shape, self.store(warp), corner, ordinal, chunk)

    def add(self, ordinal: int, chunk: int) -> np.ndarray:
        """[tokens of the chunk, 64], as they are staged."""
        done, tile_m = self.config.chunks[chunk]
        for warp in range(4):
            acc = [machine.Float32(value) for value in self.acc[warp]]
            self.chunks.add(self.store(warp), acc, done // 2, ordinal, chunk)
        tokens, vectors = np.indices((tile_m, 8))
        start = np.asarray(self.chunks.buffer(self.store(0), ordinal, chunk)).flat[0]
        places = (start + residual.vector_offset(tokens, vectors)) // 16
        bits = self.shared.view(np.int16).reshape(-1, 8)[places].reshape(tile_m, 64)
        return torch.from_numpy(bits.copy()).view(self.values.dtype).float().numpy()

    def results(self, chunk: int) -> np.ndarray:
        """Accumulators of a chunk as [tokens, 64]: features along the rows of an MMA, two tokens side by side."""
        done, tile_m = self.config.chunks[chunk]
        found = np.empty((tile_m, 64), np.float32)
        g, t = machine.LANES // 4, machine.LANES % 4
        for warp, place in np.ndindex(4, tile_m // 2):
            block, i = divmod(place, 4)
            found[8 * block + 2 * t + i % 2, 16 * warp + g + 8 * (i // 2)] = self.acc[warp, done // 2 + place]
        return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_sums_are_rounded_once_and_lie_where_they_are_stored(config: WgmmaConfig, run_on):
    """From the fifth row and the second tile of features on; the last rows and features of the tile do not exist."""
    token, row = 4, 64
    tile = Tile(config, run_on, rows=token + config.tile_m - 3, columns=row + 56)
    for ordinal in range(config.n_tiles):
        for chunk, (done, tile_m) in enumerate(config.chunks):
            tile.bring(ordinal, chunk, token, row)
            found = tile.add(ordinal, chunk)
            there = tile.values[token + done : token + done + tile_m, row:]
            want = torch.from_numpy(tile.results(chunk)[: len(there), : there.shape[1]]) + there.float()
            np.testing.assert_array_equal(found[: len(there), : there.shape[1]], want.to(there.dtype).float().numpy())
    assert all(place + size <= tile.values.nbytes for place, size in tile.gpu.reads)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_chunks_that_are_there_at_once_have_buffers_of_their_own(config: WgmmaConfig):
    chunks: Any = residual.ResidualChunks(config)
    store = SimpleNamespace(staging=0)
    size = config.chunk_m * residual.ROW_BYTES
    numbers = [(ordinal, chunk) for ordinal in range(config.n_tiles) for chunk in range(len(config.chunks))]
    early = [chunks.buffer(store, *number) for number in numbers if chunks.is_early(*number)]
    assert len(early) == min(2, len(numbers)) == len(set(early))
    for ordinal, chunk in numbers:
        assert chunks.buffer(store, ordinal, chunk) + size <= config.staging_bytes
        if chunks.has_following(chunk):
            assert chunks.buffer(store, ordinal, chunk) == chunks.buffer(store, ordinal, chunk + 2)


def test_neither_lanes_that_add_nor_lanes_that_store_meet_in_a_bank(run_on):
    config = CONFIGS[3]
    tile = Tile(config, run_on, config.tile_m, 64)
    tile.bring(0, 0, 0, 0)
    tile.gpu.accesses.clear()
    tile.add(0, 0)
    assert {access.kind for access in tile.gpu.accesses} == {"ldmatrix", "stmatrix"}
    for access in tile.gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access
