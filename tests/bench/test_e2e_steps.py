"""Bare decode loops: that they compute a model's step, what they must read, how a run is recorded and gone on with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bench import command_line, e2e_steps, steps
from bench.e2e_steps import kind_of
from bench.steps import CASES, MODELS, Shape, Step, StepCase, StepModel
from cute_kernels.gemm.layer.config import LayerProductsConfig
from tests.launchers import recording

SMALL = StepModel("small", 3, 128, 128, 4, 2, head_dim=64)


pytestmark = pytest.mark.usefixtures("small_steps")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_runs_and_depends_on_weights_and_cache(case: StepCase):
    torch.manual_seed(0)
    step = Step(SMALL, case, Shape(2, 40), "cpu")
    out = step()
    assert out.shape == (2, 128) and bool(out.isfinite().all())
    for name in ("k_cache", "v_cache"):
        step.parts[1]["cache"][name].view(torch.uint8).zero_()
    assert not torch.equal(step(), out)


def test_a_quantised_cache_changes_a_step_a_little():
    found = []
    for kv in ("bf16", "int8_token_head"):
        torch.manual_seed(0)
        found.append(Step(SMALL, StepCase("bf16", kv), Shape(2, 40), "cpu")().double())
    assert 0 < (found[0] - found[1]).norm() < 0.05 * found[0].norm()


def test_a_routed_step_computes_the_same():
    found = []
    for routes in (False, True):
        torch.manual_seed(0)
        model = replace(SMALL, experts=8, topk=2)
        assert model.cases[-1].routes and not any(case.routes for case in SMALL.cases)
        found.append(Step(model, StepCase("w4", "bf16", routes=routes), Shape(2, 40), "cpu")().double())
    assert (found[0] - found[1]).norm() < 2e-2 * found[0].norm()


def test_torch_attention_computes_the_same():
    found = []
    for sdpa in (False, True):
        torch.manual_seed(0)
        step = Step(SMALL, StepCase("bf16", "bf16", sdpa), Shape(2, 64), "cpu", layers=1)  # drawn before the cache
        cache = step.parts[0]["cache"]
        for part in step.parts:  # the same numbers, whatever the order of tokens and heads
            for name in ("k_cache", "v_cache"):
                part["cache"][name].fill_(0.5)
        assert ("block_table" in cache) != sdpa
        found.append(step().double())
    assert (found[0] - found[1]).norm() < 2e-2 * found[0].norm()


@pytest.mark.parametrize(
    "model, case, batch, at_once",
    [
        ("llama3-8b", StepCase("w4", "int4_g4"), 1, True),
        ("llama2-70b-shard8", StepCase("w4", "bf16", sdpa=True), 1, True),
        ("llama3-8b", StepCase("w4", "int4_g4"), 2, False),
        ("llama3-8b", StepCase("w8", "int4_g4"), 1, False),
        ("llama3-8b", StepCase("bf16", "bf16"), 1, False),
        ("qwen3-30b-a3b", StepCase("w4", "int4_g4"), 1, False),
    ],
)
def test_products_are_one_launch_where_that_was_measured_to_be_faster(model, case, batch, at_once):
    config = steps.launch_of_a_layer(MODELS[model], case, batch)
    assert (config is not None) == at_once
    needed = steps.specs(MODELS[model], case, batch)
    assert [spec.config for spec in needed if isinstance(spec.config, LayerProductsConfig)] == (
        [config] if at_once else []
    )


def test_a_step_takes_the_launch_of_a_layer_by_itself_and_is_near_the_step_without():
    case, found = StepCase("w4", "int8_token_head"), []
    for one_launch in (None, False):
        torch.manual_seed(0)
        step = Step(SMALL, case, Shape(1, 40), "cpu", one_launch=one_launch)
        assert step.one_launch == (one_launch is None)
        found.append(step().double())
    assert 0 < found[1].norm() and (found[0] - found[1]).norm() < 2e-2 * found[1].norm()
    assert not Step(SMALL, case, Shape(2, 40), "cpu").one_launch


@pytest.mark.parametrize("experts", [0, 8])
def test_kernels_of_a_step_are_made_ready_by_two_layers_of_it(experts: int, monkeypatch):
    case = StepCase("w4", "int8_token_head", routes=bool(experts))
    model = replace(SMALL, experts=experts, topk=2 if experts else 0)
    monkeypatch.setitem(e2e_steps.MODELS, "small", model)
    point = e2e_steps.Point("small", case, Shape(1, 40))
    broken = e2e_steps.Point("nobody has it", case, Shape(1, 40))
    with recording() as cache:
        found = e2e_steps.kernels_of([broken, point], "cpu")
        step = model.step(case, point.shape, "cpu")
        cache.loaded.clear()  # of what quantised its cache
        step()
    assert set(found) == {spec for spec, _ in cache.loaded} and found
    assert any("moe_router" in spec.symbol for spec in found) == bool(experts)


def test_a_step_reads_weights_and_cache():
    step = Step(SMALL, StepCase("w4", "int4_g4"), Shape(2, 64), "cpu")
    weights = sum(
        product.keywords["weight"].nbytes for name, product in step.parts[0].items() if name in SMALL.products
    )
    cache = sum(step.parts[0]["cache"][name].nbytes for name in ("k_cache", "v_cache"))
    assert step.bytes == 3 * (weights + cache)


def test_experts_that_are_read_grow_with_the_batch_up_to_all():
    model = MODELS["qwen3-30b-a3b"]
    sizes = [model.weight_bytes("w4", batch) for batch in (1, 8, 4096)]
    assert sizes == sorted(sizes)
    an_expert = 3 * 2048 * 768 * (0.5 + 2 / 128)
    assert sizes[0] - replace(model, topk=0).weight_bytes("w4", 1) == pytest.approx(8 * an_expert)
    assert sizes[2] - replace(model, topk=0).weight_bytes("w4", 1) == pytest.approx(128 * an_expert)


def test_experts_have_4_bits_wherever_anything_is_quantised():
    model = MODELS["qwen3-30b-a3b"]
    of_experts = [model.weight_bytes(w, 8) - replace(model, topk=0).weight_bytes(w, 8) for w in ("w4", "w8")]
    assert of_experts[0] == pytest.approx(of_experts[1])


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("kernel_cutlass_kernel_cute_kernelsgemmwgmmakernelWgmmaKernel_object_at", "products"),
        ("kernel_cutlass_kernel_cute_kernelsgemmlayerkernelLayerProductsKernel_object_at_normInt64", "products"),
        ("kernel_cutlass_kernel_cute_kernelsgemmwgmmakernelWgmmaKernel_object_at__GroupedTileSize", "experts"),
        ("kernel_cutlass_kernel_cute_kernelsgemmexpertscombineCombineKernel_object_at", "experts"),
        ("kernel_cutlass_kernel_cute_kernelsgemmexpertsrouterkernelRouterKernel_object_at", "router"),
        ("kernel_cutlass_kernel_cute_kernelsmlacachekernelWriteKernel", "append"),
        ("kernel_cutlass_kernel_cute_kernelsattentionkernelDecode", "attention"),
        ("kernel_cutlass_kernel_cute_kernelsnormkernelNormKernel", "norm"),
        ("kernel_cutlass_kernel_cute_kernelskv_cachekernelAppend", "append"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_f16", "attention"),
        ("nvjet_hsh_64x8_64x16_1x1_h_bz_TNN", "products"),
        ("void at::native::vectorized_elementwise_kernel", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel, kind):
    assert kind_of(kernel) == kind


def test_kernels_that_overlap_count_once():
    """A norm that waits for a product from 5 on, and ends a microsecond behind it; a gap belongs to what follows."""
    kernels = [("WgmmaKernel linear", 1.0, 10.0), ("NormKernel norm", 5.0, 11.0), ("linear", 12.0, 15.5)]
    assert e2e_steps.shares(kernels) == {"products": 9.0 + 4.5, "norm": 1.0}
    assert e2e_steps.shares([]) == {}


def test_more_requests_fit_with_fewer_bytes_of_a_token():
    model, memory = MODELS["llama3-8b"], 74e9
    batches = [e2e_steps.largest_batch(model, case, 8192, memory) for case in (CASES[0], CASES[3])]
    assert 50 < batches[0] < 60 and 3.5 < batches[1] / batches[0] < 4
    assert e2e_steps.largest_batch(model, CASES[0], 8192, 1e9) == 0


def row_of(case, ms=10.0):
    return {
        "model": "llama2-70b-shard8", "case": case, "batch": 8, "context": 8192, "ms": ms, "tokens_per_s": 8e3 / ms,
        "floor_ms": 2.0, "floor_ratio": ms / 2.0, "account_us": {"norm": 2.5}, "largest_batch": 9,
    }  # fmt: skip


def rows():
    return [row_of("bf16, bf16 SDPA"), row_of("w4, int4_g4", 4.0)]


def test_the_report_says_how_much_faster_a_step_is(record):
    data = {**record, "rows": rows(), "failures": []}
    assert "2.50" in e2e_steps.text(data)
    table = e2e_steps.markdown(data)
    assert (
        "a scale per 32 columns (int4_g4 here)" in table and "w4,int4_g4" not in table and "not measured" not in table
    )
    assert "without all-reduce" in table and "| 2.50 |" in table and "| 2.00 |" in table


def test_what_is_recorded_is_not_measured_again():
    chosen = e2e_steps.points(["llama2-70b-shard8"], [8], [8192])
    left = e2e_steps.not_recorded(chosen, rows())
    assert [point.case.name for point in left] == [
        case.name for case in CASES if case.name not in ("bf16, bf16 SDPA", "w4, int4_g4")
    ]


def test_what_is_left_when_time_is_over_is_counted():
    chosen = e2e_steps.points(["llama2-70b-shard8"], [8], [8192])
    bench: Any = _Bench(rows())
    e2e_steps.measure_in_time(bench, chosen, 100, lambda point: row_of(point.case.name))
    assert bench.recorder.data["rows"][len(rows()) :] == [row_of(point.case.name) for point in chosen]
    assert len(bench.said) == len(chosen) and "10.000 ms, floor 2.000" in bench.said[0]
    assert "NOT FINITE" in e2e_steps.told({**row_of("w4, bf16"), "finite": False})
    assert "NOT FINITE" not in "".join(bench.said)
    bench = _Bench([])
    e2e_steps.measure_in_time(bench, chosen, -1, lambda point: row_of(point.case.name))
    assert not bench.recorder.data["rows"] and f"{len(chosen)} figures are left" in bench.said[0]


class _Bench:
    def __init__(self, done):
        self.recorder = self
        self.data, self.said = {"rows": list(done)}, []

    def seconds(self):
        return 0.0

    def attempt(self, what, work):
        work()

    def say(self, line):
        self.said.append(line)

    def add_row(self, row):
        self.data["rows"].append(row)


def test_cases_are_chosen_by_their_names():
    chosen = e2e_steps.points(["qwen3-30b-a3b"], [1], [8192], only="w4, int4_g4")
    assert [point.case.name for point in chosen] == ["w4, int4_g4", "w4, int4_g4, route"]


def test_models_of_the_command_are_those_of_the_loops():
    assert tuple(e2e_steps.MODELS) == command_line.STEP_MODELS


def test_both_figures_are_drawn(record, tmp_path):
    pytest.importorskip("matplotlib")
    from bench.plots import plot

    files = plot({**record, "rows": rows(), "engine": "steps"}, tmp_path)
    assert [file.name for file in files] == ["step_latency.svg", "step_throughput.svg"]
    for file in files:
        assert "w4, int4_g4" in file.read_text() and "llama2-70b-shard8" in file.read_text()
