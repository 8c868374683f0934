"""The kernel that adds up the parts of rows, warp by warp in NumPy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import work
from cute_kernels.mla.combine import second_launch
from cute_kernels.mla.config import MAX_PARTS, PARTIALS, V_HEAD_DIM, CombineConfig
from cute_kernels.mla.elements import ElementType
from cute_kernels.mla.mainloops.softmax import LOWEST
from tests.attention.warp import LANES, Float32, Int32, bf16_bits, bf16_values
from tests.mla.warp import MlaWarp


class Machine(MlaWarp):
    """A warp that divides."""

    def reciprocal(self, x: Any) -> Any:
        return Float32(1 / np.float64(x))


def run(kernel: Any, shape: Any, results: Any, sinks: np.ndarray, row_bits: int) -> Any:
    """(out, lse, greatest scores) of all CTAs of a launch. Groups meet once: all store, then the first ones go on."""
    slots, num_rows = kernel.config.slots, shape.rows * shape.num_heads
    rows, groups = 1 << row_bits, slots >> row_bits
    out = np.full((num_rows, V_HEAD_DIM // 2), 0xFFFFFFFF, np.uint32)
    lse, top = np.full((2, num_rows), np.nan)
    for first_row in range(0, num_rows, rows):
        found = []
        for slot, quarter in np.ndindex(slots, second_launch.ROW_THREADS // 32):
            row, column = first_row + (slot & (rows - 1)), LANES + 32 * quarter
            place = Int32(row), int(row < num_rows), slot >> row_bits, groups, column
            found.append((slot, row, column, add_parts(kernel, results, shape, *place)))
        for first in (False, True):
            for slot, row, column, (acc, maximum, total) in found:
                if slots > 1 and (slot < rows) == first:
                    add_groups(kernel, acc, groups, rows, slot, column)
                if first and slot < rows and row < num_rows:
                    denominator = total + np.exp2(sinks[row] * np.float64(Float32(1.4426950408889634)) - maximum)
                    words, lse[row], top[row] = (
                        x if isinstance(x, list) else x[0] for x in kernel.outcome(acc, maximum, total, denominator)
                    )
                    out[row].reshape(-1, 2)[column] = np.stack(words, axis=1)
    return bf16_values(out.view(np.uint16)), lse, top


add_parts: Any = vars(second_launch.CombineKernel)["add_parts"].__wrapped__
add_groups: Any = vars(second_launch.CombineKernel)["add_groups"].__wrapped__


def install(machine: Machine, monkeypatch) -> None:
    machine.install(monkeypatch, second_launch, work)
    arch = second_launch.cute.arch
    arch.lane_idx, arch.sync_warp, arch.sync_threads = lambda: LANES, lambda: None, lambda: None
    arch.griddepcontrol_wait = lambda: None
    memory = SimpleNamespace(allocate=lambda *_, **__: SimpleNamespace(toint=lambda: 0))
    monkeypatch.setattr(second_launch.cutlass, "utils", SimpleNamespace(SmemAllocator=lambda: memory), raising=False)
    monkeypatch.setattr(second_launch.cutlass, "range", lambda *bounds, unroll: range(*bounds), raising=False)
    monkeypatch.setattr(second_launch.cutlass, "Uint32", np.uint32, raising=False)


@pytest.mark.parametrize("partials", PARTIALS)
@pytest.mark.parametrize("num_parts", [2, 11, MAX_PARTS])
@pytest.mark.parametrize(("slots", "row_bits"), [(1, 0), (8, 0), (8, 2)])
def test_parts_of_all_rows_are_added_up(monkeypatch, slots, row_bits, num_parts, partials):
    """Parts without keys have no values: what lies there is NaN. A sink takes its share."""
    num_heads, generator = 5, np.random.default_rng(num_parts)
    values = generator.standard_normal((num_heads, num_parts, V_HEAD_DIM)).astype(np.float32)
    maxima = (generator.standard_normal((num_heads, num_parts)) * 20).astype(np.float32)
    totals = generator.random((num_heads, num_parts)).astype(np.float32) * 64
    empty = generator.random((num_heads, num_parts)) < 0.3
    empty[2], empty[3, 1:], empty[3, 0] = True, True, False
    values[empty], maxima[empty], totals[empty] = np.nan, LOWEST, 0.0
    sinks = np.array([0.5, np.inf, 1.0, -np.inf, 3.0], np.float32)
    numbers = [maxima, totals]
    stored = values
    if partials == "fp16":
        units = np.exp2(generator.integers(-20, 20, (2, num_heads, num_parts))).astype(np.float32)
        stored = values.astype(np.float16)
        values = stored * np.repeat(np.moveaxis(units, 0, -1), V_HEAD_DIM // 2, axis=-1)
        numbers += [*np.where(empty, np.nan, units).astype(np.float32)]
    memory = np.concatenate([x.reshape(-1).view(np.uint8) for x in (stored, np.stack(numbers, axis=-1))])
    machine = Machine(np.zeros(8 * V_HEAD_DIM * 4, np.uint8), memory)
    install(machine, monkeypatch)
    kernel: Any = second_launch.CombineKernel(CombineConfig(slots=slots, partials=partials))
    kernel.numbers = ElementType(None, machine.pack_bf16x2)
    shape = SimpleNamespace(rows=1, num_heads=num_heads, num_parts=num_parts)
    out, lse, top = run(kernel, shape, work.Results(0, 0, 0, 0, 0), sinks, row_bits)

    weights = np.where(empty, 0.0, totals * np.exp2(np.float64(maxima)))
    tops = np.where(empty, -np.inf, np.float64(maxima)).max(1) * np.log(2)
    shares = np.where(empty, 0.0, np.exp2(np.float64(maxima)))[..., None] * np.where(empty[..., None], 0.0, values)
    wanted = np.zeros((num_heads, V_HEAD_DIM))
    total = weights.sum(1)
    alive = total > 0
    wanted[alive] = shares.sum(1)[alive] / (total + np.exp(np.float64(sinks)))[alive, None]
    wanted_lse = np.full(num_heads, np.inf)
    wanted_lse[alive] = np.log(total[alive])
    assert np.allclose(
        out, bf16_values(bf16_bits(wanted.astype(np.float32))), rtol=2**-7, atol=1e-5 * np.abs(wanted).max()
    )
    assert np.allclose(lse, wanted_lse, rtol=1e-5) and np.allclose(top, tops, rtol=1e-6)
