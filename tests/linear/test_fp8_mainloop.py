"""K blocks of FP8 products, lane by lane in NumPy: operands of every format, sums of groups, scales, staging."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import quantize_activations
from cute_kernels.device.packed_math import HopperMath
from cute_kernels.device.pipeline import Pipeline
from cute_kernels.formats.weights import registered_formats, weight_format
from cute_kernels.formats.weights.fp4 import E2m1Codes
from cute_kernels.gemm.experts.wgmma.kernel import ExpertTiles, x_scale_shift
from cute_kernels.gemm.operands.fp8_config import X_GROUP, Fp8Wgmma, x_group
from cute_kernels.gemm.operands.fp8_mainloop import BARRIER, PingPong
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma import epilogue, kernel
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import TMA_TILE_K
from cute_kernels.gemm.wgmma.results import RowExchange
from layouts import banks
from simulator import Altered, PlainThread, stand_in
from tests.attention import warp as machine
from tests.linear.cases import random_weight
from tests.linear.test_wgmma_limb_stages import STAGES, Stages
from tests.linear.test_wgmma_products import CODES, DTYPES, SCALES, STAGE, STAGING, X
from tests.linear.warpgroup import WarpgroupWarp, e4m3_numbers, put_tma_tile

X_SCALES = 13 << 14
ORDER = np.arange(X_GROUP).reshape(-1, 2, 8).transpose(0, 2, 1).reshape(-1)  # 0, 8, 1, 9, .. of each 16
CONFIGS = [
    WgmmaConfig(weight_format(name), dtype, tile_m=m, n_tiles=n, block_k=128, num_stages=2, mainloop=Fp8Wgmma())
    for name, dtype, m, n in (
        ("fp8_block", "bf16", 16, 1),
        ("fp8_block", "fp16", 112, 1),
        ("fp8_block", "bf16", 256, 1),
        ("fp8", "bf16", 192, 1),
        ("mxfp4", "bf16", 240, 1),
        ("w4g128", "bf16", 128, 1),
        ("fp8_block_e8m0", "bf16", 8, 2),
        ("mxfp8", "bf16", 16, 1),
        ("e4m3_g64f32", "bf16", 48, 1),
        ("fp8", "bf16", 32, 2),
        ("mxfp4", "bf16", 16, 2),
        ("mxfp4", "bf16", 64, 1),
        ("w4g128", "bf16", 16, 1),
        ("w4g256", "fp16", 8, 1),
        ("w4g32", "bf16", 32, 2),
        ("w4gchannel", "bf16", 48, 1),
    )
]
every_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


def make_weight(config: WgmmaConfig) -> PackedWeight:
    """A block of rows and one k block of K, or one group of them, with every code and scale different."""
    k = max(config.block_k, config.group_size)
    return random_weight(config.format, DTYPES[config.dtype], config.block_rows, k)


def rounded(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of E4M3 [rows, 128], scales fp32 [rows]) of x."""
    codes, scales = quantize_activations(x, X_GROUP)
    return codes.view(torch.uint8).numpy(), scales[:, 0].numpy()


def load_stage(
    shared: np.ndarray,
    config: WgmmaConfig,
    weight: PackedWeight,
    codes: np.ndarray,
    scales: np.ndarray,
    shift: int = 0,
) -> None:
    """Fills a stage with the first k block of a weight and of x, as the producer warps do; shift: of experts' tiles,
    scales of x before their first one."""
    parts = [(weight.codes[:, : config.k_block_tiles], CODES, config.code_stage_bytes)]
    if config.group_size:
        parts.append((weight.scales[:, : config.k_block_groups], SCALES, config.scale_stage_bytes))
    for part, start, stage_bytes in parts:
        run = part.contiguous().view(torch.uint8).numpy().reshape(-1)
        assert run.size == stage_bytes
        shared[start + STAGE * stage_bytes : start + (STAGE + 1) * stage_bytes] = run
    rows = np.ascontiguousarray(codes[:, ORDER]).view(np.uint16)
    assert rows.shape[1] == TMA_TILE_K and config.x_stage_bytes == config.tma_tile_bytes
    put_tma_tile(shared, X + STAGE * config.x_stage_bytes, rows)
    place = X_SCALES + STAGE * config.x_scale_stage_bytes + 4 * shift
    shared[place : place + 4 * len(scales)] = scales.view(np.uint8)


class Machine:
    """All consumer warps, one after the other, on one stage."""

    def __init__(self, config: WgmmaConfig, weight: PackedWeight, codes: np.ndarray, scales: np.ndarray, run_on):
        self.config, self.weight = config, weight
        self.shared = np.zeros(1 << 19, np.uint8)
        load_stage(self.shared, config, weight, codes, scales)
        of_weight = weight.scales.view(torch.uint8).numpy().reshape(-1)
        self.x_scales = of_weight.size  # their address, where rows have one each
        self.gpu = WarpgroupWarp(self.shared, np.concatenate((of_weight, scales.view(np.uint8))))
        meet = {"barrier": lambda **_: None, "barrier_arrive": lambda **_: None}
        run_on(Altered(self.gpu, arch=meet))
        self.subject: Any = kernel.WgmmaKernel(config)
        self.consumers: Any = self.subject.consumers

    def acc(self, warp: int, k_blocks: int = 1) -> machine.Registers:
        config, consumers = self.config, self.consumers
        memory = SimpleNamespace(x_address=X, codes=CODES, scales=SCALES, x_scales=X_SCALES)
        sizes = {"m": config.tile_m, "num_tiles": config.block_tiles, "scale_groups": 1}
        shape = SimpleNamespace(**sizes, x_scales=machine.Int64(self.x_scales))
        work_tile, first_tile = SimpleNamespace(block=0, m_tile=0), warp // 4 * config.n_tiles
        acc = machine.Registers(config.thread_acc, machine.Float32)
        place = consumers.lane(shape, warp, machine.LANES)
        channel = consumers.channel.load(SimpleNamespace(scales=0), shape, work_tile, first_tile, place)
        x_place = consumers.mainloop.reader.x_scale_place(work_tile)
        for _ in range(k_blocks):
            consumers.mainloop.multiply_k_block(acc, memory, STAGE, place, x_place, config.tile_m)
        consumers.mainloop.finish(acc, shape, memory, work_tile, place, channel, None, None)
        return acc

    def results(self) -> np.ndarray:
        """[tokens, block_rows]: each tile's results as a warpgroup finds them in its buffer."""
        config = self.config
        found = np.zeros((config.tile_m, config.block_rows))
        for group in range(config.warpgroups):
            warps = [(warp, self.acc(4 * group + warp)) for warp in range(4)]
            for tile in range(config.n_tiles):
                for warp, acc in warps:
                    store = stand_in(epilogue.Store)(STAGING, 1, warp * 32 + machine.LANES, warp, machine.LANES)
                    self.subject.epilogue.stage_acc(store, acc, tile * config.tile_m // 2, config.tile_m)
                pitch, first = config.staging_pitch, 64 * (group * config.n_tiles + tile)
                staged = self.shared[STAGING : STAGING + config.tile_m * pitch].view(np.float32)
                found[:, first : first + 64] = staged.reshape(config.tile_m, -1)[:, :64]
        return found


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[7]], ids=lambda config: config.name)
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("present", [1, 2])
def test_tiles_of_experts_begin_at_any_row_and_end_early(config: WgmmaConfig, shift: int, present: int, run_on):
    config = replace(config, row_parts=2 if config.tile_m == 16 else 4)
    weight, tile_m = make_weight(config), present * config.part_m
    codes, scales = rounded(torch.randn(config.tile_m, X_GROUP, generator=torch.Generator().manual_seed(4)))
    subject = Machine(config, weight, codes, scales, run_on)
    load_stage(subject.shared, config, weight, codes, scales, shift)
    consumers: Any = kernel.WgmmaKernel(config, ExpertTiles(config)).consumers
    reader, work_tile = consumers.mainloop.reader, SimpleNamespace(block=0, token=4 + shift, expert=0)
    reader.x_scale_shift = lambda work_tile: machine.Int32(x_scale_shift(work_tile))
    memory = SimpleNamespace(x_address=X, codes=CODES, scales=SCALES, x_scales=X_SCALES)
    acc = machine.Registers(config.thread_acc, machine.Float32)
    place = consumers.lane(SimpleNamespace(m=config.tile_m), 5, machine.LANES)
    consumers.mainloop.multiply_k_block(acc, memory, STAGE, place, reader.x_scale_place(work_tile), tile_m)
    want = exact(weight, codes, scales)[:, 64 * config.n_tiles : 64 * (config.n_tiles + 1)]  # of the second warpgroup
    for i in range(tile_m // 2):
        rows = 16 + machine.LANES // 4 + 8 * (i // 2 % 2)  # of its second warp
        columns = i // 4 * 8 + machine.LANES % 4 * 2 + i % 2
        np.testing.assert_allclose(np.asarray(acc[i]), want[columns, rows], rtol=1e-5, atol=1e-5 * np.abs(want).max())


def exact(weight: PackedWeight, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    rows = e4m3_numbers(codes) * scales[:, None].astype(np.float64)
    return rows @ weight.dequantize(torch.float64)[:, :X_GROUP].numpy().T


@every_config
def test_a_k_block_is_multiplied(config: WgmmaConfig, run_on):
    weight = make_weight(config)
    x = torch.randn(config.tile_m, X_GROUP, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    codes, scales = rounded(x)
    found, want = Machine(config, weight, codes, scales, run_on).results(), exact(weight, codes, scales)
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


@every_config
def test_one_hot_rows_return_the_weights(config: WgmmaConfig, run_on):
    """In fp32, to the bit."""
    weight = make_weight(config)
    inputs = (np.arange(config.tile_m) * 5 + 3) % X_GROUP
    codes, scales = np.zeros((config.tile_m, X_GROUP), np.uint8), np.ones(config.tile_m, np.float32)
    codes[np.arange(config.tile_m), inputs] = 0x38  # 1
    want = weight.dequantize(torch.float32)[:, inputs].T.numpy()
    np.testing.assert_array_equal(Machine(config, weight, codes, scales, run_on).results(), want)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[5]], ids=lambda config: config.name)
def test_k_blocks_add_up(config: WgmmaConfig, run_on):
    weight = make_weight(config)
    codes, scales = rounded(torch.randn(config.tile_m, X_GROUP, generator=torch.Generator().manual_seed(3)))
    subject = Machine(config, weight, codes, scales, run_on)
    one, three = (np.array([np.asarray(value) for value in subject.acc(5, k_blocks)]) for k_blocks in (1, 3))
    np.testing.assert_allclose(three, 3 * one, rtol=1e-5, atol=1e-5)


@every_config
def test_shared_memory_is_read_without_conflicts(config: WgmmaConfig, run_on):
    codes, scales = rounded(torch.zeros(config.tile_m, X_GROUP))
    subject = Machine(config, make_weight(config), codes, scales, run_on)
    subject.acc(0)
    assert len(subject.gpu.accesses) >= config.n_tiles * config.k_block_tiles  # of codes alone
    for access in subject.gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


@pytest.mark.parametrize("name", ["mxfp4", "w4g128"])
def test_each_code_of_four_bits_is_an_e4m3_number(name: str, run_on):
    """In every place of a word."""
    run_on(WarpgroupWarp(np.zeros(0, np.uint8), np.zeros(0, np.uint8)))
    form = weight_format(name)
    kind = form.e4m3_decoder()
    assert kind is not None
    decoder = kind(HopperMath("bf16"))
    values = (
        form.dequantize(torch.arange(16, dtype=torch.uint8).view(1, 1, 16), unit_scales(name), None).numpy().reshape(-1)
    )
    for place in range(8):
        words = machine.Uint32((machine.LANES.astype(np.uint32) % 16) << 4 * place | 0x88888888 & ~(15 << 4 * place))
        registers = decoder.fragment([words])
        found = e4m3_numbers(np.stack([np.asarray(word, np.uint32) for word in registers]).view(np.uint8))
        # Places 0, 2, 4, 6 are row g's bytes in order, the others those of row g + 8.
        byte = found.reshape(2, 32, 4)[place % 2, :, place // 2]
        np.testing.assert_array_equal(byte * decoder.unit, values[np.arange(32) % 16])


def unit_scales(name: str) -> torch.Tensor:
    """A stored scale of 1."""
    return torch.full((1, 1), 127, dtype=torch.uint8) if name == "mxfp4" else torch.ones(1, 1, dtype=torch.bfloat16)


class WholeK(Stages):
    """Stages of FP8 products: see `Stages`."""

    def __init__(self, shared: np.ndarray, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, begin: int):
        super().__init__(shared, config, weight, x, begin)
        codes, scales = quantize_activations(x, X_GROUP)
        if not x_group(config.format):  # scales of rows meet the accumulators at the end
            scales = torch.ones_like(scales)
        self.found, self.scales = codes.view(torch.uint8).numpy(), scales.T.contiguous().numpy()

    def fill(self, stage: int, k_block: int) -> None:
        config, weight = self.config, self.weight
        (x, _), (codes, _), (scales, _), (x_scales, _) = self.places(stage)
        groups = config.k_block_groups
        for part, start in (
            (weight.codes[:, k_block * config.k_block_tiles : (k_block + 1) * config.k_block_tiles], codes),
            (weight.scales[:, k_block * groups : (k_block + 1) * groups], scales),
        ):
            run = part.contiguous().view(torch.uint8).numpy().reshape(-1)
            self.shared[start : start + run.size] = run
        rows = self.found[:, k_block * X_GROUP : (k_block + 1) * X_GROUP][:, ORDER]
        put_tma_tile(self.shared, x, np.ascontiguousarray(rows).view(np.uint16))
        if config.x_scale_stage_bytes:
            self.shared[x_scales : x_scales + 4 * len(rows)] = self.scales[k_block].copy().view(np.uint8)


@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "w4g128"])
@pytest.mark.parametrize("begin", [0, 3])
def test_every_k_block_is_multiplied_once_and_its_stage_released(name: str, begin: int, run_on):
    """Over more k blocks than there are stages, within 1e-6 of fp64."""
    config = replace(CONFIGS[0], format=weight_format(name), num_stages=STAGES)
    weight = random_weight(config.format, DTYPES["bf16"], config.block_rows, 7 * X_GROUP)
    x = torch.randn(config.tile_m, 7 * X_GROUP, generator=torch.Generator().manual_seed(5)).bfloat16()
    state = WholeK(np.zeros(1 << 18, np.uint8), config, weight, x, begin)
    run_on(Altered(WarpgroupWarp(state.shared, np.zeros(0, np.uint8)), arch={"mbarrier_wait": state.wait}))
    subject: Any = kernel.WgmmaKernel(config).consumers
    subject.stages.release = state.release
    pipeline = Pipeline(stand_in(0), stand_in(STAGES), STAGES)
    memory = SimpleNamespace(x_address=X, codes=CODES, scales=SCALES, x_scales=X_SCALES, pipeline=pipeline)
    place = subject.lane(SimpleNamespace(m=config.tile_m), 6, machine.LANES)
    acc, work_tile = machine.Registers(config.thread_acc, machine.Float32), SimpleNamespace(begin=begin, end=7)
    begins = pipeline.consumer_state(), pipeline.consumer_state()
    subject.mainloop.multiply(acc, memory, work_tile, place, [], begins, True, config.tile_m)
    assert state.filled == state.given_back == 7 - begin
    numbers = e4m3_numbers(state.found) * state.scales.T.repeat(X_GROUP, axis=1)
    want = numbers[:, begin * X_GROUP :] @ weight.dequantize(torch.float64).numpy()[:, begin * X_GROUP :].T
    for i in range(config.thread_acc):
        rows = 64 + 32 + machine.LANES // 4 + 8 * (i // 2 % 2)  # of the second warpgroup's third warp
        columns = i // 4 * 8 + machine.LANES % 4 * 2 + i % 2
        np.testing.assert_allclose(np.asarray(acc[i]), want[columns, rows], rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_only_what_e4m3_can_say_is_taken():
    config = CONFIGS[0]
    for name in ("w8g128", "nvfp4", "w4g128z"):
        assert "FP8 products want" in (replace(config, format=weight_format(name)).can_implement() or "")
    for change in ({"block_k": 64}, {"reduction": RowExchange()}, {"tile_m": 264}):
        assert replace(config, **change).can_implement(), change
    assert replace(config, tile_m=256, n_tiles=2).can_implement()
    assert all(config.can_implement() is None for config in CONFIGS)
    exact = {form.codes_name for form in registered_formats() if form.e4m3_decoder()}
    assert {config.format.codes_name for config in CONFIGS} == exact


@pytest.mark.parametrize("spread", [0, 5, 11, 12, 20])
def test_powers_of_two_of_a_k_block_are_folded_exactly_up_to_eleven_below_the_largest(spread: int, run_on):
    """Beyond, numbers are at most those of twelve powers below, which are less than 2**-9 of the largest there is."""
    run_on(WarpgroupWarp(np.zeros(0, np.uint8), np.zeros(0, np.uint8)))
    decoder, form = E2m1Codes(HopperMath("bf16")), weight_format("mxfp4")
    largest, powers = 130, np.array([0, spread, spread, 0])
    words = [machine.Uint32(np.full(32, largest - power, np.uint32)) for power in powers for _ in range(2)]
    tables, scales = decoder.fold(words)
    codes = np.arange(16, dtype=np.uint32)
    want = form.dequantize(torch.from_numpy(codes.astype(np.uint8)).view(1, 16, 1), torch.full((1, 16), 127), None)
    for power, table in zip(powers, tables, strict=True):
        word = machine.Uint32(np.tile(codes, 2) * np.uint32(0x11111111))  # the code of a lane, in every place
        found = [e4m3_numbers(np.asarray(x, np.uint32).view(np.uint8))[::4] for x in decoder.fragment([word], table)]
        for half in range(2):
            numbers = found[half][:16] * np.asarray(scales[half])[:16]
            exact = want.numpy().reshape(-1) * 2.0 ** (largest - 127 - power)
            if power <= 11:
                np.testing.assert_array_equal(numbers, exact)
            assert (np.abs(numbers - exact) < 2.0**-9 * 6 * 2.0 ** (largest - 127)).all()


def test_each_wait_of_a_warpgroup_has_an_arrival_of_the_other(run_on):
    met: list[tuple[str, int]] = []
    arch = {
        "barrier": lambda barrier_id, number_of_threads: met.append(("waits", int(np.unique(barrier_id).item()))),
        "barrier_arrive": lambda barrier_id, number_of_threads: met.append(
            ("arrives", int(np.unique(barrier_id).item()))
        ),
    }
    run_on(Altered(PlainThread(), arch=arch))
    config = next(config for config in CONFIGS if config.mainloop.is_ping_pong(config))
    for warpgroup in range(2):
        ping_pong = PingPong(config)
        ping_pong.begin(4 * warpgroup)
        for _ in range(6):
            ping_pong.wait(4 * warpgroup)
            ping_pong.arrive(4 * warpgroup)
        ping_pong.end(4 * warpgroup)
    waits, arrivals = ([number for kind, number in met if kind == wanted] for wanted in ("waits", "arrives"))
    assert len(waits) == 13 and sorted(waits) == sorted(arrivals) and met[0] == ("waits", BARRIER)
