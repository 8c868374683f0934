"""The grouped kernel's own code, thread by thread: copies, waits, entries, partial results. Only the products are not
its own: a thread of each consumer warp decodes what lies in shared memory, where the tensor cores would read it.
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
from cute_kernels.gemm.experts import kernel as moe_kernel
from cute_kernels.gemm.experts import work as moe_work
from cute_kernels.gemm.experts.arguments import GROUPED
from cute_kernels.gemm.experts.schedule import (
    MOST_DIVIDED,
    TABLE_BYTES,
    GroupedSchedule,
    make_schedule,
    schedules,
    with_launches,
)
from cute_kernels.gemm.out_kinds import BF16, FP32
from cute_kernels.gemm.packed_experts import PackedExperts, stack_experts
from cute_kernels.gemm.problem import GroupedProblem
from cute_kernels.gemm.stream import epilogue as stream_epilogue
from cute_kernels.gemm.stream import kernel as linear_kernel
from cute_kernels.gemm.stream.config import StreamConfig, StreamStore
from cute_kernels.runtime.composed import changed
from cute_kernels.runtime.workspace import EMPTY
from layouts.transform import unpack
from layouts.weights import hopper
from tests.launchers import given_to
from tests.linear.cases import known
from tests.moe.machine import Machine

CONFIG = StreamConfig(
    integers(4, 64), "bf16", block_k=64, k_warps=1, chunk_k_blocks=2, num_stages=3, store=StreamStore(1), use_pdl=True
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
        start = memory.x + work.x_start(segment, memory.x_slot_bytes)
        acc = np.zeros((config.tile_m, config.block_rows), np.float64)
        for k_block in range(segment.begin, segment.end, config.chunk_k_blocks):
            pipeline.consumer_wait(here)
            for i in range(min(segment.end - k_block, config.chunk_k_blocks)) if warp == 0 else ():
                x = np.stack(
                    [
                        values(
                            shared, start + token * memory.x_pitch + (k_block + i) * 2 * config.block_k, config.block_k
                        )
                        for token in range(config.tile_m)
                    ]
                )
                for tile in range(config.n_tiles):
                    w = weights(shared, memory.stages + here.stage * config.stage_bytes, tile, i, config)
                    with np.errstate(invalid="ignore"):
                        acc[:, 64 * tile : 64 * tile + 64] += x @ w.T
            pipeline.consumer_release(here)
            here = pipeline.next(here)
        results.producer_acquire(staged)
        if warp == 0:
            place = memory.staging + staged.stage * config.buffer_bytes
            for token in range(config.tile_m):
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


def make_kernel(machine: Machine, config: StreamConfig) -> Any:
    kernel: Any = moe_kernel.grouped_kernel(config)
    kind: Any = type("NumpyRoles", (linear_kernel.StreamRoles,), {"multiply": multiply})
    kernel.roles = kind(config, kernel.scheduling.loads, TABLE_BYTES)
    kernel.roles.machine = machine
    kernel.roles.epilogue = stream_epilogue.StreamEpilogue(config)
    return kernel


def launch(
    schedule: GroupedSchedule,
    weight: PackedExperts,
    x: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor | None,
    run_on,
    *,
    bias: torch.Tensor | None = None,
    activation: str | ActivationFunction | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Machine, int]:
    """(results, of which those that are not written are -7; the machine; address of the codes)."""
    machine = Machine()
    run_on(machine)
    config = schedule.config
    n, places = weight.shape[0], (x if rows is None else rows).shape[0]
    shape = (places, out_features(n, activation))
    codes, scales, zeros = (machine.put(tensor) for tensor in (weight.codes, weight.scales, weight.zeros))
    out = machine.put(torch.full(shape, -7.0, dtype=out_dtype))
    workspace = machine.put(torch.full((schedule.workspace_words,), EMPTY, dtype=torch.int32))
    addresses = [codes, scales, zeros, machine.put(bias), out, workspace, machine.put(offsets), machine.put(rows)]
    given = SimpleNamespace(shape=tuple(x.shape), address=machine.put(x))
    kernel = make_kernel(machine, config)
    blocks = [(s, group, 0) for group in range(schedule.num_groups) for s in range(schedule.num_slices)]
    waiting: list[tuple] = []

    def start(**options):
        operands, sizes = waiting.pop()
        body = linear_kernel.StreamKernel.kernel
        machine.run(lambda: body(kernel, operands, sizes), blocks, config.num_threads)

    kernel.kernel = lambda *arguments: waiting.append(arguments) or SimpleNamespace(launch=start)
    for number in range(schedule.num_launches):
        arguments = given_to(
            GROUPED, given, *addresses, n, schedule.num_tiles, schedule.k_blocks, schedule.num_slices,
            schedule.num_groups, len(weight), schedule.entry_rows.bit_length() - 1, schedule.x_slots,
            number * schedule.max_entries, schedule.max_entries, schedule.max_parts, schedule.slack, 1,
            number_of(activation), {torch.float32: FP32, torch.bfloat16: BF16}[out_dtype],
        )  # fmt: skip
        linear_kernel.StreamKernel.launch(kernel, arguments, None)
    words = machine.get(workspace, (schedule.workspace_words,), torch.int32)
    assert torch.all(words == EMPTY), "partial results are left"
    return machine.get(out, shape, out_dtype), machine, codes


def layout(n: int, k: int, num_sms: int, **fields: Any) -> GroupedSchedule:
    """A small schedule as one would be for many rows: groups, slots and launches are those of `with_launches`."""
    config = changed(CONFIG, **{name: fields.pop(name) for name in ("n_tiles", "num_buffers") if name in fields})
    places, experts = fields.pop("places"), fields.pop("experts")
    problem = GroupedProblem(places, experts, n, k, -(-k // 64) * 64, integers(4, 64), "bf16", num_sms=num_sms)
    k_blocks = problem.k_pad // config.block_k
    base = GroupedSchedule(
        config, -(-n // 64), k_blocks, fields.pop("num_slices", 1), 1, fields.pop("entry_rows", 8), **fields
    )
    return with_launches(base, problem)


CASES = {
    "entries of one and of many rows": ((3, 0, 1, 17, 0, 8), 160, 192, 3, {}),
    "two tiles, two slots": ((2, 9, 1, 1), 200, 320, 4, {"n_tiles": 2, "x_slots": 2, "num_buffers": 2}),
    "tails of N and K": ((1, 2, 0, 3), 130, 200, 3, {}),
    "more CTAs than k blocks": ((0, 1, 0), 64, 64, 4, {}),
    "one expert has all": ((0, 0, 20, 0), 96, 128, 3, {}),
    "no rows at all": ((0, 0, 0), 64, 128, 2, {}),
    "slices of K": ((3, 9, 1), 130, 320, 4, {"num_slices": 2, "n_tiles": 2}),
    "slices of K, of which the last is short": ((1, 2, 1, 1, 1), 70, 320, 6, {"num_slices": 3, "num_buffers": 1}),
    "more experts than lanes": (tuple(i % 3 == 0 for i in range(40)), 64, 64, 3, {}),
    "more experts than a thread each": (tuple(i % 100 == 99 for i in range(300)), 64, 64, 2, {}),
    "whole blocks": ((3, 0, 1, 17), 160, 192, 5, {"slack": 2}),
    "whole blocks, not the same number for all": ((3, 1, 8), 250, 128, 8, {"slack": 1}),
    "blocks that would be whole but for a k block": ((3, 1, 8), 250, 128, 8, {"slack": 0}),
    "fewer whole blocks than groups": ((1, 0, 1), 64, 320, 3, {"slack": 2}),
    "entries of up to two rows": ((3, 0, 1, 5, 0, 8), 160, 192, 3, {"entry_rows": 2, "x_slots": 2, "num_buffers": 2}),
    "entries of one row": ((0, 2, 1), 66, 192, 4, {"entry_rows": 1}),
    "whole blocks of slices of K": ((3, 1), 130, 320, 4, {"num_slices": 2, "slack": 3}),
}


@pytest.mark.parametrize("counts, n, k, num_sms, fields", CASES.values(), ids=list(CASES))
def test_what_is_stored_is_what_the_reference_says(counts, n, k, num_sms, fields, run_on):
    counts = [int(count) for count in counts]
    experts = [known(n, k, group_size=64, seed=seed).pack() for seed in range(len(counts))]
    weight = stack_experts(experts)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(7, k, generator=generator).to(torch.bfloat16)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    places = sum(counts) + 2  # of which two are nobody's
    rows = torch.randint(0, 7, (places,), generator=generator).int()
    schedule = layout(n, k, num_sms, places=places, experts=len(counts), **fields)
    found, machine, codes = launch(schedule, weight, x, offsets, rows, run_on)
    torch.testing.assert_close(found[:-2], exact(x[rows.long()], weight, counts)[:-2], rtol=2e-5, atol=1e-6)
    assert torch.all(found[-2:] == -7.0)
    check_equal_bytes(machine, codes, weight, counts, schedule)


def exact(x: torch.Tensor, weight: PackedExperts, counts: list[int]) -> torch.Tensor:
    """Products with weights that are not rounded."""
    parts = x.double().split([*counts, x.shape[0] - sum(counts)])
    dense = [*weight.dequantize(torch.float64), torch.zeros(weight.shape, dtype=torch.float64)]
    return torch.cat([part @ w.T for part, w in zip(parts, dense, strict=True)]).float()


def check_equal_bytes(machine: Machine, codes: int, weight: PackedExperts, counts, schedule) -> None:
    """Every entry's codes are copied once, and every group copies its share, but for a k block or as much slack."""
    config, of_expert = schedule.config, weight.codes[0].numel()
    copied, own = Counter(), Counter()
    for block, source, size in machine.copies:
        if codes <= source < codes + weight.codes.numel():
            own[block] += size
            copied.update(range((source - codes) // 2048, (source - codes + size) // 2048))
    tiles = of_expert // 2048
    for expert, count in enumerate(counts):
        times = {copied[tile] for tile in range(expert * tiles, (expert + 1) * tiles)}
        entries = -(-count // schedule.entry_rows)
        assert times <= {entries, 2 * entries} and entries in times  # the last tile of an odd number may come twice
    each = [sum(size for block, size in own.items() if block[1] == group) for group in range(schedule.num_groups)]
    if schedule.num_slices == 1 and schedule.num_launches == 1:
        entries = sum(-(-count // schedule.entry_rows) for count in counts)
        assert each == [
            config.n_tiles * config.k_block_bytes * k_blocks for k_blocks in group_k_blocks(schedule, entries)
        ]
        assert max(each) - sum(each) / len(each) <= config.n_tiles * config.k_block_bytes * max(1, schedule.slack + 1)


def group_k_blocks(schedule: GroupedSchedule, entries: int) -> list[int]:
    """K blocks of each group of a launch that finds so many entries."""
    blocks = entries * schedule.num_blocks
    k_blocks = blocks * schedule.slice_k_blocks
    is_whole = -(-blocks // schedule.num_groups) * schedule.slice_k_blocks - k_blocks // schedule.num_groups
    count, grain = (blocks, schedule.slice_k_blocks) if is_whole <= schedule.slack else (k_blocks, 1)
    base, rest = divmod(count, schedule.num_groups)
    return [grain * (base + (group < rest)) for group in range(schedule.num_groups)]


CLAMPED = ClampedSwiglu(limit=3.0)


@pytest.mark.parametrize(
    "activation, n, k",
    [("swiglu", 132, 128), (CLAMPED, 136, 2880), ("relu2", 132, 128)],
    ids=["swiglu", "clamped", "without a gate"],
)
def test_bias_activation_and_output_dtype_are_the_experts(activation, n, k, run_on):
    """Some of whom have no rows; the clamped one's limits are reached on both sides, in tails of gpt-oss's K."""
    weight = stack_experts([known(n, k, group_size=64, seed=seed).pack() for seed in range(3)])
    x = torch.randn(12, k, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    bias = torch.randn(3, n, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    offsets = torch.tensor([0, 2, 2, 12], dtype=torch.int32)
    options: dict[str, Any] = {"bias": bias, "activation": activation, "out_dtype": torch.bfloat16}
    schedule = layout(n, k, 3, places=12, experts=3)
    schedule = replace(schedule, config=changed(schedule.config, activation=config_of(activation)))
    found, _, _ = launch(schedule, weight, x, offsets, None, run_on, **options)
    sums = exact(x, weight, [2, 0, 10]).double() + bias[[0] * 2 + [2] * 10].double()
    own = activation_named(activation)
    assert own is not None
    torch.testing.assert_close(found.double(), own.of_rows(sums), rtol=8e-3, atol=1e-5)
    if activation is CLAMPED:
        gates, ups = sums.unflatten(1, (-1, 2)).unbind(2)
        for beyond in (gates > 3, gates < -3, ups > 3, ups < -3, (gates < 3) & (ups.abs() < 3)):
            assert beyond.any()


def test_several_launches_compute_all_entries(run_on):
    n, k, counts = 64, 128, [3, 20, 0, 1]
    weight = stack_experts([known(n, k, group_size=64, seed=seed).pack() for seed in range(4)])
    x = torch.randn(24, k, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    schedule = replace(layout(n, k, 3, places=24, experts=4), max_entries=2, num_launches=3)
    found, _, _ = launch(schedule, weight, x, offsets, None, run_on)
    torch.testing.assert_close(found, exact(x, weight, counts), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("places, experts, n, k", [(8, 256, 4096, 7168), (256, 8, 28672, 4096), (64, 128, 768, 2048)])
def test_every_product_has_a_schedule(places, experts, n, k):
    schedule = make_schedule(GroupedProblem(places, experts, n, k, k, integers(4), "bf16"))
    assert schedule.num_launches * schedule.max_entries >= GroupedProblem(
        places, experts, n, k, k, integers(4), "bf16"
    ).max_entries(schedule.entry_rows)


@pytest.mark.parametrize("divisor", [1, 2, 3, 12, 14, 32, 56, 66, 131, 132, 224, 448, 4097, 46340])
def test_quotients_are_exact(divisor, run_on):
    run_on(Machine())
    of, most = moe_work.reciprocal(divisor), MOST_DIVIDED // divisor
    counts = {0, 1, most} | {i * divisor + j for i in (1, 2, 7, most // divisor) for j in (-1, 0, 1)}
    for count in filter(range(most + 1).__contains__, counts):
        assert moe_work.quotient(count, of) == count // divisor


@pytest.mark.parametrize(
    "places, experts, n, k", [(8, 256, 4096, 7168), (65536, 8, 28672, 4096), (200000, 2, 8192, 64)]
)
def test_launches_count_no_further_than_quotients_hold(places, experts, n, k):
    for schedule in schedules(GroupedProblem(places, experts, n, k, max(k, 128), integers(4), "bf16")):
        k_blocks = schedule.max_entries * schedule.num_blocks * schedule.slice_k_blocks + schedule.slice_k_blocks
        assert k_blocks * max(schedule.num_groups, schedule.slice_k_blocks) <= MOST_DIVIDED
        assert (schedule.max_entries + 1) * schedule.num_blocks * schedule.num_blocks <= MOST_DIVIDED
        assert schedule.num_launches * schedule.max_entries >= places // 8 and schedule.max_entries >= 1
