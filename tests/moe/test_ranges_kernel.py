"""The code of the kernel of runs, thread by thread: copies, waits, limbs of entries, blocks' results. Not its own are
the making of limbs, in whose place lie the rows themselves, and what the tensor cores do with them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import WeightFormat, integers, weight_format
from cute_kernels.gemm.activations import ActivationFunction, ClampedSwiglu, number_of, out_features
from cute_kernels.gemm.activations import config_of as own_activation
from cute_kernels.gemm.experts import arguments as declared
from cute_kernels.gemm.experts.ranges import kernel as ranges_kernel
from cute_kernels.gemm.experts.ranges.config import RangeConfig, entry_rows
from cute_kernels.gemm.experts.ranges.kernel import RangeKernel, RangeRoles
from cute_kernels.gemm.experts.ranges.schedule import row_factor
from cute_kernels.gemm.experts.reference import grouped_linear_reference, route_reference
from cute_kernels.gemm.out_kinds import BF16, FP32
from cute_kernels.gemm.packed_experts import PackedExperts, stack_experts
from cute_kernels.gemm.quantize import quantize_weight
from cute_kernels.gemm.stream import epilogue as stream_epilogue
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.runtime.composed import changed
from layouts.transform import unpack
from layouts.weights import hopper
from simulator import Altered
from tests.launchers import given_to
from tests.linear.cases import known
from tests.moe.machine import Machine
from tests.moe.range_configs import range_config

CONFIG = range_config(integers(4), "bf16", k_warps=2, chunk_k_blocks=1, num_stages=4, epilogue_warps=1)
ROW_BYTES = 256  # of 128 inputs: as many as their limbs take
HALF = np.float32(0.5)


Entries = list[tuple[int, int]]  # (expert, rows), in the order of entries


def sorted_entries(counts: list[int], tokens: int) -> Entries:
    """Of experts with so many rows each."""
    return [(expert, min(tokens, count - i)) for expert, count in enumerate(counts) for i in range(0, count, tokens)]


def assigned_entries(ids: torch.Tensor, num_experts: int, tokens: int) -> Entries:
    """Of assignments as they are: in the order of their first ones."""
    counted = Counter(expert for expert in ids.tolist() if 0 <= expert < num_experts)
    begins: Counter[int] = Counter()
    entries = []
    for expert in ids.tolist():
        if expert in counted:
            if begins[expert] % tokens == 0:
                entries.append((expert, min(tokens, counted[expert] - begins[expert])))
            begins[expert] += 1
    return entries


class Rows:
    """Stands for `ResidentRows`: twice a row's inputs are in the place of its limbs, a half in that of its scale."""

    def __init__(self, test: Launch):
        self.test = test

    def make(self, x, places, begin, end, warp, lane) -> None:
        machine, tokens = self.test.machine, self.test.config.tile_m
        assert begin % (end - begin) == 0 and 1 <= x.rows <= tokens and places.x_address % 1024 == 0
        self.test.begin_entry()
        if (warp, lane) == (0, 0):
            self.test.made[machine.cta.block[0]].append((places.x_address, x.rows))
        shared = machine.cta.shared
        for row in range(tokens):
            source = int(x.row(row))  # all lanes ask
            if row >= x.rows or (row + lane) % self.test.config.consumer_warps != warp or lane >= 8:
                continue
            for k_block in range(begin + lane, end, 8):  # each warp and lane its share
                count = min(max(8 * x.row_pieces - 128 * k_block, 0), 128)
                first = x.address + (source * 8 * x.row_pieces + 128 * k_block) * 2
                values = np.zeros(128, np.float32)
                values[:count] = 2 * halves(machine.memory, first, count)
                at = places.x_address + ((k_block - begin) * tokens + row) * ROW_BYTES
                shared[at : at + ROW_BYTES] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
                at = places.x_scales + ((k_block - begin) * tokens + row) * 4
                shared[at : at + 4].view(np.float32)[0] = HALF
        self.test.end_entry()


def halves(memory: np.ndarray, address: int, count: int) -> np.ndarray:
    return (memory[address : address + 2 * count].view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@lru_cache(maxsize=4096)
def weights(form: WeightFormat, codes: bytes, scales: bytes) -> np.ndarray:
    """fp64 [64, 128] of a k block of a tile, without scales that hold for all of K."""
    blob = torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(1, -1, 2048)
    values = hopper.restore(blob, form.bits)
    values = unpack(values, 4) if form.bits == 4 else values
    if not form.bytes_in_e4m3:
        groups = halves(np.frombuffer(scales, np.uint8), 0, len(scales) // 2).reshape(-1, 64)
        return (values.numpy().astype(np.float64) - 8) * groups.T.repeat(128 // len(groups), axis=1)
    values = values.view(64, -1, min(form.group_size or 128, 128))
    of_groups = torch.frombuffer(bytearray(scales), dtype=torch.uint8) if scales else torch.ones(64).view(torch.uint8)
    of_groups = of_groups.view(form.scale_dtype(torch.bfloat16)).view(-1, 64).T.contiguous()
    return form.dequantize(values, of_groups, None).double().numpy().reshape(64, 128)


class Launch:
    """A launch on the machine of threads; of assignments as they are, ``parts`` of K with results of their own.

    made: for each CTA (place of limbs, rows) of what it makes limbs of; filled, read: times that a stage was filled,
    and that a warp has read it, (CTA, stage); chunks: of each entry of a CTA; makers, readers: threads that have made
    an entry's limbs, and chunks of it that warps have read, (CTA, entry of the CTA).
    """

    def __init__(self, config: RangeConfig, num_ctas: int, x_slots: int, run_on, parts: int = 1):
        self.config, self.num_ctas, self.x_slots, self.parts = config, num_ctas, x_slots, parts
        self.machine = Machine(1 << 23)
        run_on(Altered(self.machine, modules={ranges_kernel: {"load_channel": self.load_channel}}))
        self.made: list[list[tuple[int, int]]] = [[] for _ in range(num_ctas)]
        self.filled: Counter = Counter()
        self.read: Counter = Counter()
        self.makers: Counter = Counter()
        self.readers: Counter = Counter()
        self.kernel: Any = RangeKernel(config)
        roles: Any = RangeRoles(config, self.kernel.roles.routing)
        self.kernel.roles = self.roles = roles
        roles.rows = Rows(self)
        roles.copy_k_blocks, roles.multiply_k_blocks = self.copy_k_blocks, self.multiply_k_blocks
        roles.products.finish = lambda acc: None  # a row has one place here, whatever the columns of its limbs
        roles.epilogue = stream_epilogue.StreamEpilogue(config)

    def load_channel(self, config, decoder, operands, tile, row, tile_bytes) -> list[Any]:
        """Stands for `device_operands.load_channel`: fp32 scales, whole for each row or byte by byte after a tile's."""
        at = operands.scales + int(tile) * int(tile_bytes)
        if config.format.row_scales:
            at += int(tile_bytes) - config.more_scale_bytes
            rows = self.machine.memory[at : at + 4 * 64].reshape(4, 64).T.copy().view(np.float32)[:, 0]
        else:
            rows = self.machine.memory[operands.scales + 256 * int(tile) :][:256].view(np.float32)
        return [([rows[row], rows[row + 8]], None)]

    def begin_entry(self) -> None:
        """A thread's next entry, in a slot of limbs that no warp reads any more."""
        here = self.machine.here
        here.entry = getattr(here, "entry", -1) + 1
        cta, before = here.cta.block[0], here.entry - self.x_slots
        if before >= 0:
            assert self.readers[cta, before] == 4 * self.chunks[cta][before], "limbs are made that are still read"

    def end_entry(self) -> None:
        self.makers[self.machine.cta.block[0], self.machine.here.entry] += 1

    def copy_k_blocks(self, shape, memory, begins, k_block, here) -> None:
        """As the kernel, into a stage that all warps of its warpgroup have given back."""
        place = self.machine.cta.block[0], here.stage
        if self.machine.lane == 0:
            assert self.read[place] == self.filled[place] * 4, "a stage is filled that is still read"
            self.filled[place] += 1
        RangeRoles.copy_k_blocks(self.roles, shape, memory, begins, k_block, here)

    def multiply_k_blocks(self, acc, base, x_offset, place) -> None:
        """Adds what the tensor cores would to the accumulators of one thread."""
        config, shared, entry = self.config, self.machine.cta.shared, self.machine.here.entry
        cta = self.machine.cta.block[0]
        assert self.makers[cta, entry] == 32 * config.consumer_warps, "limbs are read that are not all there"
        if self.machine.warp == config.consumer_warps - 1:
            self.machine.turns.linger()  # what others do too early is seen
        for tile in range(config.n_tiles):
            for k_block in range(config.chunk_k_blocks):
                number = tile * config.chunk_k_blocks + k_block
                codes = base + number * config.k_block_bytes
                scales = base + config.scale_offset + number * config.k_block_scale_bytes
                w = weights(
                    config.format,
                    shared[codes : codes + config.k_block_bytes].tobytes(),
                    shared[scales : scales + config.k_block_scale_bytes].tobytes(),
                )
                at = x_offset + k_block * config.activations.k_block_limb_bytes(config)
                x = halves(shared, place.x + at + 2 * place.t * ROW_BYTES, 256).reshape(2, 128)  # of two tokens
                sums = w[16 * place.row_warp + place.g :: 8][:2] @ x.T
                scale_at = place.x_scales + ranges_kernel.scale_offset(at)
                scales = shared[scale_at : scale_at + 8].view(np.float32)
                for i, products in enumerate((sums.astype(np.float32) * scales).flat, 4 * tile):
                    acc[i] = np.float32(acc[i] + products)
        if self.machine.lane == 0:
            self.read[cta, base // config.stage_bytes] += 1
            self.readers[cta, entry] += 1

    def run(
        self,
        weight: PackedExperts,
        x: torch.Tensor,
        offsets: torch.Tensor,
        rows: torch.Tensor | None,
        bias: torch.Tensor | None = None,
        activation: str | ActivationFunction | None = None,
        out_dtype: torch.dtype = torch.float32,
        waits: int = 1,
    ) -> torch.Tensor:
        """Results, of which those that are not written are -7."""
        places = (x if rows is None else rows).shape[0]
        routing = self.machine.put(offsets), self.machine.put(rows)
        entries = sorted_entries(offsets.diff().tolist(), entry_rows(self.config.format))
        return self.start(weight, x, routing, entries, places, (), bias, activation, out_dtype, waits)

    def run_assigned(
        self, weight: PackedExperts, x: torch.Tensor, ids: torch.Tensor, topk: int, **options: Any
    ) -> torch.Tensor:
        """As `work_range`, with results of one part after the other; ids: of ``topk`` assignments for each row of x,
        one after the other."""
        # Whoever reads behind the last one finds an expert.
        routing = (self.machine.put(torch.cat([ids, torch.zeros_like(ids)])),)
        more = ids.element_size() // 4, row_factor(topk), self.parts.bit_length() - 1
        entries = assigned_entries(ids, len(weight), entry_rows(self.config.format))
        return self.start(weight, x, routing, entries, len(ids), more, **options)

    def start(
        self,
        weight: PackedExperts,
        x: torch.Tensor,
        routing: tuple[int, ...],
        entries: Entries,
        places: int,
        more: tuple[int, ...],
        bias: torch.Tensor | None = None,
        activation: str | ActivationFunction | None = None,
        out_dtype: torch.dtype = torch.float32,
        waits: int = 1,
    ) -> torch.Tensor:
        """Launches. routing: addresses; more: sizes that the kernel of assignments is given beside the others."""
        machine, config, n = self.machine, self.config, weight.shape[0]
        shape = (self.parts * places, out_features(n, activation))
        self.codes, self.scales = machine.put(weight.codes), machine.put(weight.scales)
        out = machine.put(torch.full(shape, -7.0, dtype=out_dtype))
        given = SimpleNamespace(shape=tuple(x.shape), address=machine.put(x))
        blocks = [(cta, 0, 0) for cta in range(self.num_ctas)]
        waiting: list[tuple] = []

        def start(**options):
            assert options["grid"] == (self.num_ctas, 1, 1) and options["block"][0] == config.num_threads
            machine.run(lambda: RangeKernel.kernel(self.kernel, *waiting[0]), blocks, config.num_threads)

        self.kernel.kernel = lambda *arguments: waiting.append(arguments) or SimpleNamespace(launch=start)
        num_tiles, k_blocks = weight.codes.shape[1], part_k_blocks(self, weight)
        shares = [Counter(one[:2] for one in some) for some in blocks_of(self, weight, entries)]
        self.chunks = [[count * k_blocks // config.chunk_k_blocks for count in some.values()] for some in shares]
        arguments = given_to(
            declared.ASSIGNED if more else declared.RANGES, given, self.codes, self.scales, machine.put(bias), out,
            *routing, n, num_tiles, k_blocks, self.num_ctas, len(weight), places, self.x_slots, *more, waits,
            number_of(activation), {torch.float32: FP32, torch.bfloat16: BF16}[out_dtype],
        )  # fmt: skip
        RangeKernel.launch(self.kernel, arguments, None)
        return machine.get(out, shape, out_dtype)


def config_of(k: int, x_slots: int, **fields: Any) -> RangeConfig:
    config = changed(CONFIG, **fields)
    k_blocks = x_slots * -(-k // 128)
    config = changed(config, x_bytes=k_blocks * config.activations.k_block_bytes(config))
    assert config.can_implement() is None
    return config


CASES: dict[str, tuple[tuple[int, ...], int, int, int, int, dict[str, Any]]] = {
    "entries of one and of many rows": ((3, 0, 1, 17, 0, 8, 0, 0), 130, 256, 3, 2, {}),
    "one slot": ((3, 0, 1, 17, 0, 0, 0, 8), 130, 256, 3, 1, {}),
    "two tiles, the last block of one": ((2, 9, 1, 1), 192, 384, 2, 2, {"n_tiles": 2}),
    "chunks of two k blocks": ((2, 9, 1, 0), 200, 512, 2, 1, {"chunk_k_blocks": 2}),
    "three warpgroups": ((2, 9, 0, 1), 128, 640, 2, 2, {"k_warps": 3, "num_stages": 6}),
    "fewer chunks than warpgroups": ((2, 1, 0, 4), 256, 128, 2, 2, {"k_warps": 4, "num_stages": 4}),
    "more CTAs than blocks": ((0, 1, 0, 0), 128, 128, 4, 2, {}),
    "one expert has all": ((0, 0, 20, 0), 64, 256, 3, 1, {}),
    "no rows at all": ((0, 0, 0, 0), 64, 128, 2, 2, {}),
    "tails of N and K": ((1, 2, 0, 3), 130, 200, 3, 2, {}),
    "two rounds of experts": (tuple(i % 50 == 49 for i in range(152)), 64, 128, 2, 2, {"expert_rounds": 2}),
    "rows that more than one warp's lanes are read": ((20, 0, 19, 0), 64, 128, 3, 2, {}),
    "two epilogue warps": ((3, 8, 1, 0), 64, 128, 1, 2, {"epilogue_warps": 2}),
    "groups of 32": ((3, 9, 1, 0), 130, 200, 3, 2, {"format": integers(4, 32)}),
    "groups of 32, half a k block last": ((3, 9, 1, 0), 130, 320, 3, 2, {"format": integers(4, 32), "half_last": True}),
    "groups of 64, half a k block": ((3, 0, 1, 0), 192, 40, 2, 1, {"format": integers(4, 64), "half_last": True}),
    "scales of two levels": ((3, 9, 1, 0), 130, 256, 3, 2, {"format": weight_format("nvfp4"), "n_tiles": 2}),
    "two levels, half a k block": ((2, 5, 0, 1), 130, 320, 3, 1, {"format": weight_format("nvfp4"), "half_last": True}),
    "8 bits in groups": ((3, 9, 1, 0), 130, 256, 3, 2, {"format": weight_format("fp8_block"), "n_tiles": 2}),
    "8 bits, a scale a row": ((3, 9, 1, 0), 130, 256, 3, 1, {"format": weight_format("fp8"), "n_tiles": 2}),
}


@pytest.mark.parametrize("counts, n, k, num_ctas, x_slots, fields", CASES.values(), ids=list(CASES))
def test_what_is_stored_is_what_the_reference_says(counts, n, k, num_ctas, x_slots, fields, run_on):
    counts = [int(count) for count in counts]
    weight = stack_experts([packed(n, k, fields.get("format", CONFIG.format), seed) for seed in range(len(counts))])
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(7, k, generator=generator).to(torch.bfloat16)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    places = sum(counts) + 2  # of which two are nobody's
    rows = torch.randint(0, 7, (places,), generator=generator).int()
    launch = Launch(config_of(k, x_slots, **fields), num_ctas, x_slots, run_on)
    found = launch.run(weight, x, offsets, rows)
    torch.testing.assert_close(found[:-2], exact(x[rows.long()], weight, counts)[:-2], rtol=2e-5, atol=1e-6)
    assert torch.all(found[-2:] == -7.0)
    entries = sorted_entries(counts, entry_rows(launch.config.format))
    check_copies(launch, weight, entries)
    check_limbs(launch, weight, entries)


def packed(n: int, k: int, form: WeightFormat, seed: int) -> PackedWeight:
    if not form.bytes_in_e4m3:
        return known(n, k, group_size=form.group_size, seed=seed).pack()
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return quantize_weight(dense * 2.0**seed, format=form, dtype=torch.bfloat16)


def exact(x: torch.Tensor, weight: PackedExperts, counts: list[int]) -> torch.Tensor:
    """Products with weights that are not rounded."""
    parts = x.double().split([*counts, x.shape[0] - sum(counts)])
    dense = [*weight.dequantize(torch.float64), torch.zeros(weight.shape, dtype=torch.float64)]
    return torch.cat([part @ w.T for part, w in zip(parts, dense, strict=True)]).float()


def part_k_blocks(launch: Launch, weight: PackedExperts) -> int:
    """K blocks of 128 inputs of a part of K."""
    return -(-weight.codes.shape[2] // launch.config.k_block_tiles) // launch.parts


def blocks_of(launch: Launch, weight: PackedExperts, entries: Entries) -> list[list[tuple[int, int, int, int]]]:
    """For each CTA (entry, part of K, expert, block), in order: plain Python."""
    per_expert = -(-weight.codes.shape[1] // launch.config.n_tiles)
    every = [
        (i, part, expert, block)
        for i, (expert, _) in enumerate(entries)
        for part in range(launch.parts)
        for block in range(per_expert)
    ]
    each, rest = divmod(len(every), launch.num_ctas)
    return [every[i * each + min(i, rest) : (i + 1) * each + min(i + 1, rest)] for i in range(launch.num_ctas)]


def check_copies(launch: Launch, weight: PackedExperts, entries: Entries) -> None:
    """Each CTA copies every k block of its blocks once, in their order."""
    config, (_, tiles, count, _) = launch.config, weight.codes.shape
    own, half = part_k_blocks(launch, weight), config.activations.half_last
    number = 0
    for scales, first, size, k_block_bytes in (
        (False, launch.codes, weight.codes.nbytes, config.k_block_bytes),
        (True, launch.scales, weight.scales.nbytes, config.k_block_scale_bytes),
    ):
        for cta, blocks in enumerate(blocks_of(launch, weight, entries)):
            tile_bytes = count * k_block_bytes // config.k_block_tiles + scales * config.more_scale_bytes
            wanted = [
                ((expert * tiles + min(block * config.n_tiles + i, tiles - 1)) * tile_bytes + begin, length)
                for _, part, expert, block in blocks
                for k_block in range(part * own, (part + 1) * own, config.chunk_k_blocks)
                for i in range(config.n_tiles)
                if k_block_bytes
                for begin, length in pieces(config, k_block, half and k_block == own - 1, scales, k_block_bytes)
            ]
            copied = [c for c in launch.machine.copies if c[0][0] == cta and first <= c[1] < first + size]
            assert [(source - first, length) for _, source, length, *_ in copied] == wanted
            number += len(wanted)
    assert len(launch.machine.copies) == number


def pieces(config: RangeConfig, k_block: int, is_half: bool, scales: bool, k_block_bytes: int) -> list[tuple[int, int]]:
    """(first byte of a tile's, bytes) of the copies of a chunk: half a k block's scales are copied twice."""
    first, size, half = k_block * k_block_bytes, config.chunk_k_blocks * k_block_bytes, k_block_bytes // 2
    if scales and config.activations.half_last:
        return [(first, half), (first + half * (not is_half), half)]
    return [(first, size - half * is_half)]


def check_limbs(launch: Launch, weight: PackedExperts, entries: Entries) -> None:
    """A CTA makes the limbs of an entry's part of K once, in slots that take turns."""
    config, k_blocks = launch.config, part_k_blocks(launch, weight)
    for made, blocks in zip(launch.made, blocks_of(launch, weight, entries), strict=True):
        own = list(dict.fromkeys((entry, part) for entry, part, _, _ in blocks))
        assert [count for _, count in made] == [entries[entry][1] for entry, _ in own]
        places = [place for place, _ in made]
        pitch = k_blocks * config.activations.k_block_limb_bytes(config)
        slots = [min(places) + i % launch.x_slots * pitch for i in range(len(made))]
        assert places == slots


CLAMPED = ClampedSwiglu(limit=3.0)


@pytest.mark.parametrize("activation", [None, "silu", "swiglu", CLAMPED, "relu2"], ids=str)
def test_bias_activation_and_output_dtype_are_the_experts(activation, run_on):
    n, k = 132, 128
    weight = stack_experts([known(n, k, group_size=128, seed=seed).pack() for seed in range(4)])
    x = torch.randn(12, k, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    bias = torch.randn(4, n, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    offsets = torch.tensor([0, 2, 2, 12, 12], dtype=torch.int32)
    options: dict[str, Any] = {"bias": bias, "activation": activation, "out_dtype": torch.bfloat16}
    config = config_of(k, 2, activation=own_activation(activation))
    found = Launch(config, 3, 2, run_on).run(weight, x, offsets, None, **options, waits=0)
    torch.testing.assert_close(found, grouped_linear_reference(x, weight, offsets, **options), rtol=2e-2, atol=1e-2)


# -- assignments as they are -------------------------------------------------------------------------------------------

# Ids, assignments of a row of x; then N, K, CTAs, slots and fields as above.
ASSIGNED: dict[str, tuple[tuple[int, ...], int, int, int, int, int, dict[str, Any]]] = {
    "one assignment": ((5,), 1, 130, 256, 3, 2, {}),
    "two of a token": ((5, 2), 2, 130, 256, 3, 1, {}),
    "of several tokens": ((5, 2, 2, 0, 7, 5), 2, 130, 256, 3, 2, {}),
    "of several tokens, one slot": ((5, 2, 2, 0, 7, 5), 3, 130, 256, 3, 1, {}),
    "a full warp of them": (tuple(5 * i % 8 for i in range(32)), 8, 64, 128, 3, 2, {}),
    "an expert with several entries": ((3,) * 19 + (1, 3, 3), 1, 64, 256, 2, 2, {}),
    "an expert with several entries, one slot": ((3, 1) * 10, 2, 64, 256, 3, 1, {}),
    "some of no expert": ((-1, 4, 8, 4, 2**31 - 1, 0, -(2**31), 4), 2, 72, 128, 2, 2, {}),
    "none of an expert": ((-1, 8, 9, -7), 2, 64, 128, 2, 2, {}),
    "more CTAs than blocks": ((6, -1), 2, 128, 128, 5, 2, {}),
    "two tiles, the last block of one": ((2, 7, 1, 7), 2, 192, 384, 2, 2, {"n_tiles": 2}),
    "chunks of two k blocks": ((2, 7, 1, 7), 4, 200, 512, 2, 1, {"chunk_k_blocks": 2}),
    "three warpgroups": ((2, 7, 1, 7), 1, 128, 640, 2, 2, {"k_warps": 3, "num_stages": 6}),
    "tails of N and K": ((1, 2, 0, 3, 3), 5, 130, 200, 3, 2, {}),
    "two epilogue warps": ((1, 0, 1, 0, 1), 1, 64, 128, 1, 2, {"epilogue_warps": 2}),
    "scales of two levels": ((3,) * 9 + (1, 3), 1, 72, 256, 2, 2, {"format": weight_format("nvfp4")}),
    "two levels, half a block": ((2, 7, 2, 7), 2, 72, 320, 2, 1, {"format": weight_format("nvfp4"), "half_last": True}),
    "8 bits, a scale a row": ((3,) * 9 + (1, 3), 1, 72, 256, 2, 2, {"format": weight_format("fp8")}),
}
TWO_WARPS_OF = (*(1, 6, -1, 1) * 10, 3, 6)  # more than a warp has lanes, experts in both halves


# How ids and entries are read is tested in test_assignments; here each way meets some of the launches.
ASSIGNED_CASES = [(name, 1, torch.int32) for name in ASSIGNED]
ASSIGNED_CASES += [
    (name, lanes, id_dtype)
    for name in ("more CTAs than blocks", "tails of N and K", "two epilogue warps")
    for lanes, id_dtype in ((1, torch.int64), (2, torch.int32))
]


@pytest.mark.parametrize("name, lanes, id_dtype", ASSIGNED_CASES, ids=str)
def test_results_of_assignments_are_where_they_are(name, lanes, id_dtype, run_on):
    """Those that are of no expert are not written; CTAs without a block copy nothing and end."""
    ids, topk, n, k, num_ctas, x_slots, fields = ASSIGNED[name]
    config = config_of(k, x_slots, lane_assignments=lanes, **fields)
    check_assigned(ids, topk, n, k, Launch(config, num_ctas, x_slots, run_on), id_dtype)


def check_assigned(ids, topk, n, k, launch, id_dtype) -> None:
    experts = 8
    weight = stack_experts([packed(n, k, launch.config.format, seed) for seed in range(experts)])
    x = torch.randn(-(-len(ids) // topk), k, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    given = torch.tensor(ids, dtype=id_dtype)
    found = launch.run_assigned(weight, x, given, topk).view(launch.parts, len(ids), n)
    dense, part_k = weight.dequantize(torch.float64), 128 * part_k_blocks(launch, weight)
    for part, (place, expert) in itertools.product(range(launch.parts), enumerate(ids)):
        if 0 <= expert < experts:
            inputs = slice(part * part_k, (part + 1) * part_k)
            wanted = (dense[expert, :, inputs] @ x[place // topk, inputs].double()).float()
            torch.testing.assert_close(found[part, place], wanted, rtol=2e-5, atol=1e-5)
        else:
            assert torch.all(found[part, place] == -7.0)
    entries = assigned_entries(given, experts, entry_rows(launch.config.format))
    check_copies(launch, weight, entries)
    check_limbs(launch, weight, entries)


def test_results_of_more_assignments_than_lanes_are_where_they_are(run_on):
    launch = Launch(config_of(128, 2, lane_assignments=2), 3, 2, run_on)
    check_assigned(TWO_WARPS_OF, 3, 64, 128, launch, torch.int64)


# Parts of K; ids, assignments of a row of x, N, K, CTAs, slots and fields as above.
IN_PARTS: dict[str, tuple[int, tuple[int, ...], int, int, int, int, int, dict[str, Any]]] = {
    "two parts of one assignment": (2, (5,), 1, 130, 512, 3, 1, {}),
    "two parts, two slots": (2, (5, 2, 2, -1, 7, 5), 2, 130, 256, 3, 2, {}),
    "four parts": (4, (5, 2, 2, 0, 7, 5), 3, 64, 512, 5, 1, {}),
    "chunks of two k blocks, two tiles": (2, (2, 7, 1, 7), 4, 192, 512, 2, 1, {"chunk_k_blocks": 2, "n_tiles": 2}),
    "an expert with several entries": (2, (3,) * 9 + (1, 3), 1, 64, 256, 2, 1, {}),
    "a tail of K in the last part": (2, (1, 2, 0, 3, 3), 5, 72, 504, 3, 2, {}),
    "more CTAs than blocks and parts": (2, (6, -1), 2, 64, 256, 5, 2, {}),
    "scales of two levels": (2, (3,) * 5 + (1, 3), 1, 130, 512, 3, 1, {"format": weight_format("nvfp4"), "n_tiles": 2}),
    "8 bits, a scale a row": (2, (5, 2, 2), 1, 72, 512, 3, 2, {"format": weight_format("fp8")}),
    "8 bits in groups": (4, (5, 2, 2), 1, 72, 512, 3, 2, {"format": weight_format("fp8_block")}),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_each_part_of_k_has_results_of_its_own(name, run_on):
    """One after the other, of all assignments."""
    parts, ids, topk, n, k, num_ctas, x_slots, fields = IN_PARTS[name]
    config = config_of(-(-k // 128 // parts) * 128, x_slots, lane_assignments=1, **fields)
    check_assigned(ids, topk, n, k, Launch(config, num_ctas, x_slots, run_on, parts), torch.int32)


def test_the_first_part_of_k_has_the_bias(run_on):
    """So the sum of all parts has it once."""
    parts, n, k, ids = 2, 130, 256, torch.tensor([3, 0, -1, 0], dtype=torch.int32)
    weight = stack_experts([known(n, k, group_size=128, seed=seed).pack() for seed in range(4)])
    x = torch.zeros(2, k).to(torch.bfloat16)
    bias = torch.randn(4, n, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    launch = Launch(config_of(128, 2, lane_assignments=1), 3, 2, run_on, parts)
    found = launch.run_assigned(weight, x, ids, 2, bias=bias).view(parts, len(ids), n)
    for place, expert in enumerate(ids.tolist()):
        if expert >= 0:
            assert torch.equal(found[0, place], bias[expert].float()) and not found[1, place].any()


@pytest.mark.parametrize("activation", [None, "silu", "swiglu", CLAMPED, "relu2"], ids=str)
def test_bias_and_activation_are_those_of_an_assignments_expert(activation, run_on):
    n, k = 132, 128
    weight = stack_experts([known(n, k, group_size=128, seed=seed).pack() for seed in range(4)])
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    bias = torch.randn(4, n, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    ids = torch.tensor([3, 0, 0, 2, 3, 3], dtype=torch.int32)
    options: dict[str, Any] = {"bias": bias, "activation": activation, "out_dtype": torch.bfloat16}
    config = config_of(k, 2, lane_assignments=1, activation=own_activation(activation))
    found = Launch(config, 3, 2, run_on).run_assigned(weight, x, ids, 2, **options, waits=0)
    offsets, rows, places = route_reference(ids.view(3, 2), 4)
    wanted = grouped_linear_reference(x, weight, offsets, rows=rows, **options)
    torch.testing.assert_close(found, wanted[places.flatten().long()], rtol=2e-2, atol=1e-2)
