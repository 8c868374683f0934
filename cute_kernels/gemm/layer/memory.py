"""The sizes and addresses of a launch of several products, and the layout of a CTA's shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.device import numbers, ptx
from cute_kernels.device.pipeline import Pipeline, fence_init
from cute_kernels.gemm.layer import instructions
from cute_kernels.gemm.layer.config import (
    BUFFERS,
    EARLY_BYTES,
    GROUP_LIMB_BYTES,
    MOST_PRODUCTS,
    PART_BYTES,
    PRODUCT_BYTES,
    SLOTS,
    STAGE_BYTES,
    STAGE_CODES,
    STAGE_SCALES,
    TILE_N,
    LayerProductsConfig,
)

LINE_BYTES = 128


@dataclass(frozen=True)
class Product:
    """One of a launch's products; run-time integers. Absent addresses are 0.

    Attributes:
        begin: index of the product's first work tile.
        k: number of inputs.
        n: number of features.
        gated: whether SwiGLU halves the features.
        adds: whether the first product's results are added to this product's.
        place: offset in bytes of the product's results in a set of the exchange.
        rows: offset in bytes of the previous product's results, which are this product's row of x.
    """

    codes: Int64
    scales: Int64
    norm: Int64
    out: Int64
    n: Int32
    k: Int32
    gated: Int32
    adds: Int32
    begin: Int32
    place: Int32
    rows: Int32


@dataclass(frozen=True)
class Sizes:
    """The sizes of a launch.

    Attributes:
        first_end to num_tiles: for each product, the index after its last work tile.
        waited_for: number of work tiles of all products but the last; other CTAs wait for their results.
        used: number of words of these results.
        x, residual: addresses for the first product.
    """

    first_end: Int32
    second_end: Int32
    third_end: Int32
    num_tiles: Int32
    waited_for: Int32
    used: Int32
    num_ctas: Int32
    eps: Float32
    offset: Float32
    x: Int64
    residual: Int64
    exchange: Int64

    def product_of(self, tile):
        """Returns the index of the product to which a work tile belongs."""
        ends = (self.first_end, self.second_end, self.third_end)
        return sum((cutlass.select_(tile >= end, Int32(1), Int32(0)) for end in ends), Int32(0))


@dataclass(frozen=True)
class LayerMemory:
    """Shared memory of a CTA: addresses, and barriers."""

    stages: Int32
    limbs: Int32
    x_scales: Int32  # [group]
    squares: Int32  # [group]
    parts: Int32
    table: Int32
    slots: Int32
    weights: Pipeline
    tiles: Pipeline  # numbers of work tiles, from one loader warp to all warps
    results: Pipeline  # sums of a work tile, from consumer warps to the store warp

    def product(self, number) -> Product:
        """Loads the fields of a product from the table. number: index of the product."""
        at = self.table + number * PRODUCT_BYTES
        codes, scales = instructions.load_shared_longs(at, 0)
        norm, out = instructions.load_shared_longs(at, 16)
        words = [*ptx.load_shared_vector(at, 32, 4), *ptx.load_shared_vector(at, 48, 4)]
        return Product(codes, scales, norm, out, *(Int32(word) for word in words[:7]))


def allocate(config: LayerProductsConfig) -> LayerMemory:
    """Allocates the shared memory of a configuration."""
    smem = cutlass.utils.SmemAllocator()

    def room(size: int) -> Any:
        return smem.allocate(size, byte_alignment=128).toint()

    regions = {
        "stages": room(config.num_stages * STAGE_BYTES),
        "limbs": room(config.groups * GROUP_LIMB_BYTES),
        "x_scales": room(config.groups * 4),
        "squares": room(config.groups * 4),
        "parts": room(BUFFERS * config.consumer_warps * PART_BYTES),
        "table": room(MOST_PRODUCTS * PRODUCT_BYTES),
        "slots": room(4 * SLOTS),
    }
    first = smem.allocate_array(cutlass.Int64, 2 * (config.num_stages + SLOTS + BUFFERS))
    tiles = first + 2 * config.num_stages
    results = tiles + 2 * SLOTS
    return LayerMemory(
        **regions,
        weights=Pipeline(first, first + config.num_stages, config.num_stages),
        tiles=Pipeline(tiles, tiles + SLOTS, SLOTS, releases=config.num_warps),
        results=Pipeline(results, results + BUFFERS, BUFFERS, fills=config.consumer_warps),
    )


def init_barriers(memory: LayerMemory) -> None:
    """Initialises all barriers; one thread calls it."""
    for pipeline in (memory.weights, memory.tiles, memory.results):
        pipeline.init()
    fence_init()


def write_table(memory: LayerMemory, products) -> None:
    """Writes the table in which every warp finds a product's numbers; one thread calls it."""
    for i, each in enumerate(products):
        at = Int32(memory.table)
        begin = PRODUCT_BYTES * i
        instructions.store_shared_longs(at, begin, [each.codes, each.scales])
        instructions.store_shared_longs(at, begin + 16, [each.norm, each.out])
        words = [cutlass.Uint32(v) for v in (each.n, each.k, each.gated, each.adds)]
        ptx.store_shared(at, begin + 32, words)
        words = [cutlass.Uint32(v) for v in (each.begin, each.place, each.rows, each.rows)]
        ptx.store_shared(at, begin + 48, words)


@cute.jit
def receive(memory: LayerMemory, slot, lane):
    """Receives the index of the CTA's next work tile; every warp calls it. slot: state of `LayerMemory.tiles`."""
    memory.tiles.consumer_wait(slot)
    tile = Int32(ptx.load_shared(memory.slots + slot.stage * 4, 0))
    cute.arch.sync_warp()
    if lane == 0:
        memory.tiles.consumer_release(slot)
    return cute.arch.make_warp_uniform(tile)


def tiles_of(n):
    """Returns how many work tiles a product of n features has."""
    return n // TILE_N


def turn(warp, base, warps: int):
    """Returns the index, within a work tile, of the first stage that belongs to a warp. The stages of all tiles form
    one sequence, and stage s of the sequence belongs to warp s % ``warps``. base: index in the sequence of the tile's
    first stage.
    """
    return (warp + warps - base % warps) % warps


@cute.jit
def ask_early(sizes: Sizes, product: Product):
    """Prefetches a CTA's part of a product's first weights into L2. One lane calls it. The previous launch need not
    have ended, since it does not write weights."""
    codes = cutlass.min(product.n * (product.k // 2), EARLY_BYTES)
    for first, num_bytes in ((product.codes, codes), (product.scales, codes // (STAGE_CODES // STAGE_SCALES))):
        part = (num_bytes // sizes.num_ctas + LINE_BYTES - 1) & -LINE_BYTES
        begin = Int32(cute.arch.block_idx()[0]) * part
        own = cutlass.min(part, num_bytes - begin)
        numbers.prefetch_bulk_if(cutlass.select_(own > 0, Int32(1), Int32(0)), first + Int64(begin), own)
