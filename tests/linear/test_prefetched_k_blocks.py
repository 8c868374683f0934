"""What a tile asks into L2 before its barriers are there lies within it, at the beginning of its part of K."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma import loads, places
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.schedule import tile_schedules
from layouts.weights.hopper import TILE_BYTES
from simulator import PlainThread
from tests.each import each

CONFIGS = {
    schedule.config.name: schedule.config
    for m in (1, 8, 16, 32)
    for bits in (4, 8)
    for n in (4096, 8192, 12288)
    for schedule in tile_schedules(LinearProblem(m, n, 4096, 4096, integers(bits), "bf16"))
    if schedule.config.prefetched_k_blocks
}


class AskingThread(PlainThread):
    """Keeps what is asked for into L2: whether it is, where, and how many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[bool, int, int]] = []

    def prefetch_bulk_if(self, condition: bool, address: int, num_bytes: int) -> None:
        self.asked.append((condition, address, num_bytes))


@each("config", CONFIGS.values(), ids=lambda config: config.name)
@each("k_blocks", [1, 2, 3, 4, 5, 32])
@each("num_tiles", [1, 5, 64])
def test_runs_lie_within_their_tiles(config: WgmmaConfig, k_blocks: int, num_tiles: int, run_on):
    """Of blocks and parts of K of all kinds; tiles behind the last one are that one again."""
    thread = AskingThread()
    asked = thread.asked
    run_on(thread)
    shape: Any = SimpleNamespace(k_blocks=k_blocks, num_tiles=num_tiles)
    tile_bytes = k_blocks * config.k_block_tiles * TILE_BYTES
    for block in range(-(-num_tiles // config.block_tiles)):
        for begin in {0, -(-k_blocks // 2)} - {k_blocks}:
            work_tile = SimpleNamespace(block=block, begin=begin)
            asked.clear()
            loads.prefetch_k_blocks(
                config,
                places.DensePlaces(config),
                SimpleNamespace(codes=0),
                shape,
                SimpleNamespace(first=0, work_tile=lambda _, i=work_tile: i),
            )
            assert len(asked) == config.block_tiles
            for i, (there, address, size) in enumerate(asked):
                tile, offset = divmod(address, tile_bytes)
                assert tile == min(block * config.block_tiles + i, num_tiles - 1)
                assert offset == begin * config.k_block_tiles * TILE_BYTES
                assert size == config.prefetched_k_blocks * config.k_block_tiles * TILE_BYTES
                assert there == (offset + size <= tile_bytes)


def test_every_kind_of_tile_that_prefetches_is_among_them():
    kinds = {(config.format.bits, config.block_tiles, config.limbs) for config in CONFIGS.values()}
    assert {(4, 1, False), (4, 2, False), (8, 1, False), (4, 1, True), (4, 2, True), (4, 4, True)} <= kinds
