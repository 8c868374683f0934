"""The kernel that makes rows of E4M3, lane by lane in NumPy; what is launched with it; and schedules of products."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels import quantize_activations, quantize_weight, quantized_linear
from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm import fp8
from cute_kernels.gemm.operands.fp8 import LEAST, dequantize_activations
from cute_kernels.gemm.operands.fp8_config import (
    BY_GROUP,
    BY_ROW,
    FOR_PRODUCTS,
    GIVEN,
    LIMBS,
    PLAIN,
    ROUNDED,
    ROWS,
    RowsConfig,
)
from cute_kernels.gemm.operands.fp8_launch import MOST_TILE_M
from cute_kernels.gemm.operands.fp8_schedule import candidates, expected_us, fp8_schedule
from cute_kernels.gemm.operands.rows import RowCodes, RowsKernel
from cute_kernels.gemm.problem import LinearProblem
from simulator import LANES, Gpu, Uint32
from tests.each import each
from tests.launchers import given_to, recording
from tests.linear.limbs import limbs_of
from tests.linear.test_fp8_mainloop import ORDER
from tests.moe.machine import Machine, Word, e4m3_bits

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROUP = 128


def made(
    x: torch.Tensor, run_on, scale: float | None = None, *, for_products: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """(bytes [2, 128], fp32 scales [2]) of x [2, 128], a row for each half of a warp, as the kernel makes them."""
    dtype = next(name for name, found in DTYPES.items() if found == x.dtype)
    gpu = Gpu()
    run_on(gpu)
    scales, makes = BY_GROUP if scale is None else GIVEN, FOR_PRODUCTS if for_products else PLAIN
    subject = RowCodes(RowsConfig(dtype, scales, makes))
    given = x.contiguous().view(torch.int32).numpy().view(np.uint32).reshape(32, 4)
    words = [gpu.pinned(np.ascontiguousarray(given[:, i]).view(type(LANES))) for i in range(4)]
    if scale is None:
        factor, bits = subject.scales_of(subject.inputs.of_group(subject.inputs.largest(words)))
    else:
        factor, bits = subject.given_scale(Uint32(np.full(32, np.float32(scale).view(np.uint32))))
    found = subject.codes(words, factor, bits, LANES % 16)
    memory = np.stack([np.asarray(word, np.uint32) for word in found], axis=1).reshape(-1).view(np.uint8)
    return memory.reshape(2, GROUP), np.broadcast_to(np.asarray(bits, np.uint32), (32,)).copy().view(np.float32)[::16]


def assert_alike(found: np.ndarray, wanted: torch.Tensor) -> None:
    """Of bytes; one NaN is as good as another, and so is one zero."""
    numbers = torch.from_numpy(found.copy()).view(torch.float8_e4m3fn).float()
    assert torch.equal(numbers.nan_to_num(nan=1e6), wanted.float().nan_to_num(nan=1e6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_codes_and_scales_are_those_of_the_reference(dtype: str, seed: int, run_on):
    x = torch.randn(2, GROUP, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 3)
    x[0, 5] *= (1, 100, 0, 1000, 1, 10)[seed]
    if seed == 4:
        x[1] = 0
    x = x.to(DTYPES[dtype])
    codes, scales = quantize_activations(x, GROUP)
    found, found_scales = made(x, run_on, for_products=False)
    assert_alike(found, codes)
    assert np.array_equal(found_scales, scales[:, 0].numpy())
    ordered, _ = made(x, run_on)
    assert np.array_equal(ordered, found[:, ORDER])


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), LEAST / 1024, 3e38, 0.0])
def test_numbers_at_the_ends_are_those_of_the_reference(value: float, run_on):
    x = torch.linspace(-1, 1, 2 * GROUP).view(2, GROUP).bfloat16()
    x[1] = x[1] * abs(value) if np.isfinite(value) else x[1]
    x[1, 77] = value
    codes, scales = quantize_activations(x, GROUP)
    found, found_scales = made(x, run_on, for_products=False)
    assert_alike(found, codes)
    np.testing.assert_array_equal(found_scales, scales[:, 0].numpy())


@pytest.mark.parametrize("scale", [1.0, 0.02, 3.7e-5, 12.5])
def test_a_given_scale_is_divided_by(scale: float, run_on):
    x = torch.randn(2, GROUP, generator=torch.Generator().manual_seed(7)).bfloat16()
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    codes, _ = quantize_activations(x, scale=torch.tensor(scale))
    found, scales = made(x, run_on, scale, for_products=False)
    assert_alike(found, codes)
    assert (scales == np.float32(scale)).all()


def test_quotients_are_rounded_to_nearest(run_on):
    run_on(Gpu())
    subject = RowCodes(RowsConfig("bf16"))
    random = np.random.default_rng(0)
    for _ in range(64):
        by = np.exp2(random.uniform(-119, 120, 32)).astype(np.float32)
        found = np.asarray(subject.over(by.view(type(LANES))), np.float32)
        np.testing.assert_array_equal(found, np.float32(1) / by)


# -- launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, m, k, scale", [("fp8_block", 33, 320, None), ("w4gchannel", 300, 256, None), ("mxfp4", 65, 384, 0.5)]
)
def test_a_product_is_two_launches(name: str, m: int, k: int, scale: float | None):
    weight = quantize_weight(torch.randn(192, k), format=name, dtype=torch.bfloat16)
    x, given = torch.randn(m, k).bfloat16(), None if scale is None else torch.tensor(scale)
    with recording() as cache:
        y = quantized_linear(x, weight, activations="fp8", activation_scale=given, out_dtype=torch.float32)
    assert y.shape == (m, 192) and y.dtype == torch.float32
    first, second = cache.launches
    kind = GIVEN if scale is not None else BY_ROW if not weight.group_size else BY_GROUP
    assert first.symbol == f"linear_fp8_rows_bf16_{kind}" and second.symbol.startswith("linear_wgmma_")
    groups = -(-k // GROUP)
    rows = dict(zip(("x", "end", "rows", "given", "out", "scales", "places", "out_pieces", "groups", "scale_groups",
                     "group_stride", "place_stride"), first.arguments, strict=True))  # fmt: skip
    assert (rows["places"], rows["groups"], rows["scale_groups"], rows["out_pieces"]) == (
        m,
        groups,
        groups,
        16 * groups,
    )
    assert rows["place_stride"] == 1 and rows["group_stride"] % 4 == 0
    assert (rows["given"] != 0) == (scale is not None)
    # The last tile, and what of 16 bytes lies before it, brings scales that there is room for.
    assert rows["group_stride"] >= (m - 1) // 8 * 8 + MOST_TILE_M + 4
    product = second.arguments
    assert product[0].shape == (m, 64 * groups) and product[0].dtype == torch.bfloat16
    assert product[0].data_ptr() == rows["out"] and {rows["scales"], rows["group_stride"]} <= {*product[1:]}


@pytest.mark.parametrize(
    "name, m, k, scale",
    [("fp8", 1, 320, None), ("fp8", 64, 256, 0.5), ("fp8_block", 32, 140, None), ("w4g128", 64, 256, None),
     ("mxfp4", 3, 2880, None), ("w4gchannel", 1, 320, 0.5)],
)  # fmt: skip
def test_few_rows_are_rounded_in_one_launch_and_multiplied_in_16_bits(name: str, m: int, k: int, scale: float | None):
    weight = quantize_weight(torch.randn(192, k), format=name, dtype=torch.bfloat16)
    x, given = torch.randn(m, k).bfloat16(), None if scale is None else torch.tensor(scale)
    with recording() as cache:
        quantized_linear(x, weight)
        y = quantized_linear(x, weight, activations="fp8", activation_scale=given)
    assert y.shape == (m, 192) and weight.codes not in fp8._kept_rows
    plain, first, second = (launch for launch in cache.launches if "linear_inputs" not in launch.symbol)
    assert first.symbol.endswith("_rounded") and second.symbol == plain.symbol
    rows = dict(zip(ROWS.names, first.arguments, strict=True))
    whole = -(-k // 8) * 8
    assert (rows["places"], rows["out_pieces"], rows["groups"]) == (m, whole // 8, -(-k // GROUP))
    assert (rows["given"] != 0) == (scale is not None)
    multiplied = second.arguments[0]
    assert multiplied.shape == (m, whole) and multiplied.dtype == torch.bfloat16
    assert multiplied.data_ptr() == rows["out"]


@pytest.mark.parametrize(
    "name, m, dtype, options",
    [("mxfp4", 3, torch.bfloat16, {"activation_scale": torch.tensor(0.5)}),
     ("w4g128", 65, torch.bfloat16, {}), ("fp8_block", 33, torch.bfloat16, {}), ("w4g128", 3, torch.float16, {}),
     ("w4g128", 3, torch.bfloat16, {"batch_invariant": True})],
)  # fmt: skip
def test_products_of_other_rows_are_of_fp8_operands(name: str, m: int, dtype: torch.dtype, options: dict[str, Any]):
    """So a batch-invariant row has the same kernel whatever is computed with it."""
    weight = quantize_weight(torch.randn(192, 256), format=name, dtype=dtype)
    with recording() as cache:
        quantized_linear(torch.randn(m, 256).to(dtype), weight, activations="fp8", **options)
    assert [launch.symbol.split("_")[2] for launch in cache.launches] == [
        "rows",
        cache.launches[1].symbol.split("_")[2],
    ]
    assert "e4m3" in cache.launches[1].symbol


@pytest.mark.parametrize("group_size", [0, 128])
def test_activations_are_one_launch(group_size: int):
    x = torch.randn(2, 3, 520).bfloat16()
    with recording() as cache:
        codes, scales = quantize_activations(x, group_size)
    (launch,) = cache.launches
    assert launch.symbol == f"linear_fp8_rows_bf16_{'groups' if group_size else 'rows'}_plain"
    assert codes.shape == x.shape and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (2, 3, 5 if group_size else 1)
    assert launch.arguments[0].shape == (6, 520)  # a matrix, as the kernel is compiled for
    assert launch.arguments[6:] == (6, 65, 5, *((5, 1, 5) if group_size else (1, 1, 1)))


@pytest.mark.parametrize(
    "x",
    [torch.ones(3, 100).bfloat16(), torch.ones(3, 64), torch.ones(0, 64).bfloat16(), torch.ones(64, 3).bfloat16().T],
)
def test_rows_that_no_kernel_takes_are_torchs(x: torch.Tensor):
    with recording() as cache:
        codes, _ = quantize_activations(x)
    assert not cache.launches and codes.shape == x.shape and (codes.float() == 416).all()  # 512 / 1.25


# -- schedules --------------------------------------------------------------------------------------------------------


@each("name", ["fp8_block", "fp8", "mxfp4", "w4g128", "w4g32"])
@each("m", [1, 16, 100, 1000, 8192])
@each("invariant", [False, True])
def test_every_product_has_a_schedule_that_covers_it(name: str, m: int, invariant: bool):
    problem = LinearProblem(m, 1000, 4096, 4096, weight_format(name), "bf16", batch_invariant=invariant)
    schedule = fp8_schedule(problem)
    config = schedule.config
    assert config.can_implement() is None and schedule.m_tiles * config.tile_m >= m
    assert schedule.k_blocks * config.block_k == 4096 and schedule.num_tiles == 16
    assert not invariant or not schedule.config.reduction.splits_k or schedule.splits == 1
    assert expected_us(problem, schedule) == min(expected_us(problem, one) for one in candidates(problem))


# -- the whole kernel -------------------------------------------------------------------------------------------------


def permuted(a: int, b: int, selector: int) -> Word:
    """What the PTX manual's prmt.b32 makes of eight bytes, no sign among them."""
    both, places = int(a) | int(b) << 32, [int(selector) >> 4 * i & 7 for i in range(4)]
    return Word(sum((both >> 8 * place & 255) << 8 * i for i, place in enumerate(places)))


HALVES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().numpy().view(np.uint16).tolist()
"""FP16 of each byte of E4M3, as bits."""


class RowsMachine(Machine):
    """With what the kernel computes with, of a thread's own numbers."""

    grid: tuple[int, int, int]

    def ptx(self) -> SimpleNamespace:
        found = super().ptx()
        found.absolute, found.warp_max = np.abs, lambda x: max(self.exchanged(x))
        found.prmt = permuted
        return found

    def numbers(self) -> SimpleNamespace:
        found = super().numbers()
        found.multiply, found.bits = lambda a, b: np.float32(a) * np.float32(b), lambda x: Word(x.view(np.uint32))
        found.pack_e4m3x2 = lambda low, high: Word(e4m3_bits(low) | e4m3_bits(high) << 8)
        load = self.ptx().load_global_words
        found.load_global_if = lambda inside, *given, **options: load(*given, **options) if inside else [Word(0)] * 4
        found.e4m3x2_to_f16x2 = lambda pair: Word(HALVES[int(pair) & 255] | HALVES[int(pair) >> 8 & 255] << 16)
        return found

    def cute(self) -> SimpleNamespace:
        found = super().cute()
        found.arch.grid_dim = lambda: self.grid
        found.arch.shuffle_sync_bfly = lambda value, offset: self.exchanged(value)[self.lane ^ offset]
        return found


def run_rows(machine: RowsMachine, kernel: Any, given: Any, *arguments: int) -> None:
    """Runs a kernel of rows as it is launched with these arguments."""
    launches = []

    def launch(grid, block, **options):
        machine.grid = grid
        for one in np.ndindex(*grid):
            machine.run(lambda: RowsKernel.kernel(kernel, *launches[0]), [one], block[0])

    kernel.kernel = lambda *arguments: launches.append(arguments) or SimpleNamespace(launch=launch)
    RowsKernel.launch(kernel, given_to(ROWS, given, *arguments), None)


@pytest.mark.parametrize("kind", [BY_GROUP, BY_ROW, GIVEN])
@pytest.mark.parametrize("k", [8, 264, 2184])
@pytest.mark.parametrize(("for_products", "half_last"), [(False, False), (True, False), (True, True)])
def test_every_place_that_there_is_gets_its_row(kind: str, k: int, for_products: bool, half_last: bool, run_on):
    machine = RowsMachine()
    run_on(machine)
    x = torch.randn(4, k, generator=torch.Generator().manual_seed(8)).bfloat16()
    rows, scale = torch.tensor([3, 0, 1 << 30], dtype=torch.int32), torch.tensor([0.01])
    groups, count = -(-k // GROUP), 2
    scale_groups = groups if for_products or kind == BY_GROUP else 1
    pieces, pitch = (16 * groups, 8) if for_products else (k // 8, 1)
    strides = (pitch, 1) if for_products else (1, scale_groups)
    given = SimpleNamespace(shape=tuple(x.shape), address=machine.put(x))
    end, table = machine.put(torch.tensor([count], dtype=torch.int32)), machine.put(rows)
    out = machine.put(torch.full((3, 8 * pieces), 0x55, dtype=torch.uint8))
    scales = machine.put(torch.full((groups * 8 + 24,), -7.0))
    config = RowsConfig("bf16", kind, FOR_PRODUCTS if for_products else PLAIN, half_last)
    arguments = machine.put(scale), out, scales, 3, pieces, groups, scale_groups, *strides
    run_rows(machine, RowsKernel(config), given, end, table, *arguments)
    found = machine.get(out, (3, 8 * pieces), torch.uint8)
    codes, wanted = quantize_activations(
        x[rows[:count].long()], GROUP if kind == BY_GROUP else 0, scale=scale if kind == GIVEN else None
    )
    want = torch.zeros(count, 8 * pieces, dtype=torch.uint8)
    want[:, :k] = codes.view(torch.uint8)
    if for_products:
        want = want.view(count, groups, GROUP)
        if half_last:  # zeros of the padding, then the row's last 64
            want[:, -1] = want[:, -1].roll(GROUP // 2, dims=-1)
        want = want[..., ORDER].flatten(1)
    assert_alike(found[:count].numpy(), want.view(torch.float8_e4m3fn))
    assert (found[count:] == 0x55).all()
    stored = machine.get(scales, (groups * 8 + 24,), torch.float32)
    of_places = stored.as_strided((count, scale_groups), strides[::-1])
    assert torch.equal(of_places, wanted.expand(count, scale_groups))
    assert (stored == -7).sum() == stored.numel() - count * scale_groups


@pytest.mark.parametrize("kind", [BY_GROUP, BY_ROW, GIVEN])
@pytest.mark.parametrize("k", [8, 264, 2184])
def test_rounded_rows_are_what_codes_and_scales_stand_for(kind: str, k: int, run_on):
    machine = RowsMachine()
    run_on(machine)
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(8)).bfloat16()
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    scale, groups = torch.tensor([0.01]), -(-k // GROUP)
    given = SimpleNamespace(shape=tuple(x.shape), address=machine.put(x))
    out = machine.put(torch.full((4, k), -7.0).bfloat16())
    kernel = RowsKernel(RowsConfig("bf16", kind, ROUNDED))
    run_rows(machine, kernel, given, 0, 0, machine.put(scale), out, 0, 3, k // 8, groups, 0, 0, 0)
    found = machine.get(out, (4, k), torch.bfloat16)
    size = GROUP if kind == BY_GROUP else 0
    parts = quantize_activations(x, size, scale=scale if kind == GIVEN else None)
    want = dequantize_activations(*parts, size).bfloat16()
    assert torch.equal(found[:3].nan_to_num(nan=1e6), want.nan_to_num(nan=1e6)) and (found[3] == -7).all()
    assert found[0].isfinite().all() and found[2].isnan().any()


@pytest.mark.parametrize("k", [8, 264])
def test_limbs_of_every_place_that_there_is_lie_where_products_read_them(k: int, run_on):
    machine = RowsMachine()
    run_on(machine)
    x = torch.randn(4, k, generator=torch.Generator().manual_seed(8)).bfloat16()
    rows, count, groups, pitch = torch.tensor([3, 0, 1 << 30], dtype=torch.int32), 2, -(-k // GROUP), 8
    given = SimpleNamespace(shape=tuple(x.shape), address=machine.put(x))
    end, table = machine.put(torch.tensor([count], dtype=torch.int32)), machine.put(rows)
    out = machine.put(torch.full((3, groups, 2, GROUP), 0x55, dtype=torch.int8))
    scales = machine.put(torch.full((groups, pitch), -7.0))
    sizes = 3, 16 * groups, groups, groups, pitch, 1
    run_rows(machine, RowsKernel(RowsConfig("bf16", makes=LIMBS)), given, end, table, 0, out, scales, *sizes)
    found = machine.get(out, (3, groups, 2, GROUP), torch.int8).numpy()
    wanted, wanted_scales = limbs_of(x[rows[:count].long()])
    assert np.array_equal(found[:count], wanted) and (found[count:] == 0x55).all()
    assert np.array_equal(machine.get(scales, (groups, pitch), torch.float32).numpy()[:, :count], wanted_scales)
