"""Rows of x in another order and scaled, lane by lane in NumPy; and how rows are shared out among CTAs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.linear.inputs import kernel
from cute_kernels.linear.inputs.config import ROOMS, THREADS, InputRowsConfig, parts_of, room_for
from cute_kernels.linear.reference import prepare_input
from tests.attention import warp as machine
from tests.linear.warpgroup import WarpgroupWarp

K = 32 * 8  # a vector for each lane
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().reshape(-1).copy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("room", [0, ROOMS[0]])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_row_is_scaled_then_put_in_order(dtype: str, room: int, scaled: bool, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, factors = torch.randn(2, K, generator=generator).to(DTYPES[dtype])
    order = torch.randperm(K, generator=generator).to(torch.int32)
    parts = [bytes_of(part) for part in (x, factors, order)]
    starts = np.cumsum([0, *(part.size for part in parts)])
    shared = np.zeros(1 << 16, np.uint8)
    shared[: 2 * K] = parts[0]  # where the row has been brought
    gpu = WarpgroupWarp(shared, np.concatenate(parts))
    gpu.install(monkeypatch, kernel)
    subject: Any = kernel.InputRowsKernel(InputRowsConfig(dtype, room, scaled))
    inputs, scales = (machine.Registers(8, machine.Uint32) for _ in range(2))
    lanes = machine.LANES
    subject.ask(inputs, scales, int(starts[2]), int(starts[1]), lanes, K // 8)
    words = subject.load(machine.Int32(0), machine.Int64(0), [inputs[i] for i in range(8)], lanes)
    if scaled:
        words = subject.scale(words, [scales[i] for i in range(8)])
    bits = np.stack([np.asarray(word, np.uint32) for word in words], axis=1).reshape(-1)
    found = torch.from_numpy(bits.view(np.int16).copy()).view(DTYPES[dtype])
    assert torch.equal(found, prepare_input(x, order if room else None, factors if scaled else None))


def test_a_vector_behind_the_row_asks_for_the_last_one(monkeypatch):
    order = torch.arange(K, dtype=torch.int32).flip(0).contiguous()
    gpu = WarpgroupWarp(np.zeros(16, np.uint8), bytes_of(order))
    gpu.install(monkeypatch, kernel)
    subject: Any = kernel.InputRowsKernel(InputRowsConfig("bf16", ROOMS[0]))
    inputs, scales = (machine.Registers(8, machine.Uint32) for _ in range(2))
    subject.ask(inputs, scales, 0, 0, machine.LANES + 16, K // 8)
    assert np.asarray(inputs[0])[-1] == 7 and np.asarray(inputs[0])[0] == K - 1 - 16 * 8


@pytest.mark.parametrize("m", [1, 2, 16, 100, 512, 70_000])
@pytest.mark.parametrize("k", [8, 4096, 14_336])
def test_every_sm_has_something_of_few_rows(m: int, k: int):
    parts = parts_of(m, k, 132)
    vectors = k // 8
    assert 1 <= parts <= -(-vectors // THREADS) and (parts == 1 or m * parts <= 264)
    ranges = [(part * vectors // parts, (part + 1) * vectors // parts) for part in range(parts)]
    assert ranges[0][0] == 0 and ranges[-1][1] == vectors


def test_rows_that_no_shared_memory_holds_have_no_room():
    assert [room_for(k) for k in (8, 8192, 8200, 98_304, 98_312)] == [8192, 8192, 32_768, 98_304, None]
    assert InputRowsConfig("bf16", 100).can_implement() and InputRowsConfig("fp32").can_implement()
