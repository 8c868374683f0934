"""The portable kernel, lane by lane in NumPy: what is copied where, decoding, products, the way to the output."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from cute_kernels.device import numbers
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.portable import kernel
from cute_kernels.gemm.portable.config import PortableConfig, portable_config
from cute_kernels.gemm.portable.schedule import make_portable_schedule, portable_schedules
from cute_kernels.gemm.schedule import LinearProblem
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma import epilogue, tiles
from cute_kernels.gemm.wgmma.mainloops import PortableMmaSync
from cute_kernels.gemm.wgmma.tiles import dense_scheduler
from layouts import banks
from simulator import Altered, Backend, PlainThread, stand_in
from tests.attention import warp as machine
from tests.linear import measured_portable
from tests.linear.cases import known
from tests.linear.test_schedule import problems
from tests.linear.warpgroup import WarpgroupWarp

POISON = 0xFF  # a NaN in either dtype
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CONFIGS = [
    portable_config(integers(bits, group_size, zero_point), dtype, tile_m=16, num_stages=3)
    for bits in (4, 8)
    for dtype in ("bf16", "fp16")
    for group_size in (0, 32, 64, 128, 256)
    for zero_point in (False, True)
] + [
    portable_config(integers(4), "bf16", num_stages=3),
    portable_config(integers(4, 32, True), "bf16", tile_m=32, n_tiles=1, num_stages=2),
    portable_config(integers(8, 64, True), "fp16", tile_m=32, num_stages=2),
]
SOME = [CONFIGS[7], CONFIGS[19], *CONFIGS[-3:]]


@dataclass
class PortableWarp(WarpgroupWarp):
    """With the instructions that are this kernel's alone."""

    def copy_async(self, destination, source, num_bytes) -> None:
        target, place, count = (
            np.broadcast_to(np.asarray(a, np.int64), (32,)) for a in (destination, source, num_bytes)
        )
        self.accesses.append(machine.Access("st", 16, tuple(target.tolist())))
        assert not (target % 16).any() and not (place % 16).any(), "misaligned copy"
        assert target.min() >= 0 and target.max() + 16 <= self.shared_memory.size
        for i in range(32):
            assert count[i] in (0, 16) and 0 <= place[i] <= self.global_memory.size - count[i]
            self.shared_memory[target[i] : target[i] + 16] = 0
            found = self.global_memory[place[i] : place[i] + count[i]]
            self.shared_memory[target[i] : target[i] + count[i]] = found

    def fma_bf16x2(self, a, b, c):
        product = machine.elements(a, "bf16") * machine.elements(machine.Uint32(b), "bf16")
        # A bf16 times a bf16, and a sum of integers below 512, are exact in fp32: one rounding.
        return self.pack_bf16x2(*(product + machine.elements(machine.Uint32(c), "bf16")).T)


class Launch:
    """A product of the kernel, CTA by CTA, warp by warp; stages are filled and used in turn."""

    def __init__(self, config: PortableConfig, weight: PackedWeight, x: torch.Tensor, splits: int, run_on):
        self.config, (self.n, k), m = config, weight.shape, x.shape[0]
        k_pad = weight.codes.shape[1] * config.tile_k
        k_blocks, num_tiles = k_pad // config.block_k, weight.codes.shape[0]
        aligned = torch.nn.functional.pad(x, (0, -k % 8))
        run_on(PlainThread())  # for the grid's divisors
        blocks, m_tiles = -(-num_tiles // config.block_tiles), -(-m // config.tile_m)
        grid = tiles.TileGrid.of(blocks, m_tiles, 0, splits)
        self.shape = stand_in(tiles.TileSizes)(
            m=m, n=self.n, k=aligned.shape[1], num_tiles=num_tiles, k_blocks=k_blocks,
            scale_groups=k_pad // config.group_size if config.group_size else 1, whole=0, splits=splits,
            split_k_blocks=-(-k_blocks // splits), activation=0, out_kind=0, grid=grid,
        )  # fmt: skip
        parts = {"x": aligned, "codes": weight.codes, "scales": weight.scales, "zeros": weight.zeros}
        pieces, places, end = [], {}, 0
        for name, tensor in parts.items():
            data = np.zeros(0, np.uint8) if tensor is None else tensor.contiguous().view(torch.uint8).numpy().ravel()
            places[name] = end
            pieces += [data, np.full(64 + -data.size % 64, POISON, np.uint8)]
            end += pieces[-2].size + pieces[-1].size
        self.operands = SimpleNamespace(**places)
        self.shared = np.full(config.limits.shared_bytes, POISON, np.uint8)
        self.gpu = PortableWarp(self.shared, np.concatenate(pieces))
        run_on(self.backend())
        self.subject = kernel.PortableKernel(config)
        self.epilogue = epilogue.TileEpilogue(config)
        stages = config.num_stages
        x_start = stages * config.code_stage_bytes
        scales = x_start + stages * config.x_stage_bytes
        self.stages = stand_in(kernel.Stages)(0, x_start, scales, scales + stages * config.scale_stage_bytes, 0)

    def backend(self) -> Backend:
        """What the kernel runs on."""
        return self.gpu

    def copy(self, work_tile, k_block: int, stage: int) -> None:
        """All threads' parts of `copy_stage`."""
        config, subject = self.config, self.subject
        for warp in range(config.consumer_warps):
            tid = warp * 32 + machine.LANES
            subject.copy_codes(self.operands, self.shape, self.stages, work_tile, k_block, stage, tid)
            subject.copy_x(self.operands, self.shape, self.stages, work_tile, k_block, stage, tid)
        parts = [(self.operands.scales, self.stages.scales, config.scale_stage_bytes, config.format.group_scale_bytes)]
        parts += [(self.operands.zeros, self.stages.zeros, config.zero_stage_bytes, config.format.group_zero_bytes)]
        for source, target, stage_bytes, group_bytes in parts:
            count = config.n_tiles * config.k_block_groups * group_bytes // 16 if stage_bytes else 0
            assert count <= config.num_threads and count * 16 == stage_bytes
            for tid in range(count):
                offset = subject.group_offset(group_bytes, self.shape, work_tile, k_block, tid)
                place = int(np.asarray(source + offset).flat[0])
                start = target + stage * stage_bytes + tid * 16
                self.shared[start : start + 16] = self.gpu.global_memory[place : place + 16]

    def work_tile(self, work_tile) -> np.ndarray:
        """[tokens, block_rows] of a part of K of a tile."""
        config, subject = self.config, self.subject
        begin, end = (int(np.asarray(value).flat[0]) for value in (work_tile.begin, work_tile.end))
        registers = [machine.Registers(config.thread_acc, machine.Float32) for _ in range(4)]
        places = [subject.stages.lane(self.shape, warp, machine.LANES, subject.masks) for warp in range(4)]
        channels = [subject.channel.load(self.operands, self.shape, work_tile, 0, place) for place in places]
        for k_block in range(begin, end):
            stage = (k_block - begin) % config.num_stages
            self.copy(work_tile, k_block, stage)
            for acc, place, channel in zip(registers, places, channels, strict=True):
                subject.multiply_stage(acc, self.stages, stage, place, channel, machine.LANES)
        for acc, channel in zip(registers, channels, strict=True):
            subject.channel.scale(acc, list(acc), channel)
        return self.staged(registers)

    def staged(self, registers) -> np.ndarray:
        """What the epilogue finds in shared memory, [tokens, block_rows]."""
        config = self.config
        found = np.zeros((config.tile_m, config.block_rows))
        for tile in range(config.n_tiles):
            for warp, acc in enumerate(registers):
                store = stand_in(epilogue.Store)(0, 0, warp * 32 + machine.LANES, warp, machine.LANES)
                self.epilogue.stage_acc(store, acc, tile * config.tile_m // 2, config.tile_m)
            part = self.shared[: config.tile_m * config.staging_pitch].view(np.float32)
            found[:, tile * 64 : (tile + 1) * 64] = part.reshape(config.tile_m, -1)[:, :64]
        return found

    def product(self) -> np.ndarray:
        """[m, n]: all work tiles, the parts of K of a tile added up."""
        config, shape = self.config, self.shape
        scheduler = functools.partial(dense_scheduler, config)
        out = np.zeros((-(-shape.m // config.tile_m) * config.tile_m, shape.num_tiles * 64 + 64))
        count = int(np.asarray(scheduler(shape, 0, 1).count).flat[0])
        for cta in range(count):
            work_tile = scheduler(shape, cta, count).work_tile(cta)
            block, token = (int(np.asarray(v).flat[0]) for v in (work_tile.block, work_tile.m_tile))
            rows = slice(token * config.tile_m, (token + 1) * config.tile_m)
            out[rows, block * config.block_rows : (block + 1) * config.block_rows] += self.work_tile(work_tile)
        return out[: shape.m, : self.n]


class Pipeline(Launch):
    """The kernel's own loop over the pipeline: four warps that take turns at barriers, copies that are late or early.

    Late copies come when they are waited for, and not before; early ones at once. Warps run from barrier to barrier one
    after the other, so what one does too early is done before the others have done what must come first.
    """

    def __init__(self, config, weight, x, splits: int, run_on, *, late: bool, order: tuple[int, ...]):
        self.late, self.order = late, order
        self.groups: dict[int, list[list]] = {warp: [[]] for warp in order}
        self.turn, self.moved, self.finished = 0, threading.Condition(), set()
        super().__init__(config, weight, x, splits, run_on)
        self.subject.copy_groups = self.copy_groups  # pyright: ignore[reportAttributeAccessIssue]

    def backend(self) -> Backend:
        arch = {
            "cp_async_commit_group": lambda: self.groups[self.warp].append([]),
            "cp_async_wait_group": self.wait_group,
            "sync_threads": self.pass_on,
        }
        copy = {"copy_async": lambda *operands: self.ask(lambda: self.gpu.copy_async(*operands))}
        return Altered(self.gpu, arch=arch, modules={numbers: copy})

    @property
    def warp(self) -> int:
        return int(threading.current_thread().name)

    def ask(self, copy: Callable[[], None]) -> None:
        if self.late:
            self.groups[self.warp][-1].append(copy)
        else:
            copy()

    def wait_group(self, pending: int) -> None:
        """All groups that are committed, but for the last ``pending``."""
        groups = self.groups[self.warp]
        for group in groups[: len(groups) - 1 - pending]:
            while group:
                group.pop(0)()

    def copy_groups(self, source, target, group_bytes, shape, work_tile, k_block, tid) -> None:
        for lane in tid[tid < self.config.n_tiles * self.config.k_block_groups * group_bytes // 16]:
            offset = self.subject.group_offset(group_bytes, shape, work_tile, k_block, lane)
            place, start = (int(np.asarray(value).flat[0]) for value in (source + offset, target + lane * 16))

            def copy(place=place, start=start):
                self.shared[start : start + 16] = self.gpu.global_memory[place : place + 16]

            self.ask(copy)

    def pass_on(self) -> None:
        """A barrier, or the end: the next warp's turn, until it is this one's again."""
        with self.moved:
            self.turn = (self.turn + 1) % len(self.order)
            self.moved.notify_all()
            self.wait_for_turn()

    def wait_for_turn(self) -> None:
        assert self.moved.wait_for(lambda: self.order[self.turn] == self.warp or len(self.finished) == 4, timeout=60)

    def work_tile(self, work_tile) -> np.ndarray:
        ends = {name: int(np.asarray(getattr(work_tile, name)).flat[0]) for name in ("begin", "end", "m_tile", "block")}
        work_tile = replace(work_tile, **ends)
        results: dict[int, machine.Registers] = {}
        self.finished.clear()
        self.turn = 0
        threads = [threading.Thread(target=self.run_warp, args=(work_tile, results), name=str(w)) for w in self.order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(results) == 4, "a warp has failed"
        return self.staged([results[warp] for warp in range(4)])

    def run_warp(self, work_tile, results: dict[int, machine.Registers]) -> None:
        subject, warp = self.subject, self.warp
        with self.moved:
            self.wait_for_turn()
        acc = machine.Registers(self.config.thread_acc, machine.Float32)
        place = subject.stages.lane(self.shape, warp, machine.LANES, subject.masks)
        channel = subject.channel.load(self.operands, self.shape, work_tile, 0, place)
        tid = warp * 32 + machine.LANES
        subject.multiply_all(acc, self.operands, self.shape, self.stages, work_tile, place, channel, tid, machine.LANES)
        subject.channel.scale(acc, list(acc), channel)
        results[warp] = acc
        with self.moved:
            self.finished.add(warp)
            self.turn = (self.turn + 1) % len(self.order)
            self.moved.notify_all()


def rounded(weight: PackedWeight) -> torch.Tensor:
    """W in fp64, as the tensor cores see it, or exact where scales come last."""
    exact = weight.dequantize(torch.float64)
    return exact.to(weight.dtype).double() if weight.group_size else exact


def case(config: PortableConfig, n: int, k: int, m: int) -> tuple[PackedWeight, torch.Tensor]:
    dtype = DTYPES[config.dtype]
    weight = known(n, k, config.format.bits, config.group_size or None, config.format.has_zeros, dtype).pack()
    return weight, torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_products_with_tails_of_all_sizes(config: PortableConfig, run_on):
    """K ends within a k block, N within the first tile of a block, M within a second tile of tokens."""
    k = 264 if config.group_size == 256 else 136
    weight, x = case(config, 130, k, config.tile_m + 3)
    found = Launch(config, weight, x, 1, run_on).product()
    exact = (x.double() @ rounded(weight).T).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("config", SOME, ids=lambda config: config.name)
def test_parts_of_k_add_up(config: PortableConfig, run_on):
    weight, x = case(config, 64, 576, 9)
    found = Launch(config, weight, x, 3, run_on).product()
    exact = (x.double() @ rounded(weight).T).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("config", [SOME[0], replace(SOME[0], num_stages=4), *SOME[-2:]], ids=lambda c: c.name)
def test_stages_are_filled_before_they_are_read_and_read_before_they_are_filled(config, order, late, run_on):
    for k, splits in ((64, 1), (128, 1), (520, 1), (576, 3)):
        k = max(k, config.group_size)
        weight, x = case(config, 64, k, 9)
        found = Pipeline(config, weight, x, splits, run_on, late=late, order=order).product()
        exact = (x.double() @ rounded(weight).T).numpy()
        np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("config", CONFIGS[:20:3], ids=lambda config: config.name)
def test_one_hot_rows_return_the_weights_rounded_once(config: PortableConfig, run_on):
    weight, _ = case(config, 64, 256, 1)
    inputs = (torch.arange(16) * 17 + 3) % 256
    x = torch.zeros(16, 256, dtype=weight.dtype)
    x[torch.arange(16), inputs] = 1
    found = torch.from_numpy(Launch(config, weight, x, 1, run_on).product()).to(weight.dtype)
    assert torch.equal(found, weight.dequantize(weight.dtype)[:, inputs].T)


@pytest.mark.parametrize("config", SOME, ids=lambda config: config.name)
def test_shared_memory_is_read_and_written_without_conflicts(config: PortableConfig, run_on):
    weight, x = case(config, 64 * config.n_tiles, 64 if config.group_size < 256 else 256, config.tile_m)
    launch = Launch(config, weight, x, 1, run_on)
    launch.product()
    assert len(launch.gpu.accesses) > 32
    for access in launch.gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


@given(problems(), st.integers(1, 5000))
@settings(max_examples=100, deadline=None)
def test_every_problem_has_a_schedule_that_fits(problem: LinearProblem, m: int):
    problem = replace(problem, m=m)
    schedule = make_portable_schedule(problem)
    config = schedule.config
    assert isinstance(config.mainloop, PortableMmaSync) and config.can_implement() is None
    assert 2 * config.smem_bytes <= config.limits.shared_bytes
    assert schedule.k_blocks * config.block_k == problem.k_pad
    assert schedule.num_ctas == schedule.num_work_tiles
    assert (schedule.splits - 1) * schedule.split_k_blocks < schedule.k_blocks


def test_rows_do_not_depend_on_each_other_if_k_is_in_one_part():
    for m in (1, 8, 17, 64, 1000):
        problem = LinearProblem(m, 4096, 4096, 4096, integers(4), "bf16", batch_invariant=True)
        assert {schedule.splits for schedule in portable_schedules(problem)} == {1}


def test_choices_are_near_the_fastest_that_was_measured():
    """Of every layer and number of rows at most 15 % from it, 3 % on average."""
    losses = []
    for (n, k, m), times in measured_portable.MICROSECONDS.items():
        schedule = make_portable_schedule(LinearProblem(m, n, k, k, integers(4), "bf16"))
        assert schedule.whole == 0
        best = min(us for parts in times.values() for us in parts.values())
        losses.append(times[schedule.config.n_tiles][schedule.splits] / best)
    assert max(losses) < 1.15 and math.prod(losses) ** (1 / len(losses)) < 1.03


@pytest.mark.parametrize("m", [1, 32, 64])
def test_tiles_of_64_and_of_128_features_are_candidates(m: int):
    found = {
        schedule.config for schedule in portable_schedules(LinearProblem(m, 4096, 4096, 4096, integers(4), "bf16"))
    }
    assert {config.n_tiles for config in found if isinstance(config.mainloop, PortableMmaSync)} == {1, 2}
    assert all(config.can_implement() is None for config in found)


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"row_parts": 2}, "row_parts 2 is not one of 1"),
        ({"dtype": "fp32"}, "dtype 'fp32' is not one of bf16, fp16"),
        ({"tile_m": 128}, "tile_m 128 is not one of 16, 32, 64"),
        ({"block_k": 128}, "block_k 128 is not one of 64"),
        ({"num_stages": 1}, "num_stages 1"),
        ({"num_stages": 20}, "bytes of shared memory exceed"),
    ],
)
def test_what_cannot_be_compiled_is_said(fields: dict, reason: str):
    assert reason in (replace(portable_config(integers(4), "bf16"), **fields).can_implement() or "")
