"""Rows of x in another order and scaled, lane by lane in NumPy; and how rows are shared out among CTAs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.gemm.inputs import kernel
from cute_kernels.gemm.inputs.config import ROOMS, THREADS, parts_of, room_for
from cute_kernels.gemm.operands.fp8_config import INPUTS, RowsConfig
from cute_kernels.gemm.reference import prepare_input
from simulator import Meanings, PlainThread
from tests.attention import warp as machine
from tests.linear.warpgroup import WarpgroupWarp

K = 32 * 8  # a vector for each lane
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().reshape(-1).copy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("room", [0, ROOMS[0]])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_row_is_scaled_then_put_in_order(dtype: str, room: int, scaled: bool, run_on):
    generator = torch.Generator().manual_seed(0)
    x, factors = torch.randn(2, K, generator=generator).to(DTYPES[dtype])
    order = torch.randperm(K, generator=generator).to(torch.int32)
    parts = [bytes_of(part) for part in (x, factors, order)]
    starts = np.cumsum([0, *(part.size for part in parts)])
    shared = np.zeros(1 << 16, np.uint8)
    shared[: 2 * K] = parts[0]  # where the row has been brought
    gpu = WarpgroupWarp(shared, np.concatenate(parts))
    run_on(gpu)
    subject: Any = kernel.InputRowsKernel(RowsConfig(dtype, makes=INPUTS, room=room, scaled=scaled))
    inputs, scales = (machine.Registers(8, machine.Uint32) for _ in range(2))
    lanes = machine.LANES
    subject.ask(inputs, scales, int(starts[2]), int(starts[1]), lanes, K // 8)
    words = subject.load(machine.Int32(0), machine.Int64(0), [inputs[i] for i in range(8)], lanes)
    if scaled:
        words = subject.scale(words, [scales[i] for i in range(8)])
    bits = np.stack([np.asarray(word, np.uint32) for word in words], axis=1).reshape(-1)
    found = torch.from_numpy(bits.view(np.int16).copy()).view(DTYPES[dtype])
    assert torch.equal(found, prepare_input(x, order if room else None, factors if scaled else None))


def test_a_vector_behind_the_row_asks_for_the_last_one(run_on):
    order = torch.arange(K, dtype=torch.int32).flip(0).contiguous()
    gpu = WarpgroupWarp(np.zeros(16, np.uint8), bytes_of(order))
    run_on(gpu)
    subject: Any = kernel.InputRowsKernel(RowsConfig("bf16", makes=INPUTS, room=ROOMS[0]))
    inputs, scales = (machine.Registers(8, machine.Uint32) for _ in range(2))
    subject.ask(inputs, scales, 0, 0, machine.LANES + 16, K // 8)
    assert np.asarray(inputs[0])[-1] == 7 and np.asarray(inputs[0])[0] == K - 1 - 16 * 8


@pytest.mark.parametrize("m", [1, 2, 16, 100, 512, 70_000])
@pytest.mark.parametrize("k", [8, 4096, 14_336])
def test_every_sm_has_something_of_few_rows(m: int, k: int):
    parts = parts_of(m, k, 132, ROOMS[0])
    vectors = k // 8
    assert 1 <= parts <= -(-vectors // THREADS) and (parts == 1 or m * parts <= 264)
    ranges = [(part * vectors // parts, (part + 1) * vectors // parts) for part in range(parts)]
    assert ranges[0][0] == 0 and ranges[-1][1] == vectors


def test_parts_of_rows_in_their_own_order_have_a_vector_a_thread():
    """However many rows: what gathers them reads a part of all rows, which stays in L2, before the next one."""
    assert [parts_of(70_000, k, 132) for k in (8, 2048, 2056, 7168)] == [1, 1, 2, 4]


def test_rows_that_no_shared_memory_holds_have_no_room():
    assert [room_for(k) for k in (8, 8192, 8200, 98_304, 98_312)] == [8192, 8192, 32_768, 98_304, None]
    assert (
        RowsConfig("bf16", makes=INPUTS, room=100).can_implement() and RowsConfig("fp32", makes=INPUTS).can_implement()
    )


class Grid:
    """All threads of a launch, one after the other, with Python's integers. Shared memory is what the pass before left:
    in the second pass of a CTA a thread finds what all threads have brought, as behind the barrier."""

    def __init__(self, memory: np.ndarray, x: range, parts: int, dtype: torch.dtype):
        self.memory, self.x, self.parts, self.dtype = memory, x, parts, dtype
        self.shared, self.written = np.zeros(1 << 17, np.uint8), np.zeros(memory.size, np.int64)
        self.block, self.thread, self.waited, self.pass_number = (0, 0), 0, False, 0

    def meanings(self) -> Meanings:
        done = ("griddepcontrol_launch_dependents", "cp_async_commit_group", "cp_async_wait_group", "sync_threads")
        arch = {
            **dict.fromkeys(done, lambda *arguments: None),
            "thread_idx": lambda: (self.thread, 0, 0),
            "block_idx": lambda: (*self.block, 0),
            "grid_dim": lambda: (0, self.parts, 1),
            "griddepcontrol_wait": lambda: setattr(self, "waited", True),
        }
        room = SimpleNamespace(allocate=lambda size, byte_alignment: SimpleNamespace(toint=lambda: 0))
        plain = PlainThread(arch=arch).meanings()
        return replace(
            plain,
            instructions=self,
            cute={"make_rmem_tensor": lambda n, kind: [0] * n},
            cutlass={**plain.cutlass, "utils": SimpleNamespace(SmemAllocator=lambda: room)},
        )

    def words(self, memory: np.ndarray, address: int, size: int, count: int) -> list[int]:
        assert address % (size * count) == 0 and 0 <= address <= memory.size - size * count
        return [int.from_bytes(memory[address + i * size : address + (i + 1) * size], "little") for i in range(count)]

    def load_global_words(self, address: int, offset: int, count: int, *, constant: bool = True) -> list[int]:
        if address in self.x:
            assert self.waited and not constant, "x is read before the launch before has ended"
        else:
            assert self.waited or not constant, "ptxas moves loads of constant memory behind the wait"
        return self.words(self.memory, address + offset, 4, count)

    def load_global_part(self, address: int, offset: int, size: int) -> int:
        return self.words(self.memory, address + offset, size, 1)[0]

    def copy_async(self, target: int, source: int, size: int) -> None:
        assert self.waited and source % 16 == 0 and target % 16 == 0
        self.shared[target : target + size] = self.memory[source : source + size]

    def load_shared_part(self, address: int, offset: int, size: int) -> int:
        return self.words(self.shared, address + offset, size, 1)[0]

    def store_global(self, address: int, words: list[int]) -> None:
        assert self.waited and address % 16 == 0
        if self.pass_number == 1:
            self.written[address : address + 16] += 1
            self.memory[address : address + 16] = np.array(words, np.uint32).view(np.uint8)

    def prmt(self, a: int, b: int, selector: int) -> int:
        assert selector == 0x5410
        return (a & 0xFFFF) | (b & 0xFFFF) << 16

    def element(self, half: int) -> float:
        return float(torch.tensor([half], dtype=torch.int32).to(torch.int16).view(self.dtype)[0])

    def run(self, subject: Any, m: int, *arguments: int) -> None:
        for row, part, number, thread in np.ndindex(m, self.parts, 2, THREADS):
            self.block, self.pass_number, self.thread, self.waited = (row, part), number, thread, False
            subject.kernel(*arguments)


@pytest.mark.parametrize("m, k, parts", [(1, 8, 1), (2, 264, 1), (1, 4104, 3), (3, 520, 2)])
@pytest.mark.parametrize("room, scaled", [(0, False), (ROOMS[0], False), (ROOMS[0], True)])
def test_a_launch_writes_every_row_once(m: int, k: int, parts: int, room: int, scaled: bool, run_on):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(m, k + 24, generator=generator).bfloat16()
    order = torch.randperm(k, generator=generator).to(torch.int32)
    factors = torch.randn(k, generator=generator).bfloat16()
    out = np.zeros(2 * m * k + 64, np.uint8)
    made = [
        out,
        *(np.concatenate([bytes_of(part), np.zeros(-part.nbytes % 16, np.uint8)]) for part in (wide, order, factors)),
    ]
    starts = [int(start) for start in np.cumsum([0, *(part.size for part in made)])]
    grid = Grid(np.concatenate(made), range(starts[1], starts[2]), parts, torch.bfloat16)
    subject: Any = kernel.InputRowsKernel(RowsConfig("bf16", makes=INPUTS, room=room, scaled=scaled))
    run_on(grid)
    subject.halves = (lambda word: grid.element(word & 0xFFFF), lambda word: grid.element(word >> 16))
    subject.pack = lambda low, high: int(torch.tensor([low, high]).bfloat16().view(torch.int32)[0]) & 0xFFFFFFFF
    grid.run(subject, m, 0, k // 8, starts[1] + 16, 0, 0, starts[2], starts[3], k + 24)
    want = prepare_input(wide[:, 8 : k + 8], order if room else None, factors if scaled else None)
    assert np.array_equal(grid.memory[: 2 * m * k], bytes_of(want.contiguous()))
    assert np.all(grid.written[: 2 * m * k] == 1) and not grid.written[2 * m * k :].any()
