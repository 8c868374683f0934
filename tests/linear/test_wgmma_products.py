"""What a multiplying warp of the kernel for many rows computes, lane by lane in NumPy: addresses, decoding, staging."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.linear import decode
from cute_kernels.linear import epilogue as linear_epilogue
from cute_kernels.linear.weight import PackedWeight
from cute_kernels.linear.wgmma import box_stores, epilogue, kernel, reading, synchronous
from cute_kernels.linear.wgmma.config import BOX_K, STORE_BUFFERS, STORE_BYTES, STORE_TOKENS, WgmmaConfig
from layouts import banks
from layouts.weights import hopper
from tests.attention import warp as machine
from tests.linear.warpgroup import WarpgroupWarp, put_box, take_box

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
X, CODES, SCALES, ZEROS, STAGING = 0, 1 << 16, 5 << 15, 6 << 15, 7 << 15  # in shared memory
STAGE = 1

CONFIGS = [
    WgmmaConfig(bits, dtype, group_size, zero_point, tokens=16, group_steps=1, num_stages=2)
    for bits in (4, 8)
    for dtype in ("bf16", "fp16")
    for group_size in (0, 32, 64, 128, 256)
    for zero_point in (False, True)
] + [
    WgmmaConfig(4, "bf16", 128, tokens=64, m_tiles=2, group_steps=2, num_stages=2),
    WgmmaConfig(4, "bf16", 128, tokens=48, row_parts=6, m_tiles=2, unit_k=128, num_stages=2),
    WgmmaConfig(4, "bf16", 32, True, tokens=16, m_tiles=2, unit_k=128, group_steps=4, num_stages=2),
    WgmmaConfig(4, "bf16", 128, tokens=144, warpgroups=1, num_stages=2),
    WgmmaConfig(8, "fp16", 128, tokens=80, in_flight=2, unit_k=128, num_stages=2),
    WgmmaConfig(8, "fp16", 64, True, tokens=32, warpgroups=3, unit_k=128, group_steps=2, num_stages=2),
    WgmmaConfig(4, "bf16", 128, tokens=256, num_stages=2),
]
SYNCHRONOUS = [
    WgmmaConfig(4, "bf16", 128, tokens=16, m_tiles=2, warpgroups=4, unit_k=128, num_stages=2, synchronous=True),
    WgmmaConfig(4, "bf16", 128, tokens=16, m_tiles=2, unit_k=128, num_stages=2, synchronous=True),
    WgmmaConfig(4, "bf16", 32, True, tokens=32, m_tiles=2, unit_k=128, num_stages=2, synchronous=True),
    WgmmaConfig(4, "fp16", 64, True, tokens=16, unit_k=64, num_stages=2, synchronous=True),
    WgmmaConfig(4, "fp16", 0, tokens=16, unit_k=128, num_stages=2, synchronous=True),
    WgmmaConfig(8, "bf16", 128, True, tokens=16, m_tiles=2, unit_k=128, num_stages=2, synchronous=True),
    WgmmaConfig(8, "fp16", 0, True, tokens=16, unit_k=64, num_stages=2, synchronous=True),
]

BULK = [
    WgmmaConfig(4, "bf16", 128, num_stages=2, bulk_stores=True),
    WgmmaConfig(8, "bf16", 128, num_stages=2, bulk_stores=True),
    WgmmaConfig(4, "fp16", 128, True, tokens=128, unit_k=128, num_stages=2, bulk_stores=True),
    WgmmaConfig(4, "bf16", 0, tokens=256, num_stages=2, bulk_stores=True),
]


def make_weight(config: WgmmaConfig, seed: int = 0) -> PackedWeight:
    """A block of rows and one unit of K, or one group of them, with every code, scale and zero point different."""
    generator = torch.Generator().manual_seed(seed)
    n, k = config.block_rows, max(config.unit_k, config.group_size)
    q = torch.randint(0, 1 << config.bits, (n, k), dtype=torch.uint8, generator=generator)
    if config.bits == 4:
        q = q[:, ::2] | q[:, 1::2] << 4
    groups = (n // 64, k // config.group_size if config.group_size else 1, 64)
    scales = (torch.rand(groups, generator=generator) + 0.5).to(DTYPES[config.dtype])
    zeros = torch.randint(0, 1 << config.bits, groups, dtype=torch.uint8, generator=generator)
    points = zeros if config.zero_point else None
    return PackedWeight(hopper.pack(q, config.bits), scales, points, config.bits, config.group_size or None, (n, k))


def load_stage(shared: np.ndarray, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor) -> None:
    """Fills a stage with the first unit of a weight and all of x, as the copying warps do."""
    for tile in range(config.block_tiles):
        parts = [
            (weight.codes[tile, : config.unit_tiles], CODES, config.code_stage_bytes),
            (weight.scales[tile, : config.unit_groups], SCALES, config.scale_stage_bytes),
        ]
        if weight.zeros is not None:
            parts.append((weight.zeros[tile, : config.unit_groups], ZEROS, config.zero_stage_bytes))
        for part, start, stage_bytes in parts:
            run = part.contiguous().view(torch.uint8).numpy().reshape(-1)
            assert run.size * config.block_tiles == stage_bytes or not stage_bytes
            if stage_bytes:
                place = start + STAGE * stage_bytes + tile * run.size
                shared[place : place + run.size] = run
    for box in range(config.unit_k // BOX_K):
        part = x[:, box * BOX_K : (box + 1) * BOX_K].contiguous().view(torch.int16).numpy().view(np.uint16)
        put_box(shared, X + STAGE * config.x_stage_bytes + box * config.box_bytes, part)


class Machine:
    """All multiplying warps, one after the other, on one stage."""

    def __init__(self, config: WgmmaConfig, weight: PackedWeight, x: torch.Tensor, monkeypatch):
        self.config = config
        self.shared = np.zeros(1 << 18, np.uint8)
        load_stage(self.shared, config, weight, x)
        scales = weight.scales.view(torch.uint8).numpy().reshape(-1)
        zeros = weight.zeros.numpy().reshape(-1) if weight.zeros is not None else np.zeros(0, np.uint8)
        self.gpu = WarpgroupWarp(self.shared, np.concatenate([scales, zeros]))
        self.gpu.install(monkeypatch, kernel, reading, decode, epilogue, linear_epilogue, synchronous, box_stores)
        self.operands = SimpleNamespace(scales=0, zeros=scales.size)
        self.subject = kernel.WgmmaKernel(config)
        self.subject.release = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]

    def sums(self, warp: int, units: int = 1) -> machine.Registers:
        config, subject = self.config, self.subject
        memory = SimpleNamespace(x_address=X, codes=CODES, scales=SCALES, zeros=ZEROS)
        sums = machine.Registers(config.thread_sums, machine.Float32)
        shape = SimpleNamespace(m=config.tokens, num_tiles=config.block_tiles)
        place = subject.lane_places(shape, warp, machine.LANES)
        first_tile, item = warp // 4 * config.m_tiles, SimpleNamespace(block=0)
        channel = subject.load_channel(self.operands, shape, item, first_tile, place)
        for _ in range(units):
            if config.synchronous:
                rows = subject.synchronous.rows(machine.LANES)
                subject.synchronous.multiply_unit(sums, memory, STAGE, place, rows, channel, config.tokens)
            else:
                subject.multiply_unit(sums, memory, STAGE, place, channel, None, None, config.tokens)
        subject.put_sums(sums, list(sums), channel)
        return sums

    def stage(self, packed: bool) -> np.ndarray:
        """[tokens, block_rows], each tile's and each chunk's results as a warpgroup finds them in its buffer."""
        config = self.config
        found = np.zeros((config.tokens, config.block_rows))
        for group in range(config.warpgroups):
            warps = [(warp, self.sums(4 * group + warp)) for warp in range(4)]
            for tile in range(config.m_tiles):
                for start, tokens in config.chunks:
                    first = (tile * config.tokens + start) // 2
                    for warp, sums in warps:
                        store = epilogue.Store(STAGING, 1, warp * 32 + machine.LANES, warp, machine.LANES)
                        stage = self.subject.epilogue.stage_packed if packed else self.subject.epilogue.stage_sums
                        stage(store, sums, first, tokens)
                    rows = slice(64 * (group * config.m_tiles + tile), 64 * (group * config.m_tiles + tile + 1))
                    found[start : start + tokens, rows] = self.staged(packed, tokens)
        return found

    def stage_gated(self) -> np.ndarray:
        """[tokens, block_rows / 2]: as :meth:`stage`, gate and up in turn made one."""
        config, pitch = self.config, epilogue.GATED_PITCH
        found = np.zeros((config.tokens, config.block_rows // 2))
        for group in range(config.warpgroups):
            warps = [(warp, self.sums(4 * group + warp)) for warp in range(4)]
            for tile in range(config.m_tiles):
                for start, tokens in config.chunks:
                    for warp, sums in warps:
                        store = epilogue.Store(STAGING, 1, warp * 32 + machine.LANES, warp, machine.LANES)
                        self.subject.epilogue.stage_gated(store, sums, (tile * config.tokens + start) // 2, tokens)
                    bits = self.shared[STAGING : STAGING + tokens * pitch].view(np.int16)
                    part = torch.from_numpy(bits.reshape(tokens, -1)[:, :32].copy())
                    first = 32 * (group * config.m_tiles + tile)
                    found[start : start + tokens, first : first + 32] = part.view(DTYPES[config.dtype]).double()
        return found

    def boxes(self) -> np.ndarray:
        """[tokens, block_rows]: as :meth:`stage`, box by box as TMA takes them out of their buffers."""
        config = self.config
        found = np.zeros((config.tokens, config.block_rows))
        for group in range(config.warpgroups):
            warps = [(warp, self.sums(4 * group + warp)) for warp in range(4)]
            for number in range(config.tokens // STORE_TOKENS):
                offset = number % STORE_BUFFERS * STORE_BYTES
                for warp, sums in warps:
                    store = epilogue.Store(STAGING, 1, warp * 32 + machine.LANES, warp, machine.LANES)
                    self.subject.epilogue.boxes.stage(store, sums, number * STORE_TOKENS // 2, offset)
                bits = take_box(self.shared, STAGING + offset, STORE_TOKENS)
                box = torch.from_numpy(bits.view(np.int16)).view(DTYPES[config.dtype]).double().numpy()
                rows = slice(64 * group, 64 * (group + 1))
                found[number * STORE_TOKENS : (number + 1) * STORE_TOKENS, rows] = box
        return found

    def staged(self, packed: bool, tokens: int) -> np.ndarray:
        if not packed:
            pitch = self.config.staging_pitch
            return self.shared[STAGING : STAGING + tokens * pitch].view(np.float32).reshape(tokens, -1)[:, :64]
        pitch = epilogue.PACKED_PITCH
        bits = self.shared[STAGING : STAGING + tokens * pitch].view(np.int16).reshape(tokens, -1)[:, :64]
        return torch.from_numpy(bits.copy()).view(DTYPES[self.config.dtype]).double().numpy()


def rounded(config: WgmmaConfig, weight: PackedWeight) -> torch.Tensor:
    """The first unit of W [rows, unit_k] in fp64, as the tensor cores see it, or exact where scales come last."""
    exact = weight.dequantize(torch.float64)
    rounds = config.group_size and not config.synchronous
    return (exact.to(weight.dtype).double() if rounds else exact)[:, : config.unit_k]


@pytest.mark.parametrize("config", CONFIGS + SYNCHRONOUS, ids=lambda config: config.name)
def test_a_unit_is_multiplied(config: WgmmaConfig, monkeypatch):
    weight = make_weight(config)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(config.tokens, config.unit_k, generator=generator).to(weight.dtype)
    found = Machine(config, weight, x, monkeypatch).stage(packed=False)
    exact = (x.double() @ rounded(config, weight).T).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("config", CONFIGS[-7:], ids=lambda config: config.name)
def test_units_add_up(config: WgmmaConfig, monkeypatch):
    weight = make_weight(config)
    x = torch.randn(config.tokens, config.unit_k, generator=torch.Generator().manual_seed(3)).to(weight.dtype)
    subject = Machine(config, weight, x, monkeypatch)
    count = config.thread_sums
    one, three = (np.array([np.asarray(value) for value in subject.sums(5, units)[:count]]) for units in (1, 3))
    np.testing.assert_allclose(three, 3 * one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [CONFIGS[7], *CONFIGS[-7:], *SYNCHRONOUS[:2]], ids=lambda config: config.name)
def test_gate_and_up_in_turn_are_made_one(config: WgmmaConfig, monkeypatch):
    weight = make_weight(config)
    scale = 0.1 if config.bits == 4 else 0.003  # within the range of fp16
    x = scale * torch.randn(config.tokens, config.unit_k, generator=torch.Generator().manual_seed(2))
    x = x.to(weight.dtype)
    subject = Machine(config, weight, x, monkeypatch)
    found = torch.from_numpy(subject.stage_gated())
    y = x.double() @ rounded(config, weight).T
    exact = torch.nn.functional.silu(y[:, ::2]) * y[:, 1::2]
    torch.testing.assert_close(found, exact, rtol=1e-2, atol=1e-3 * float(exact.abs().max()))
    for access in subject.gpu.accesses:
        if access.kind == "st":
            assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


@pytest.mark.parametrize(
    "config", [*CONFIGS[:40:5], *CONFIGS[2:40:5], *CONFIGS[-7:], *SYNCHRONOUS], ids=lambda config: config.name
)
def test_one_hot_rows_return_the_weights_rounded_once(config: WgmmaConfig, monkeypatch):
    weight = make_weight(config)
    x = torch.zeros(config.tokens, config.unit_k, dtype=weight.dtype)
    inputs = (torch.arange(config.tokens) * 5 + 3) % config.unit_k
    x[torch.arange(config.tokens), inputs] = 1
    wanted = weight.dequantize(weight.dtype)[:, inputs].T.double().numpy()
    assert np.array_equal(Machine(config, weight, x, monkeypatch).stage(packed=True), wanted)


@pytest.mark.parametrize("config", [CONFIGS[7], *CONFIGS[-7:], *SYNCHRONOUS[:2]], ids=lambda config: config.name)
@pytest.mark.parametrize("packed", [False, True])
def test_shared_memory_is_read_and_written_without_conflicts(config: WgmmaConfig, packed: bool, monkeypatch):
    weight = make_weight(config)
    subject = Machine(config, weight, torch.zeros(config.tokens, config.unit_k, dtype=weight.dtype), monkeypatch)
    subject.stage(packed)
    assert len(subject.gpu.accesses) > 32
    for access in subject.gpu.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


@pytest.mark.parametrize("config", BULK, ids=lambda config: config.name)
def test_boxes_are_what_tma_stores(config: WgmmaConfig, monkeypatch):
    """One-hot rows of x come out as the weights, and nobody waits for banks."""
    weight = make_weight(config)
    x = torch.zeros(config.tokens, config.unit_k, dtype=weight.dtype)
    inputs = (torch.arange(config.tokens) * 5 + 3) % config.unit_k
    x[torch.arange(config.tokens), inputs] = 1
    subject = Machine(config, weight, x, monkeypatch)
    wanted = weight.dequantize(weight.dtype)[:, inputs].T.double().numpy()
    assert np.array_equal(subject.boxes(), wanted)
    stores = [access for access in subject.gpu.accesses if access.kind == "stmatrix"]
    assert len(stores) == config.tokens // 16 * config.math_warps
    for access in stores:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


@pytest.mark.parametrize("config", BULK, ids=lambda config: config.name)
def test_a_buffer_is_free_when_the_next_box_is_put_there(config: WgmmaConfig):
    """Also that of the next tile's first box: buffers are taken in turn over all tiles."""
    boxes = config.tokens // STORE_TOKENS
    assert boxes % STORE_BUFFERS == 0 and STORE_BUFFERS * STORE_BYTES <= config.staging_bytes
    assert config.staging_bytes % 1024 == 0
    in_flight: list[int] = []  # buffers of boxes that may not have left yet, the oldest first
    for number in (number for _ in range(3) for number in range(boxes)):
        in_flight = in_flight[max(len(in_flight) - (STORE_BUFFERS - 1), 0) :]  # what the wait leaves
        assert number % STORE_BUFFERS not in in_flight
        in_flight.append(number % STORE_BUFFERS)
