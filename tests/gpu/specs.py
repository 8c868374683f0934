"""Which kernels the tests of this folder need, found without a GPU: each module that needs some has `specs()`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.attention import ops as attention_ops
from cute_kernels.attention.call import AttentionCall, make_call
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_schedule import make_schedule
from cute_kernels.attention.plan import problem_of
from cute_kernels.kv_cache import append_and_decode, step_ops, step_plan
from cute_kernels.kv_cache import ops as append_ops
from cute_kernels.kv_cache import plan as append_plan
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.compile import AppendSpec
from cute_kernels.kv_cache.step_compile import StepSpec
from cute_kernels.runtime import KernelSpec
from tests.attention.cases import Call
from tests.kv_cache.cases import Shape
from tests.kv_cache.cases import make_call as make_append
from tests.launchers import recording
from tests.observed import calls_of

ARCH, NUM_SMS = "sm_90a", 132


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


def decode_spec(call: Call) -> AttentionSpec:
    """The kernel that a call is served by."""
    options: Any = call.options
    checked = make_call(*call.tensors, kv_format=call.kv_format, **options)
    return AttentionSpec(make_schedule(problem_of(checked)).config)


def append_specs(shapes: Iterable[Shape]) -> list[AppendSpec]:
    """The kernels that appends of these shapes are served by: of their tokens it matters whether each has a request."""
    few = (shape.with_(new=(1,) if set(shape.new) == {1} else (2,), lengths=None) for shape in shapes)
    calls = (make_append(shape) for shape in dict.fromkeys(few))
    return list(dict.fromkeys(AppendSpec(append_ops.config_of(call)) for call in calls))


def _specs_of(append: AppendCall, attention: AttentionCall, *, fused: bool) -> list[KernelSpec]:
    """The kernels of a step, in one call or in two."""
    alone = step_plan.chosen(append, attention) if fused else None
    if alone is not None:
        return [StepSpec(alone[0])]
    schedule = make_schedule(problem_of(attention, after_append=fused), attention.num_splits)
    return [AppendSpec(append_plan.config_of(append, leads=fused)), AttentionSpec(schedule.config)]


def step_specs(given: dict[str, Any], fused: bool) -> list[KernelSpec]:
    """The kernels of `append_and_decode` with these arguments, or of the two calls that it stands for."""
    with recording(), calls_of(step_ops.make_calls) as calls:
        append_and_decode(**given)
    call, *_ = calls
    return _specs_of(*step_ops.make_calls(call.arguments["step"]), fused=fused)


def needed_by(work: Callable[[], object]) -> list[KernelSpec]:
    """The attention and append kernels that ``work``, which runs on the CPU here, would need on a GPU.

    Of steps that append and attend in one call also those of the two calls, which they are compared with.
    """
    found: dict[KernelSpec, None] = {}
    with calls_of(attention_ops.reference, append_ops.reference, step_ops.reference) as calls:
        work()
    for function, given in calls:
        if function is attention_ops.reference:
            asked, num_splits = given["given"], given["given"].num_splits
            if asked.cu_seqlens_q is not None:
                continue
            options = asked.options or {}
            call = make_call(*asked[:4], kv_format=asked.kv_format, num_splits=num_splits, **options)
            found[AttentionSpec(make_schedule(problem_of(call), num_splits).config)] = None
        elif function is append_ops.reference:
            found[AppendSpec(append_ops.config_of(given["call"]))] = None
        else:
            step = step_ops.make_calls(given["step"])
            found.update(dict.fromkeys(_specs_of(*step, fused=True)))
            found.update(dict.fromkeys(_specs_of(*step, fused=False)))
    return list(found)


def products_needed_by(work: Callable[[], object]) -> list[KernelSpec]:
    """The kernels that linear layers and layers of experts of ``work`` need on `GPU`, of tensors on the CPU here.

    Plans are made as for it; what they would load is noted, and what they launch computes nothing.
    """
    with recording(num_sms=lambda device: NUM_SMS) as recorded:
        work()
    return list(dict.fromkeys(spec for spec, _ in recorded.loaded))
