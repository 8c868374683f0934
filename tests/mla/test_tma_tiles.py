"""Tiles by a tensor map: which boxes are asked for and where they lie, and rows where a block is not whole."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.device import wgmma_tiles
from cute_kernels.mla.config import BLOCK_TOKENS, MlaConfig
from cute_kernels.mla.layout import SLAB_COLUMNS
from cute_kernels.mla.loads import tma_tiles
from cute_kernels.mla.policies import SplitTiles, TmaTiles
from simulator import LANES, Int32, Meanings, PlainThread, Warp
from tests.mla.test_gather import pages_of, read_words
from tests.mla.test_tiles import place_of

PAGE_SIZE, NUM_PAGES = 192, 3
POISON = 0x7FFF


def config_of(cluster: int, head_dim: int = 576) -> MlaConfig:
    return MlaConfig("paged", "mla_bf16", head_dim, SplitTiles(TmaTiles(cluster > 1, cluster - 1)))


def tokens_of(head_dim: int) -> np.ndarray:
    """uint16 [pages, tokens, columns]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2**15, (NUM_PAGES, PAGE_SIZE, head_dim), generator=generator).numpy().astype(np.uint16)


class Origin:
    """A partitioned tensor map: its boxes by coordinates."""

    def __init__(self, box: tuple[int, int]):
        self.box = box

    def __getitem__(self, where: tuple) -> tuple:
        return self.box, where[1:]


class Maps(PlainThread):
    """A tensor map and the shared memory of a cluster's CTAs: copies are done when they are asked for."""

    def __init__(self, config: MlaConfig, tokens: np.ndarray):
        super().__init__()
        self.config, self.tokens, self.rank = config, tokens, 0
        self.tiles = np.full((config.cluster, 2, BLOCK_TOKENS, config.head_dim), POISON, np.uint16)
        self.arrived = np.zeros((config.cluster, 4), int)  # bytes, on the barriers of parts
        self.expected = np.zeros((config.cluster, 4), int)

    def meanings(self) -> Meanings:
        known = super().meanings()
        arch = {
            "elect_one": nullcontext,
            "mbarrier_arrive_and_expect_tx": self.expect,
            "block_idx_in_cluster": lambda: self.rank,
        }
        cute = {
            "local_tile": lambda view, box, _: box,
            "group_modes": lambda x, first, end: x,
            "make_layout": lambda size: size,
            "copy": self.copy,
        }
        modules = {
            tma_tiles.cpasync: {"tma_partition": self.partition},
            wgmma_tiles: {"tile": lambda place, rows, columns, dtype: (place, rows, columns)},
        }
        scalars = {**known.scalars, "Int16": int}
        return replace(known, arch=arch, cute=cute, scalars=scalars, modules=modules)

    def expect(self, barrier: int, count: int) -> None:
        self.expected[self.rank, barrier] += count

    def partition(self, copy, coordinate, layout, place, box) -> tuple[Any, Any]:
        assert place[1:] == box
        return place, Origin(box)

    def copy(self, atom, origin, place, *, tma_bar_ptr: int, mcast_mask: int | None = None) -> None:
        (rows, columns), (row, slab, page) = origin
        numbers = self.tokens[page, row * rows : (row + 1) * rows, slab * columns : (slab + 1) * columns]
        stage, offset = divmod(place[0], self.config.tile_bytes)
        slab_of_tile, offset = divmod(offset, BLOCK_TOKENS * 128)
        assert offset % 1024 == 0  # what the swizzle repeats after
        first = offset // 128
        targets = [self.rank] if mcast_mask is None else [cta for cta in range(2) if mcast_mask >> cta & 1]
        for cta in targets:
            columns_of_tile = slice(slab_of_tile * SLAB_COLUMNS, (slab_of_tile + 1) * SLAB_COLUMNS)
            assert (self.tiles[cta, stage, first : first + rows, columns_of_tile] == POISON).all(), "written twice"
            self.tiles[cta, stage, first : first + rows, columns_of_tile] = numbers
            self.arrived[cta, tma_bar_ptr] += 2 * numbers.size


@pytest.mark.parametrize("head_dim", [576, 512])
@pytest.mark.parametrize("cluster", [1, 2])
def test_tma_tiles_of_all_ctas_are_the_tile_of_each(run_on, cluster, head_dim):
    config, tokens = config_of(cluster, head_dim), tokens_of(head_dim)
    maps = Maps(config, tokens)
    run_on(maps)
    memory = SimpleNamespace(full=0, tile_pointer=0)
    page_size = SimpleNamespace(divide=lambda number: divmod(number, PAGE_SIZE))
    source = SimpleNamespace(pages=SimpleNamespace(page_size=page_size), view=None, copy=None)
    stage, page, block = 1, 2, 5
    for maps.rank in range(cluster):
        for part in range(2):
            tma_tiles.TmaTileLoad(config).ask(source, memory, stage, page, block, part)
    first = block * BLOCK_TOKENS % PAGE_SIZE
    for cta in range(cluster):
        assert np.array_equal(maps.tiles[cta, stage], tokens[page, first : first + BLOCK_TOKENS])
        assert (maps.tiles[cta, 0] == POISON).all()
    assert np.array_equal(maps.arrived, maps.expected) and (maps.arrived[:, 2:] > 0).all()
    assert (maps.arrived.sum(1) == config.tile_bytes).all()


@pytest.mark.parametrize("head_dim", [576, 512])
@pytest.mark.parametrize("count", [1, 7, 8, 37, 63])
def test_rows_of_a_block_that_is_not_whole(run_on, count, head_dim):
    """The others are zeros, and not read."""
    config, tokens = config_of(1, head_dim), tokens_of(head_dim)
    page, block = 1, 2
    memory = tokens.reshape(-1).view(np.uint8).copy()
    machine = Warp(np.full(2 * config.tile_bytes, 0xFF, np.uint8), memory)
    run_on(machine)
    pages = pages_of(0, PAGE_SIZE * head_dim * 2, head_dim * 2, PAGE_SIZE)
    source: Any = SimpleNamespace(pages=pages, num_pages=NUM_PAGES)
    place = SimpleNamespace(tiles=Int32(0))
    for part in range(2):
        tma_tiles.TmaTileLoad(config).copy_rows(
            source, place, Int32(1), Int32(page), Int32(block), count, Int32(LANES), part
        )
    wanted = np.zeros((BLOCK_TOKENS, head_dim), np.uint16)
    wanted[:count] = tokens[page, block * BLOCK_TOKENS :][:count]
    assert np.array_equal(read_words(machine.shared_memory[config.tile_bytes :]), wanted)
    assert (machine.shared_memory[: config.tile_bytes] == 0xFF).all()
    end = ((page * PAGE_SIZE) + block * BLOCK_TOKENS + count) * head_dim * 2
    assert machine.reads and all(address + size <= end for address, size in machine.reads)


def test_a_box_lies_where_products_read_it():
    """A row of a slab is 128 bytes, so 32 rows further on is half of the slab's bytes, whole atoms of the swizzle."""
    assert place_of(32, 0) == 32 * 128 and 32 * 128 % 1024 == 0
