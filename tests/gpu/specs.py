"""Which kernels the tests of this folder need, found without a GPU: each module that needs some has `specs()`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.linear import GPU as AHEAD_GPU
from cute_kernels.attention import ops as attention_ops
from cute_kernels.attention.call import AttentionCall, make_call
from cute_kernels.attention.compile import DecodeSpec
from cute_kernels.attention.plan import problem_of
from cute_kernels.attention.schedule import make_schedule
from cute_kernels.kv_cache import append_and_decode, step_ops
from cute_kernels.kv_cache import ops as append_ops
from cute_kernels.kv_cache import plan as append_plan
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.linear import ops as linear_ops
from cute_kernels.linear import plan as linear_plan
from cute_kernels.linear.wgmma import limb_launch
from cute_kernels.moe import launch as moe_launch
from cute_kernels.moe import layer as moe_layer
from cute_kernels.moe import ops as moe_ops
from cute_kernels.moe import plan as moe_plan
from cute_kernels.runtime import KernelSpec
from cute_kernels.weight_formats import weight_format
from tests.attention.cases import Call
from tests.kv_cache.cases import Shape
from tests.kv_cache.cases import make_call as make_append

ARCH, NUM_SMS = "sm_90a", 132
# Whose kernels the tests need: a table of measured times holds for one kind of GPU.
GPU = torch.cuda.get_device_name() if torch.cuda.is_available() else AHEAD_GPU
PLANS = (
    linear_plan.plan_of,
    moe_plan.layout_of,
    moe_plan.plan_of,
    moe_plan.routing_function,
    moe_plan.gather_function,
    moe_plan.combine_function,
    moe_launch.grouped_launch_of,
    moe_layer.moe_plan_of,
)  # which keep what they have loaded


def by_module() -> dict[str, Callable[[], list[Any]]]:
    """The `specs` functions of the test modules of this folder, by module name; of those whose packages are here."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        try:
            module = importlib.import_module(f"{__package__}.{path.stem}")
        except pytest.skip.Exception:  # an engine's tests, where the engine is not installed
            continue
        if hasattr(module, "specs"):
            found[path.stem] = module.specs
    return found


def decode_spec(call: Call) -> DecodeSpec:
    """The kernel that a call is served by."""
    options: Any = call.options
    checked = make_call(*call.tensors, kv_format=call.kv_format, **options)
    return DecodeSpec(make_schedule(problem_of(checked)).config)


def append_specs(shapes: Iterable[Shape]) -> list[AppendSpec]:
    """The kernels that appends of these shapes are served by: of their tokens it matters whether each has a request."""
    few = (shape.with_(new=(1,) if set(shape.new) == {1} else (2,), lengths=None) for shape in shapes)
    calls = (make_append(shape) for shape in dict.fromkeys(few))
    return list(dict.fromkeys(AppendSpec(append_ops.config_of(call)) for call in calls))


def _specs_of(append: AppendCall, attention: AttentionCall, *, fused: bool) -> list[KernelSpec]:
    """The two kernels of a step, in one call or in two."""
    schedule = make_schedule(problem_of(attention, after_append=fused), attention.num_splits)
    return [AppendSpec(append_plan.config_of(append, leads=fused)), DecodeSpec(schedule.config)]


def step_specs(given: dict[str, Any], fused: bool) -> list[KernelSpec]:
    """The kernels of `append_and_decode` with these arguments, or of the two calls that it stands for."""
    found: list[KernelSpec] = []

    def collect(step: step_ops.Step):
        found.extend(_specs_of(*step_ops.make_calls(step), fused=fused))
        return None, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_ops, "reference", collect)
        append_and_decode(**given)
    return found


def needed_by(work: Callable[[], object]) -> list[KernelSpec]:
    """The attention and append kernels that ``work``, which runs on the CPU here, would need on a GPU.

    Of steps that append and attend in one call also those of the two calls, which they are compared with.
    """
    found: dict[KernelSpec, None] = {}
    attend, append, take_step = attention_ops.reference, append_ops.reference, step_ops.reference

    def attend_here(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, return_lse, out, options=None):
        call = make_call(q, k_cache, v_cache, seq_lens, kv_format=kv_format, num_splits=num_splits, **(options or {}))
        found[DecodeSpec(make_schedule(problem_of(call), num_splits).config)] = None
        return attend(q, k_cache, v_cache, seq_lens, kv_format, softmax_scale, num_splits, return_lse, out, options)

    def append_here(call: AppendCall):
        found[AppendSpec(append_ops.config_of(call))] = None
        return append(call)

    def step_here(step: step_ops.Step):
        calls = step_ops.make_calls(step)
        found.update(dict.fromkeys(_specs_of(*calls, fused=True)))
        found.update(dict.fromkeys(_specs_of(*calls, fused=False)))
        return take_step(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_ops, "reference", attend_here)
        patch.setattr(append_ops, "reference", append_here)
        patch.setattr(step_ops, "reference", step_here)
        work()
    return list(found)


def products_needed_by(work: Callable[[], object]) -> list[KernelSpec]:
    """The kernels that linear layers and layers of experts of ``work``, which runs on the CPU here, need on `GPU`.

    Plans are made as for it; what they would load is noted and not loaded.
    """
    found: dict[KernelSpec, None] = {}
    multiply, multiply_grouped, mix = linear_ops._on_cpu, moe_ops._grouped_on_cpu, moe_ops._moe_on_cpu

    def linear_here(x, codes, scales, zeros, bias, residual, format, n, k, activation, out_dtype, *others):
        if x.shape[0]:
            linear_plan.plan_of(x.shape[0], n, k, weight_format(format), x.dtype, x.get_device(), *others[:1])
        options = format, n, k, activation, out_dtype, *others
        return multiply(x, codes, scales, zeros, bias, residual, *options)

    def grouped_here(*given):
        x, codes, scales, zeros, _, rows, _, format, n, k, activation, out_dtype, invariant, _ = given
        places = x.shape[0] if rows is None else rows.shape[0]
        if places:
            form = moe_launch.Weights(codes, scales, zeros, weight_format(format), n, k).form
            moe_launch.grouped_launch_of(places, rows is not None, form, activation, out_dtype, invariant)
        return multiply_grouped(*given)

    def mix_here(*given):
        ids, _weights, *sizes, out_dtype, invariant, _out = given[7:]
        if ids.numel():
            products = zip((given[1:4], given[4:7]), (sizes[:3], sizes[3:]), strict=True)
            forms = [moe_launch.Weights(*tensors, weight_format(size[0]), *size[1:]).form for tensors, size in products]
            moe_layer.moe_plan_of(*ids.shape, 8 * ids.element_size(), *forms, out_dtype, invariant)
        return mix(*given)

    def note(spec: KernelSpec, arch: str) -> None:
        found[spec] = None

    with pytest.MonkeyPatch.context() as patch:
        for module in (linear_plan, moe_plan, limb_launch):
            patch.setattr(module, "load", note)
        for module in (linear_plan, moe_plan):
            patch.setattr(module, "arch_of", lambda index: ARCH)
        patch.setattr(linear_plan, "is_supported", lambda index: True)
        patch.setattr(torch.cuda, "get_device_name", lambda index: GPU)
        properties = SimpleNamespace(multi_processor_count=NUM_SMS)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        patch.setattr(linear_ops, "_on_cpu", linear_here)
        patch.setattr(moe_ops, "_grouped_on_cpu", grouped_here)
        patch.setattr(moe_ops, "_moe_on_cpu", mix_here)
        forget_plans()
        try:
            work()
        finally:
            forget_plans()
    return list(found)


def forget_plans() -> None:
    for plan_of in PLANS:
        plan_of.cache_clear()
