"""Limbs that a CTA makes of x itself: every warp in NumPy, against TMA tiles of limbs that TMA brings."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import FP8_BLOCK, MXFP4, NVFP4, integers
from cute_kernels.gemm.wgmma import resident_rows
from cute_kernels.gemm.wgmma.config import ResidentConfig, WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, TMA_TILE_K, ResidentLimbs
from cute_kernels.gemm.wgmma.resident_rows import K_BLOCK_TMA_TILES
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP
from layouts import banks
from simulator.gpu import Gpu
from tests.attention.warp import LANES, Int32, Warp, elements, from_halves, halves
from tests.linear.limbs import GROUP, ORDER, e4m3_limbs_of, in_columns, limbs_of
from tests.linear.warpgroup import put_tma_tile

X, X_SCALES, X_SUMS = 1 << 10, 1 << 18, 3 << 17
CONFIG = WgmmaConfig(integers(4), "bf16", tile_m=16, block_k=128, warpgroups=4, mainloop=ResidentLimbs())
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LimbWarp(Warp):
    """A warp that makes limbs of rows of x, which are its global memory."""

    def load_global_if(self, condition, address, offset: int, num_words: int = 4, *, constant: bool = True):
        assert not constant, "the kernel before may be writing x"
        return super().load_global_if(np.asarray(condition) != 0, address, offset, num_words, constant=constant)

    def greater_magnitude(self, a, b, *, dtype: str):
        kind = "bf16" if dtype == "bf16" else "f16"
        left, right = (np.abs(elements(word, kind)) for word in (a, b))
        nan = np.uint16(0x7FFF)
        found = np.where(left >= right, halves(a), halves(b))
        return from_halves(np.where(np.isnan(left) | np.isnan(right), nan, found))

    pack_e4m3x2 = Gpu.pack_e4m3x2


def made(config: ResidentConfig, x: torch.Tensor, begin: int, end: int, run_on) -> Warp:
    """Shared memory after all steps of all warps of a CTA that has k blocks [begin, end) of x [m, k]."""
    rows, k = x.shape
    gpu = LimbWarp(np.full(1 << 19, 0xAA, np.uint8), x.contiguous().view(torch.uint8).numpy().reshape(-1))
    run_on(gpu)
    subject = resident_rows.rows_in(resident_rows.room_of(config))
    parts = -(-rows // WGMMA_N_STEP)
    tile_m, count = parts * WGMMA_N_STEP, end - begin
    padded = torch.zeros(tile_m, end * GROUP, dtype=x.dtype)
    padded[:rows, : min(k, end * GROUP)] = x[:, : end * GROUP]
    for tma_tile in range(
        K_BLOCK_TMA_TILES * count * (not config.mainloop.loads)
    ):  # what TMA brings: zeros where x has nothing
        for part in range(parts):
            inputs = slice(begin * GROUP + tma_tile * TMA_TILE_K, begin * GROUP + (tma_tile + 1) * TMA_TILE_K)
            some = (
                padded[part * WGMMA_N_STEP : (part + 1) * WGMMA_N_STEP, inputs].contiguous().view(torch.int16).numpy()
            )
            put_tma_tile(
                gpu.shared_memory, X + (tma_tile * parts + part) * 2 * TMA_TILE_K * WGMMA_N_STEP, some.view(np.uint16)
            )
    bits = int(subject.step_bits(np.full(1, count, np.int32))[0])
    assert resident_rows.STEP_K_BLOCKS << bits >= count
    done: set[tuple[int, int]] = set()
    source = SimpleNamespace(address=0, rows=rows, row_pieces=k // 8, row=lambda row: row)
    steps = -(-rows // resident_rows.STEP_ROWS) << bits
    for step in range(steps):
        row, k_block = subject.place(bits, step, LANES)
        start = Int32(X + (k_block * 2 * tile_m + row) * resident_rows.ROW_BYTES)
        if config.mainloop.loads:
            words = subject.load_global(source, begin, bits, steps, step, LANES)  # type: ignore
        else:
            words = subject.load(start, tile_m, Int32(row), LANES)
        scale, limbs, total = subject.split_summed(words)
        # Lanes without a k block store behind the last one, in which nobody is interested; the kernel's do not.
        subject.store(start, tile_m, Int32(row), LANES, limbs)
        for lane in range(0, 32, resident_rows.GROUP_LANES):
            at = X_SCALES // 4 + int(k_block[lane]) * tile_m + int(row[lane])
            gpu.shared_memory.view(np.uint32)[at] = np.asarray(scale)[lane]
            if total is not None:
                gpu.shared_memory.view(np.uint32)[at + (X_SUMS - X_SCALES) // 4] = np.asarray(total)[lane]
            assert (int(row[lane]), int(k_block[lane])) not in done
            done.add((int(row[lane]), int(k_block[lane])))
    assert {(row, k_block) for row in range(rows) for k_block in range(count)} <= done
    return gpu


@pytest.mark.parametrize(
    ("dtype", "form"), [("bf16", integers(4)), ("fp16", integers(4)), ("bf16", MXFP4), ("bf16", FP8_BLOCK)], ids=str
)
@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize(
    ("rows", "k", "begin", "end"),
    [(1, 4096, 0, 32), (16, 4096, 16, 32), (5, 1000, 0, 8), (9, 1192, 3, 10), (16, 640, 2, 5), (8, 3072, 8, 24)],
)
def test_limbs_lie_as_boxes_of_limbs_would(dtype, form, loads: bool, rows: int, k: int, begin: int, end: int, run_on):
    generator = torch.Generator().manual_seed(rows + k)
    x = (torch.randn(rows, k, generator=generator) * torch.rand(rows, 1, generator=generator) ** 8).to(DTYPES[dtype])
    x[0, : k // 2] = 0
    config = replace(CONFIG, format=form, dtype=dtype, mainloop=ResidentLimbs(loads=loads))
    found = made(config, x, begin, end, run_on).shared_memory
    limbs, scales = e4m3_limbs_of(x, 2.0**form.byte_exponent) if form.bytes_in_e4m3 else limbs_of(x)
    parts = -(-rows // WGMMA_N_STEP)
    zeros = np.zeros((parts * WGMMA_N_STEP - rows, *limbs.shape[1:]), limbs.dtype)
    limbs = np.concatenate([limbs, zeros])
    wanted = np.zeros(1 << 19, np.uint8)
    for k_block in range(begin, end):
        at = X + (k_block - begin) * parts * 2 * LIMB_GROUP * WGMMA_N_STEP
        for limb in range(2):
            for part in range(parts):
                some = limbs[part * WGMMA_N_STEP : (part + 1) * WGMMA_N_STEP, k_block, limb].copy().view(np.uint16)
                put_tma_tile(wanted, at + (limb * parts + part) * 2 * TMA_TILE_K * WGMMA_N_STEP, some)
        first = X_SCALES + (k_block - begin) * parts * WGMMA_N_STEP * 4
        assert np.array_equal(found[first : first + 4 * rows], scales[k_block].view(np.uint8))
        for part in range(2 * parts):  # what lies in missing rows is nobody's
            first = at + part * 2 * TMA_TILE_K * WGMMA_N_STEP
            size = 2 * TMA_TILE_K * min(WGMMA_N_STEP, rows - part % parts * WGMMA_N_STEP)
            assert np.array_equal(found[first : first + size], wanted[first : first + size])
    assert GROUP == LIMB_GROUP


@pytest.mark.parametrize(("rows", "k"), [(1, 4096), (2, 1192), (3, 640), (4, 1000)])
def test_groups_of_half_an_mma_have_columns_of_their_own(rows: int, k: int, run_on):
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows + k)).bfloat16()
    config = replace(CONFIG, format=NVFP4, tile_m=8, mainloop=ResidentLimbs(loads=True))
    found = made(config, x, 0, -(-k // GROUP), run_on)
    limbs, _ = in_columns(*e4m3_limbs_of(torch.cat((x, torch.zeros(4 - rows, k, dtype=x.dtype)))))
    for k_block, limb in product(range(-(-k // GROUP)), range(2)):
        wanted, at = np.zeros(1 << 19, np.uint8), X + (2 * k_block + limb) * 8 * LIMB_GROUP
        put_tma_tile(wanted, at, limbs[:, k_block, limb].copy().view(np.uint16))
        for column in (column for column in range(8) if column % 4 < rows):
            place = slice(at + column * LIMB_GROUP, at + (column + 1) * LIMB_GROUP)
            assert np.array_equal(found.shared_memory[place], wanted[place]), (k_block, limb, column)
    for access in found.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


@pytest.mark.parametrize("room", [4, 9, 11, 16, 23, 33, 64, 67])
def test_steps_reach_each_k_block_that_there_is_room_for(room: int, run_on):
    run_on(LimbWarp(np.zeros(1, np.uint8), np.zeros(1, np.uint8)))
    subject = resident_rows.ResidentRows(resident_rows.RowsRoom("bf16", 8, 8, room))
    for count in range(1, room + 1):
        assert resident_rows.STEP_K_BLOCKS << int(subject.step_bits(np.full(1, count, np.int32))[0]) >= count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loads", [False, True])
def test_sums_of_a_group_are_those_of_its_limbs(dtype: str, loads: bool, run_on):
    rows, k, count = 5, 1000, 8
    x = (torch.randn(rows, k, generator=torch.Generator().manual_seed(1)) + 2).to(DTYPES[dtype])
    config = replace(CONFIG, format=integers(4, zero_points=True), dtype=dtype, mainloop=ResidentLimbs(loads=loads))
    found = made(config, x, 0, count, run_on).shared_memory[X_SUMS:].view(np.int32)[: 8 * count].reshape(count, 8)
    limbs = limbs_of(x)[0].astype(np.int64).sum(axis=-1)
    assert np.array_equal(found[:, :rows], (256 * limbs[..., 0] + limbs[..., 1]).T)


def test_limbs_in_e4m3_add_up_to_x():
    """bf16 numbers of at least 2**-8 of the largest exactly, the others within 2**-15 of it."""
    x = torch.randn(64, 4 * GROUP, generator=torch.Generator().manual_seed(2)).bfloat16() ** 7
    limbs, scales = e4m3_limbs_of(x)
    sums = torch.from_numpy(limbs).view(torch.float8_e4m3fn).double().sum(2).numpy() * scales.T[..., None] / 64
    wanted = x.double().numpy().reshape(64, 4, GROUP)[..., ORDER]
    largest = np.abs(wanted).max(axis=2, keepdims=True)
    assert np.abs(sums - wanted).max(initial=0, where=np.abs(wanted) >= largest / 2**8) == 0
    assert (np.abs(sums - wanted) <= largest / 2**15).all() and (sums != wanted).any()


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("loads", [False, True])
def test_limbs_are_stored_without_conflicts(loads: bool, rows: int, run_on):
    found = made(
        replace(CONFIG, mainloop=ResidentLimbs(loads=loads)), torch.randn(rows, 4096).bfloat16(), 0, 32, run_on
    )
    assert len(found.accesses) == -(-rows // 2) * 8 * (4 if loads else 8)
    for access in found.accesses:
        assert banks.report(list(access.addresses), access.width, access.kind).conflicts == 0, access


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_rows_that_are_not_finite_have_no_scale(dtype: str, value: float, run_on):
    x = torch.randn(3, 1024).to(DTYPES[dtype])
    x[1, 700] = value
    found = made(replace(CONFIG, dtype=dtype), x, 0, 8, run_on).shared_memory
    scales = found[X_SCALES : X_SCALES + 4 * 8 * 8].view(np.float32).reshape(8, 8)[:, :3]
    assert np.array_equal(np.argwhere(np.isnan(scales)), [[5, 1]])


@pytest.mark.parametrize("form", [integers(4, 32), MXFP4], ids=str)
def test_the_largest_numbers_have_finite_scales(form, run_on):
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, 5] = torch.finfo(torch.bfloat16).max
    found = made(replace(CONFIG, format=form), x, 0, 1, run_on).shared_memory
    assert np.isfinite(found[X_SCALES : X_SCALES + 4].view(np.float32))
