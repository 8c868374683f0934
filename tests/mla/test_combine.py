"""The kernel that adds up the parts of rows, warp by warp in NumPy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from cute_kernels.mla import work
from cute_kernels.mla.combine import second_launch
from cute_kernels.mla.config import MAX_PARTS, PARTIALS, V_HEAD_DIM, CombineConfig
from cute_kernels.mla.mainloops.softmax import LOWEST
from simulator import LANES, Float32, Int32, Meanings, Warp, stand_in
from simulator.registers import bf16_bits, bf16_values


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
            found.append((slot, row, column, kernel.add_parts(results, shape, *place)))
        for first in (False, True):
            for slot, row, column, (acc, maximum, total) in found:
                if slots > 1 and (slot < rows) == first:
                    kernel.add_groups(acc, groups, rows, slot, column)
                if first and slot < rows and row < num_rows:
                    denominator = total + np.exp2(sinks[row] * np.float64(Float32(1.4426950408889634)) - maximum)
                    words, lse[row], top[row] = (
                        x if isinstance(x, list) else x[0] for x in kernel.outcome(acc, maximum, total, denominator)
                    )
                    out[row].reshape(-1, 2)[column] = np.stack(words, axis=1)
    return bf16_values(out.view(np.uint16)), lse, top


class CombiningWarp(Warp):
    """A warp whose shared memory is all of a CTA's, from address 0."""

    def meanings(self) -> Meanings:
        known = super().meanings()
        memory = SimpleNamespace(allocate=lambda *_, **__: SimpleNamespace(toint=lambda: 0))
        utils = SimpleNamespace(SmemAllocator=lambda: memory)
        return replace(
            known,
            arch={**known.arch, "sync_threads": lambda: None},
            cutlass={**known.cutlass, "utils": utils},
        )


@pytest.mark.parametrize("partials", PARTIALS)
@pytest.mark.parametrize("num_parts", [2, 11, MAX_PARTS])
@pytest.mark.parametrize(("slots", "row_bits"), [(1, 0), (8, 0), (8, 2)])
def test_parts_of_all_rows_are_added_up(run_on, slots, row_bits, num_parts, partials):
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
    machine = CombiningWarp(np.zeros(8 * V_HEAD_DIM * 4, np.uint8), memory)
    run_on(machine)
    kernel: Any = second_launch.CombineKernel(CombineConfig(slots=slots, partials=partials))
    shape = SimpleNamespace(rows=1, num_heads=num_heads, num_parts=num_parts)
    out, lse, top = run(kernel, shape, work.Results(*[stand_in(0)] * 5), sinks, row_bits)

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
