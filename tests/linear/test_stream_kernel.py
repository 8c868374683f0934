"""The streaming kernel's own code, thread by thread: copies, waits, partial results.

Only the products are not its own: a thread of each consumer warp decodes what lies in shared memory, where the tensor
cores would read it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm.activations import (
    ActivationFunction,
    ClampedSwiglu,
    activation_named,
    config_of,
    number_of,
    out_features,
)
from cute_kernels.gemm.arguments import STREAM
from cute_kernels.gemm.out_kinds import BF16, FP32
from cute_kernels.gemm.stream import kernel as stream_kernel
from cute_kernels.gemm.stream.config import StreamConfig, StreamStore
from cute_kernels.gemm.stream.schedule import StreamSchedule
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.runtime.composed import changed
from cute_kernels.runtime.workspace import EMPTY
from layouts.transform import unpack
from layouts.weights import hopper
from tests.launchers import given_to
from tests.linear.cases import known
from tests.moe.machine import Machine

CONFIG = StreamConfig(
    integers(4, 64), "bf16", block_k=64, k_warps=1, chunk_k_blocks=2, num_stages=3, store=StreamStore(1)
)


def multiply(self, operands, memory, work, warp, lane) -> None:
    """Stands for `StreamRoles.multiply`: waits and tells as it does; the first warp computes all rows."""
    config = self.config
    if lane:
        return
    shared = self.machine.cta.shared
    pipeline, results = memory.pipeline, memory.results
    here, staged = pipeline.consumer_state(), results.producer_state()
    for index in range(work.num_segments):
        segment = work.segment(index)
        acc = np.zeros((work.shape.m, config.block_rows), np.float64)
        for k_block in range(segment.begin, segment.end, config.chunk_k_blocks):
            pipeline.consumer_wait(here)
            for i in range(min(segment.end - k_block, config.chunk_k_blocks)) if warp == 0 else ():
                first = memory.x + (k_block + i) * 2 * config.block_k
                tokens = range(work.shape.m)
                x = np.stack([values(shared, first + at * memory.x_pitch, config.block_k) for at in tokens])
                for tile in range(config.n_tiles):
                    w = weights(shared, memory.stages + here.stage * config.stage_bytes, tile, i, config)
                    with np.errstate(invalid="ignore"):
                        acc[:, 64 * tile : 64 * tile + 64] += x @ w.T
            pipeline.consumer_release(here)
            here = pipeline.next(here)
        results.producer_acquire(staged)
        if warp == 0:
            place = memory.staging + staged.stage * config.buffer_bytes
            for token in range(work.shape.m):
                first = (place + token * config.staging_pitch) // 4
                shared.view(np.float32)[first : first + config.block_rows] = acc[token]
        results.producer_commit(staged)
        staged = results.next(staged)


def values(shared: np.ndarray, address: int, count: int) -> np.ndarray:
    halves = shared[address : address + 2 * count].view(np.uint16).astype(np.uint32)
    return (halves << 16).view(np.float32).astype(np.float64)


def weights(shared: np.ndarray, stage: int, tile: int, k_block: int, config: StreamConfig) -> np.ndarray:
    """A k block's weights of a tile's rows, from the codes and scales in a stage."""
    place = stage + (tile * config.chunk_k_blocks + k_block) * config.k_block_bytes
    blob = torch.from_numpy(shared[place : place + config.k_block_bytes].copy()).view(1, config.k_block_tiles, 2048)
    codes = unpack(hopper.restore(blob, config.format.bits), config.format.bits).numpy().astype(np.float64) - 8
    place = stage + config.scale_offset + (tile * config.chunk_k_blocks + k_block) * config.k_block_scale_bytes
    scales = values(shared, place, config.k_block_scale_bytes // 2).reshape(-1, config.format.group_scale_bytes // 2)
    return codes * np.repeat(scales.T, config.group_size, axis=1)


def launch(
    schedule: StreamSchedule,
    weight: PackedWeight,
    x: torch.Tensor,
    run_on,
    *,
    bias: torch.Tensor | None = None,
    activation: str | ActivationFunction | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Machine, int]:
    """(results; the machine; address of the codes)."""
    machine = Machine()
    run_on(machine)
    config, n, m = schedule.config, weight.shape[0], x.shape[0]
    shape, words = (m, out_features(n, activation)), schedule.workspace_words(m)
    codes, scales, zeros = (machine.put(tensor) for tensor in (weight.codes, weight.scales, weight.zeros))
    out = machine.put(torch.full(shape, -7.0, dtype=out_dtype))
    workspace = machine.put(torch.full((words,), EMPTY, dtype=torch.int32)) if words else 0
    given = SimpleNamespace(shape=tuple(x.shape), address=machine.put(x))
    kernel: Any = stream_kernel.StreamKernel(config)
    kind: Any = type("NumpyRoles", (stream_kernel.StreamRoles,), {"multiply": multiply, "machine": machine})
    kernel.roles = kind(config)
    blocks = [(s, group, 0) for group in range(schedule.num_groups) for s in range(schedule.num_slices)]
    waiting: list[tuple] = []

    def start(**options):
        operands, sizes = waiting.pop()
        body = stream_kernel.StreamKernel.kernel
        machine.run(lambda: body(kernel, operands, sizes), blocks, config.num_threads)

    kernel.kernel = lambda *arguments: waiting.append(arguments) or SimpleNamespace(launch=start)
    arguments = given_to(
        STREAM, given, codes, scales, zeros, machine.put(bias), 0, out, workspace, n, schedule.num_tiles,
        schedule.k_blocks, schedule.num_slices, schedule.num_groups, schedule.max_parts, number_of(activation),
        {torch.float32: FP32, torch.bfloat16: BF16}[out_dtype],
    )  # fmt: skip
    stream_kernel.StreamKernel.launch(kernel, arguments, None)
    if words:
        assert torch.all(machine.get(workspace, (words,), torch.int32) == EMPTY), "partial results are left"
    return machine.get(out, shape, out_dtype), machine, codes


def layout(n: int, k: int, num_groups: int, num_slices: int = 1, **fields: Any) -> StreamSchedule:
    config = changed(CONFIG, **fields)
    schedule = StreamSchedule(config, -(-n // 64), -(-k // 64), num_slices, 1)
    return replace(schedule, num_groups=min(num_groups, schedule.total))


CASES = {
    "one row, blocks in parts": (1, 160, 192, 3, {}),
    "two tiles, of an odd number": (5, 200, 320, 4, {"n_tiles": 2}),
    "tails of N and K": (3, 130, 200, 3, {}),
    "a group for each k block": (2, 64, 128, 4, {}),
    "whole blocks": (8, 192, 128, 3, {}),
    "slices of K": (8, 130, 320, 2, {"num_slices": 2, "n_tiles": 2}),
    "slices of K, of which the last is short": (2, 70, 320, 2, {"num_slices": 3}),
    "many blocks of slices": (3, 400, 256, 1, {"num_slices": 2}),
}


@pytest.mark.parametrize("m, n, k, num_groups, fields", CASES.values(), ids=list(CASES))
def test_what_is_stored_is_what_the_reference_says(m, n, k, num_groups, fields, run_on):
    weight = known(n, k, group_size=64).pack()
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    schedule = layout(n, k, num_groups, **fields)
    found, machine, codes = launch(schedule, weight, x, run_on)
    torch.testing.assert_close(found, exact(x, weight), rtol=2e-5, atol=1e-6)
    check_equal_bytes(machine, codes, weight, schedule)


def exact(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """The product with weights that are not rounded."""
    return (x.double() @ weight.dequantize(torch.float64).T).float()


def check_equal_bytes(machine: Machine, codes: int, weight: PackedWeight, schedule: StreamSchedule) -> None:
    """All codes are copied once, but the last tile of an odd number may come twice; every group copies its share."""
    copied, own = Counter(), Counter()
    for block, source, size in machine.copies:
        if codes <= source < codes + weight.codes.numel():
            own[block[1]] += size
            copied.update(range((source - codes) // 2048, (source - codes + size) // 2048))
    assert len(copied) == weight.codes.numel() // 2048 and max(copied.values()) <= 2
    assert schedule.config.n_tiles == 2 or max(copied.values()) == 1
    if schedule.num_slices == 1:
        k_block_bytes = schedule.config.n_tiles * schedule.config.k_block_bytes
        shares = [schedule.group_range(group) for group in range(schedule.num_groups)]
        assert [own[group] for group in range(schedule.num_groups)] == [
            k_block_bytes * (end - first) for first, end in shares
        ]


CLAMPED = ClampedSwiglu(limit=3.0)


@pytest.mark.parametrize(
    "activation, n, k",
    [("swiglu", 132, 128), (CLAMPED, 136, 2880), ("relu2", 132, 128)],
    ids=["swiglu", "clamped", "without a gate"],
)
def test_bias_activation_and_output_dtype_meet_every_result(activation, n, k, run_on):
    """The clamped one's limits are reached on both sides."""
    weight, generator = known(n, k, group_size=64).pack(), torch.Generator().manual_seed(1)
    x, bias = (torch.randn(*size, generator=generator).to(torch.bfloat16) for size in ((8, k), (n,)))
    schedule = layout(n, k, 3, activation=config_of(activation))
    options: dict[str, Any] = {"bias": bias, "activation": activation, "out_dtype": torch.bfloat16}
    found, _, _ = launch(schedule, weight, x, run_on, **options)
    sums = exact(x, weight).double() + bias.double()
    own = activation_named(activation)
    assert own is not None
    torch.testing.assert_close(found.double(), own.of_rows(sums), rtol=8e-3, atol=1e-5)
    if activation is CLAMPED:
        gates, ups = sums.unflatten(1, (-1, 2)).unbind(2)
        for beyond in (gates > 3, gates < -3, ups > 3, ups < -3, (gates < 3) & (ups.abs() < 3)):
            assert beyond.any()
