"""The arguments of a step, and the plan of a step in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch

from cute_kernels.attention import plan as attention_plan
from cute_kernels.attention.call import AttentionCall, Given
from cute_kernels.attention.decode_schedule import DecodeSchedule, make_schedule
from cute_kernels.attention.options import NO_OPTIONS
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.attention.transformed import restore
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.kv_cache import plan as append_plan
from cute_kernels.kv_cache.arguments import CONSTANTS, TERMS
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.kv_cache.step_compile import StepSpec, step_arguments
from cute_kernels.kv_cache.step_config import StepConfig, serving_config
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.launch_arguments import Place
from cute_kernels.runtime.operator import Plan, new_call
from cute_kernels.runtime.plans import ALIGNMENT

Extras = tuple[torch.Tensor | None, ...]
"""The arguments of an append that most steps lack, in the order of `.step_ops.EXTRA_NAMES`."""

Results = tuple[torch.Tensor, "torch.Tensor | None"]
"""(out or a new tensor, lse or None)."""


class Step(NamedTuple):
    """The arguments of a step, as :func:`cute_kernels.kv_cache.step.append_and_decode` has them.

    Attributes:
        extras: all fields of `Extras`, or None if the step uses none of them.
        options: all options of `NO_OPTIONS`, or None if the step uses none of them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor
    kv_format: str | tuple[str, str]
    rope: Rope | None
    norm_eps: float
    extras: Extras | None
    softmax_scale: float | None
    num_splits: int | None
    return_lse: bool
    out: torch.Tensor | None
    options: Any
    transform: CacheTransform | None = None

    @property
    def sees_shift(self) -> bool:
        """Whether the result depends on the constant that the transform's center adds to all scores of a query."""
        options = self.options
        seen = self.return_lse or (options is not None and not (options["softcap"] is options["sinks"] is None))
        return seen and self.transform is not None and self.transform.k_center is not None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that every step has, by name."""
        return dict(zip(self._fields[:6], self[:6], strict=True))


def restoring(options: Mapping[str, Any] | None, transform: CacheTransform | None) -> dict[str, Any]:
    """Returns attention's options together with the factors that attention needs to undo V's transform in its
    output.
    """
    assert transform is not None
    return {**(options or NO_OPTIONS), "out_factor": transform.out_factor}


def lie_well(q: torch.Tensor) -> bool:
    """Returns whether q's address and strides are aligned as attention requires. An append requires less alignment."""
    return not (q.data_ptr() | 2 * reduce(or_, q.stride()[:-1], 0)) % ALIGNMENT


def chosen(append: AppendCall, attention: AttentionCall) -> tuple[StepConfig, AttentionProblem, DecodeSchedule] | None:
    """Returns (configuration of the kernel, attention's problem, its schedule) for a step with one token a request;
    None if the step needs two launches."""
    assert append.q is not None
    more = (append.cu_seqlens, append.slot_mapping, append.q_shift)
    if any(given is not None for given in more) or not lie_well(append.q):
        return None
    problem = replace(attention_plan.problem_of(attention, after_append=True), appends=True)
    schedule = make_schedule(problem, attention.num_splits)
    rows = append_plan.config_of(append, leads=True)
    config = serving_config(problem, schedule, rows, append.position_ids is not None)
    return None if config is None else (config, problem, schedule)


def make_plan(append: AppendCall, attention: AttentionCall) -> Plan[[Step], Results] | None:
    """Makes the plan of a checked step that has tokens; returns None if the step needs two launches."""
    found = chosen(append, attention)
    if found is None:
        return None
    config, problem, schedule = found
    fixed, options = attention_plan.known_arguments(attention, schedule)
    steps = None if append.rope is None else append.rope.phase_steps(attention.q.device)
    fixed |= {"phase_steps": 0 if steps is None else steps.data_ptr()}
    fixed |= {"rope_factor": 1.0 if append.rope is None else append.rope.attention_factor}
    function = load(StepSpec(config), arch_of(attention.q.device.index))
    new: dict[str, Place] = {"k": ("new", 0), "v": ("new", 1)}
    if config.append.transform is not None:
        new |= {name: ("new", 2, i) for i, name in enumerate(CONSTANTS)}
    if config.has_terms:
        options |= {name: ("new", 3, 1 + i) for i, name in enumerate(TERMS)}
        fixed |= {"norm_eps": append.norm_eps}
    if append.position_ids is not None:
        options |= {"position_ids": ("new", 3, 0)}
        fixed |= {"position_bytes": append.position_ids.element_size()}
    send = step_arguments(config).bound(function, fixed, options, new, ignored=("options",))
    plan, restores = attention_plan.decode_plan_of(attention, problem, schedule, send), attention.features.restores
    launch_attention = plan.launch

    def launch(step: Step) -> Results:
        transform, options = step.transform, step.options
        constants = () if transform is None else transform.addresses
        if restores:
            options = restoring(options, transform)
        (q, k, v, k_cache, v_cache, seq_lens, _, _, _, extras, softmax_scale, _, return_lse, out, _, _) = step
        values = q, k_cache, v_cache, seq_lens, "", softmax_scale, None, return_lse, out, options, None
        result, lse = launch_attention(new_call(Given, values), new=(k[:, 0], v[:, 0], constants, extras))
        if transform is not None and transform.changes_values and not restores:
            result = restore(transform, result, out)
        return result, lse

    return Plan(plan.device_index, launch, (config,), (steps,))
