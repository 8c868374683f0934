"""Parts of K that the CTAs of a cluster send each other: every warp of every CTA, in NumPy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma import cluster_reduction, epilogue, kernel, places
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import ResidentLimbs
from cute_kernels.gemm.wgmma.resident_kernel import START_BARRIER
from cute_kernels.gemm.wgmma.resident_rows import CHUNK_BARRIER
from cute_kernels.gemm.wgmma.results import Dsmem
from cute_kernels.gemm.wgmma.schedule import schedule_of
from simulator import Meanings, PlainThread, stand_in
from tests.attention import warp as machine
from tests.attention.warp import Float32, Lanes, Uint32

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
    """Runs device code of all CTAs of a cluster, one after the other; memory that nobody wrote is NaN."""

    shared: np.ndarray
    rank: int = 0
    arrived: Counter[int] = field(default_factory=Counter)  # bytes by the barrier's address in the cluster
    written: set[int] = field(default_factory=set)
    waited: list[int] = field(default_factory=list)
    met: list[tuple[int, int]] = field(default_factory=list)  # (barrier, threads)

    def meanings(self) -> Meanings:
        plain = PlainThread(arch={"mbarrier_wait": self.wait, "barrier": self.meet}).meanings()
        return replace(plain, instructions=self, scalars={**plain.scalars, "Float32": Float32})

    def bits(self, value: Lanes) -> Lanes:
        return value.view(np.uint32)

    def address_in(self, address: Any, rank: Any) -> Lanes:
        return np.asarray(address, np.int64) + RANK_BYTES * np.asarray(rank, np.int64)

    def put(self, places: Lanes, words: list[Lanes]) -> None:
        """Stores vectors, each to a place that nobody has written."""
        for lane, place in enumerate(places):
            assert place % 16 == 0 and place not in self.written
            self.written.add(int(place))
            for i, word in enumerate(words):
                self.shared.view(np.uint32)[place // 4 + i] = np.asarray(word)[lane].view(np.uint32)

    def store_async(self, address: Lanes, words: list[Lanes], barrier: Any) -> None:
        places = np.asarray(address)
        assert (places // RANK_BYTES != self.rank).all(), "the CTA's own part is not sent"
        self.put(places, words)
        self.arrived[int(np.unique(barrier).item())] += places.size * 4 * len(words)

    def store_shared(self, address: Lanes, offset: int, words: list[Lanes]) -> None:
        self.put(np.asarray(address, np.int64) + offset + RANK_BYTES * self.rank, words)

    def load_shared_vector(self, address: Lanes, offset: int, count: int) -> list[Lanes]:
        places = np.asarray(address, np.int64) + offset + RANK_BYTES * self.rank
        return [Uint32(self.shared.view(np.uint32)[places // 4 + i]) for i in range(count)]

    def wait(self, barrier: Barrier, phase: int) -> None:
        assert phase == 0
        self.waited.append(barrier.address)

    def meet(self, *, barrier_id: int, number_of_threads: int) -> None:
        self.met.append((int(barrier_id), number_of_threads))


def publishing(bits: int, tile_m: int, cluster: int, k_warpgroups: int = 1, **choices) -> WgmmaConfig:
    reduction = Dsmem(cluster, k_warpgroups)
    config = WgmmaConfig(integers(bits), "bf16", tile_m=tile_m, block_k=128, reduction=reduction)
    return replace(config, **{"row_parts": min(tile_m // 8, 4), "num_stages": 2, **choices})


CONFIGS = [
    publishing(4, tile_m, cluster, n_tiles=tiles)
    for tile_m, tiles, cluster in ((16, 1, 2), (16, 1, 3), (16, 2, 2), (32, 1, 2), (32, 2, 3))
]
CONFIGS += [
    publishing(8, tile_m, cluster, warpgroups=warpgroups)
    for tile_m, warpgroups, cluster in ((16, 1, 2), (16, 2, 3), (32, 1, 3))
]
TURNING = [
    publishing(4, 16, 2, n_tiles=2, k_warpgroups=2, num_stages=4),
    publishing(8, 32, 3, n_tiles=2, k_warpgroups=2, num_stages=4),
    publishing(8, 16, 2, k_warpgroups=2, num_stages=4),
    publishing(4, 64, 2, k_warpgroups=2, num_stages=4),
    publishing(4, 16, 2, n_tiles=2, warpgroups=3, k_warpgroups=3, num_stages=12),
    publishing(4, 16, 3, n_tiles=1, warpgroups=1, k_warpgroups=1),
    publishing(4, 64, 4, warpgroups=2, k_warpgroups=2, num_stages=4),
    publishing(4, 96, 4, warpgroups=1, row_parts=1),
]
SPARED = WgmmaConfig(
    integers(4),
    "bf16",
    tile_m=8,
    block_k=128,
    warpgroups=4,
    n_tiles=2,
    mainloop=ResidentLimbs(spare=1),
    reduction=Dsmem(2),
)
RESIDENT = [
    SPARED,
    replace(SPARED, n_tiles=1, mainloop=ResidentLimbs(), reduction=Dsmem(2, 2), num_stages=8),
    replace(SPARED, n_tiles=1, mainloop=ResidentLimbs(), reduction=Dsmem(2, 4), num_stages=8),
    replace(SPARED, tile_m=16, warpgroups=2, n_tiles=4),
]


def store_of(warp: int) -> epilogue.Store:
    return stand_in(epilogue.Store)(0, warp // 4, warp % 4 * 32 + machine.LANES, warp % 4, machine.LANES)


def reduction_of(config: WgmmaConfig) -> cluster_reduction.ClusterReduction:
    return cluster_reduction.ClusterReduction(config, epilogue.TileEpilogue(config), places.DensePlaces(config))


@pytest.mark.parametrize("config", [*CONFIGS, *TURNING, *RESIDENT], ids=lambda config: config.name)
def test_every_tile_is_added_up_by_one_warpgroup(config: WgmmaConfig, run_on):
    """Of every CTA: accumulators of all turns are joined, sent once, and added to those of the CTA that stores the
    tile."""
    cluster = Cluster(np.full(config.cluster * RANK_BYTES, 0xFF, np.uint8))
    run_on(cluster)
    subject = reduction_of(config)
    memory = SimpleNamespace(partials=PARTS, partial_barriers=Barrier(BARRIERS))
    generator = np.random.default_rng(1)
    groups, count = config.warpgroups // config.k_warpgroups, config.tile_m // 2
    every: dict[tuple[int, int], machine.Registers] = {}
    for rank, warp in np.ndindex(config.cluster, config.consumer_warps):
        every[rank, warp] = machine.Registers(config.thread_acc, Float32)
        every[rank, warp][:] = [Float32(value) for value in generator.normal(size=(config.thread_acc, 32))]
    before = {which: [np.asarray(value, np.float64) for value in acc] for which, acc in every.items()}
    exact: dict[tuple[int, int], Any] = {}
    own: list[tuple[int, int, int, int]] = []  # (CTA, warp, tile, number in its warpgroup) that store
    for (rank, warp), acc in before.items():
        first_tile = warp // 4 % groups * config.n_tiles
        for i in (i for i in range(config.n_tiles) if subject.partials.exists(first_tile + i, i)):
            which = first_tile + i, warp % 4
            exact[which] = exact.get(which, 0) + np.array(acc[i * count : (i + 1) * count])
            if subject.partials.owner(first_tile + i) == rank and warp // 4 // groups == 0:
                own.append((rank, warp, first_tile + i, i))
    assert {tile for _, _, tile, _ in own} == set(range(config.block_tiles))
    # What is left for another turn is there before anybody joins: all warps leave, then all join.
    for phase in ("publish_locally", "add") if config.k_warpgroups > 1 else ():
        for (rank, warp), acc in every.items():
            cluster.rank = rank
            one = reduction_of(config)
            part: Any = one.interleaved if phase == "add" else one.partials  # what the other phase does
            setattr(part, "add" if phase == "publish_locally" else "publish_locally", lambda *args: None)
            k_rank, first_tile = warp // 4 // groups, warp // 4 % groups * config.n_tiles
            one.interleaved.reduce(memory, store_of(warp), rank, k_rank, acc, first_tile)
    if config.k_warpgroups > 1:
        threads = config.k_warpgroups * 128
        assert set(cluster.met) == {(cluster_reduction.JOIN + group, threads) for group in range(groups)}
    for (rank, warp), acc in every.items():
        cluster.rank = rank
        first_tile = warp // 4 % groups * config.n_tiles
        for i in (i for i in range(config.n_tiles) if subject.partials.exists(first_tile + i, i)):
            if subject.partials.owner(first_tile + i) != rank and warp // 4 // groups == config.k_warpgroups - 1:
                subject.partials.publish(memory, store_of(warp), rank, first_tile + i, acc, i)
    assert set(cluster.arrived.values()) == {(config.cluster - 1) * config.partial_bytes}
    for rank, warp, tile, i in own:
        cluster.rank = rank
        subject.partials.load(memory, store_of(warp), tile, every[rank, warp], i)
        assert cluster.arrived[cluster.waited[-1] + RANK_BYTES * rank] == (config.cluster - 1) * config.partial_bytes
        found = np.array([np.asarray(value) for value in every[rank, warp]])[i * count : (i + 1) * count]
        np.testing.assert_allclose(found, exact[tile, warp % 4], rtol=0, atol=2e-6)
    last = max(cluster.written) % RANK_BYTES
    assert last + 16 <= PARTS + config.reduction.regions(config)[0].size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_a_block_of_one_tile_are_added_in_the_order_of_parts_that_meet_in_memory(size: int, run_on):
    """The last one's accumulators, then the first's, the second's ...: batch-invariant products depend on it."""
    config = publishing(4, 16, size, warpgroups=1)
    cluster = Cluster(np.full(size * RANK_BYTES, 0xFF, np.uint8))
    run_on(cluster)
    partials = reduction_of(config).partials
    memory = SimpleNamespace(partials=PARTS, partial_barriers=Barrier(BARRIERS))
    generator = np.random.default_rng(size)
    magnitudes = 10.0 ** generator.integers(-3, 4, (size, config.thread_acc, 32))
    of_k = (generator.standard_normal(magnitudes.shape) * magnitudes).astype(np.float32)
    owner = int(partials.owner(0))
    registers = [machine.Registers(config.thread_acc, Float32) for _ in range(size)]
    for rank, values in enumerate(of_k):
        cluster.rank = rank
        registers[rank][:] = [Float32(value) for value in values]
        if rank != owner:
            partials.publish(memory, store_of(0), rank, 0, registers[rank], 0)
    cluster.rank = owner
    partials.load(memory, store_of(0), 0, registers[owner], 0)
    want = of_k[-1]
    for part in range(size - 1):  # as `WorkspaceReduction.add_part`
        want = want + of_k[part]
    assert (np.array([np.asarray(value) for value in registers[owner]], np.float32) == want).all()


def test_barriers_of_turns_are_nobody_elses():
    last = cluster_reduction.JOIN + max(config.warpgroups // config.k_warpgroups for config in RESIDENT) - 1
    assert kernel.BEGIN < cluster_reduction.JOIN and last < min(CHUNK_BARRIER, START_BARRIER)


def test_memory_of_parts_is_counted():
    for config in (*CONFIGS, *TURNING):
        partial_address = config.reduction.partial_slots(config) * (config.cluster - 1)
        local_partial_address = config.block_tiles * (config.k_warpgroups - 1)
        assert config.reduction.received_bytes(config) == partial_address * config.partial_bytes
        assert (
            config.reduction.regions(config)[0].size == (partial_address + local_partial_address) * config.partial_bytes
        )
        assert config.num_barriers == 2 * config.num_stages + config.reduction.partial_slots(config)
        assert config.can_implement() is None


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_cluster_has_the_parts_of_one_tile(config: WgmmaConfig):
    for n, k in ((4096, 4096), (2048, 1024), (1000, 8192)):
        schedule = schedule_of(LinearProblem(16, n, k, k, integers(4), "bf16"), config, config.cluster)
        if schedule is not None:
            assert schedule.num_ctas == schedule.blocks * config.cluster <= 132
            assert schedule.workspace_words == 0 and schedule.whole == 0
