"""Parts of K that the CTAs of a cluster send each other: every warp of every CTA, in NumPy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.linear.schedule import Problem
from cute_kernels.linear.wgmma import cluster_parts, epilogue, kernel
from cute_kernels.linear.wgmma.config import WgmmaConfig
from cute_kernels.linear.wgmma.resident_config import ResidentConfig
from cute_kernels.linear.wgmma.schedule import schedule_of
from tests.attention import warp as machine
from tests.attention.warp import Float32, Int32, Lanes, Uint32

RANK_BYTES = 1 << 20  # from a CTA's shared memory to the next one's, in addresses of the cluster
PARTS, BARRIERS = 1 << 12, 1 << 8
BARRIER_BYTES = 8


@dataclass
class Barrier:
    address: int

    def __add__(self, number: Any) -> Barrier:
        return Barrier(self.address + BARRIER_BYTES * int(number))

    def toint(self) -> int:
        return self.address


@dataclass
class Cluster:
    """Stands for `numbers` and `ptx`, for all CTAs; memory that nobody wrote is NaN."""

    shared: np.ndarray
    rank: int = 0
    arrived: Counter[int] = field(default_factory=Counter)  # bytes by the barrier's address in the cluster
    written: set[int] = field(default_factory=set)

    def bits(self, value: Lanes) -> Lanes:
        return value.view(np.uint32)

    def address_in(self, address: Any, rank: Any) -> Lanes:
        return np.asarray(address, np.int64) + RANK_BYTES * np.asarray(rank, np.int64)

    def store_async(self, address: Lanes, words: list[Lanes], barrier: Any) -> None:
        for lane, place in enumerate(np.asarray(address)):
            assert place % 16 == 0 and place // RANK_BYTES != self.rank and place not in self.written
            self.written.add(int(place))
            for i, word in enumerate(words):
                self.shared.view(np.uint32)[place // 4 + i] = np.asarray(word)[lane]
            self.arrived[int(np.unique(barrier).item())] += 4 * len(words)

    def load_shared_vector(self, address: Lanes, offset: int, count: int) -> list[Lanes]:
        places = np.asarray(address, np.int64) + offset + RANK_BYTES * self.rank
        return [Uint32(self.shared.view(np.uint32)[places // 4 + i]) for i in range(count)]


def pushing(bits: int, tokens: int, cluster: int, **choices) -> WgmmaConfig:
    tile = {"tokens": tokens, "row_parts": tokens // 8, "unit_k": 128, "num_stages": 2}
    return WgmmaConfig(bits, "bf16", 128, **tile, splits_k=True, cluster=cluster, pushes=True, **choices)


CONFIGS = [
    pushing(4, tokens, cluster, m_tiles=tiles, digits=True)
    for tokens, tiles, cluster in ((16, 1, 2), (16, 1, 3), (16, 2, 2), (32, 1, 2), (32, 2, 3))
]
CONFIGS += [
    pushing(8, tokens, cluster, warpgroups=warpgroups)
    for tokens, warpgroups, cluster in ((16, 1, 2), (16, 2, 3), (32, 1, 3))
]
SEVEN_TILES = ResidentConfig(
    4, "bf16", 128, tokens=8, unit_k=128, warpgroups=4, m_tiles=2, spare=1, cluster=2, pushes=True, digits=True
)


def store_of(warp: int) -> epilogue.Store:
    return epilogue.Store(0, warp // 4, warp % 4 * 32 + machine.LANES, warp % 4, machine.LANES)


@pytest.mark.parametrize("config", [*CONFIGS, SEVEN_TILES], ids=lambda config: config.name)
def test_every_tile_is_added_up_by_one_cta(config: WgmmaConfig, monkeypatch):
    cluster = Cluster(np.full(config.cluster * RANK_BYTES, 0xFF, np.uint8))
    waited: list[int] = []
    arch = SimpleNamespace(mbarrier_wait=lambda barrier, phase: waited.append(barrier.address))
    stand_ins = {"numbers": cluster, "ptx": cluster, "Int32": Int32, "Float32": Float32}
    stand_ins |= {"cutlass": SimpleNamespace(select_=machine.select), "cute": SimpleNamespace(arch=arch)}
    for name, value in stand_ins.items():
        monkeypatch.setattr(cluster_parts, name, value)
    subject = kernel.WgmmaKernel(config).cluster_parts
    memory = SimpleNamespace(parts=PARTS, part_barriers=Barrier(BARRIERS))
    generator = np.random.default_rng(1)
    every = {
        (rank, warp): [Float32(value) for value in generator.normal(size=(config.thread_sums, 32))]
        for rank in range(config.cluster)
        for warp in range(config.math_warps)
    }
    tiles = [
        (warp, warp // 4 * config.m_tiles + i, i)
        for warp in range(config.math_warps)
        for i in range(config.m_tiles)
        if subject.exists(warp // 4 * config.m_tiles + i, i)
    ]
    assert {tile for _, tile, _ in tiles} == set(range(config.block_tiles))
    for (rank, warp), sums in every.items():
        cluster.rank = rank
        for _, tile, i in (one for one in tiles if one[0] == warp and one[1] % config.cluster != rank):
            subject.send(memory, store_of(warp), rank, tile, sums, i)
    assert set(cluster.arrived.values()) == {(config.cluster - 1) * config.part_bytes}
    for warp, tile, i in tiles:
        owner, first = tile % config.cluster, i * config.tokens // 2
        cluster.rank = owner
        parts = [every[rank, warp][first : first + config.tokens // 2] for rank in range(config.cluster)]
        sums = machine.Registers(config.thread_sums, Float32)
        sums[:] = every[owner, warp]
        subject.add_up(memory, store_of(warp), owner, tile, sums, i)
        assert cluster.arrived[waited[-1] + RANK_BYTES * owner] == (config.cluster - 1) * config.part_bytes
        for j in range(config.tokens // 2):
            total = parts[-1][j]
            for part in parts[:-1]:
                total = total + part[j]
            assert np.array_equal(np.asarray(sums[first + j]), np.asarray(total))


def test_memory_of_parts_is_counted():
    for config in CONFIGS:
        last = (config.part_slots - 1) * config.cluster + config.cluster - 1
        assert config.parts_bytes == (last + 1) * config.part_bytes
        assert config.num_barriers == 2 * config.num_stages + config.part_slots
        assert config.can_implement() is None


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_cluster_has_the_parts_of_one_tile(config: WgmmaConfig):
    for n, k in ((4096, 4096), (2048, 1024), (1000, 8192)):
        schedule = schedule_of(Problem(16, n, k, k, 4, "bf16", 128), config, config.cluster)
        if schedule is not None:
            assert schedule.num_ctas == schedule.blocks * config.cluster <= 132
            assert schedule.workspace_words == 0 and schedule.whole == 0
