"""What of a step in one launch stays the same from call to call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch

from cute_kernels.attention import plan as attention_plan
from cute_kernels.attention.call import AttentionCall
from cute_kernels.attention.problem import DecodeProblem
from cute_kernels.attention.schedule import DecodeSchedule, make_schedule
from cute_kernels.kv_cache import plan as append_plan
from cute_kernels.kv_cache.call import AppendCall
from cute_kernels.kv_cache.step_compile import StepSpec, step_arguments
from cute_kernels.kv_cache.step_config import StepConfig, step_config
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.plans import ALIGNMENT

if TYPE_CHECKING:
    from cute_kernels.kv_cache.step_ops import Step


@dataclass(frozen=True)
class OneLaunchPlan:
    """Everything about the launch that does not change between calls of the same shapes, dtypes and options.

    Attributes:
        attention: of the kernel, which appends as well.
        phase_steps: of the angles, kept alive for the address that the kernel is given.
    """

    attention: attention_plan.DecodePlan
    phase_steps: torch.Tensor | None

    def launch(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launches on the current stream: (out or a new one, lse if asked for)."""
        return self.attention.launch(
            step.q,
            step.k_cache,
            step.v_cache,
            step.seq_lens,
            None,
            step.softmax_scale,
            None,
            step.return_lse,
            step.out,
            step.options,
            new=(step.k[:, 0], step.v[:, 0]),
        )

    @property
    def device_index(self) -> int:
        return self.attention.device_index


def lie_well(q: torch.Tensor) -> bool:
    """Whether attention can read the rows of q of 16 bits where they are: an append takes others, too."""
    return not (q.data_ptr() | 2 * reduce(or_, q.stride()[:-1], 0)) % ALIGNMENT


@dataclass(frozen=True)
class _Chosen:
    """The kernel of a step, and what of it is attention's."""

    config: StepConfig
    problem: DecodeProblem
    schedule: DecodeSchedule


def _chosen(append: AppendCall, attention: AttentionCall) -> _Chosen | None:
    """What serves a step of one token a request in one launch; None where two launches do.

    One launch serves head-major caches: there it was measured (docs/design/decode_step.md).
    """
    more = (append.cu_seqlens, append.slot_mapping, append.position_ids, append.transform, append.q_shift)
    more += (append.q_bias, append.k_bias, append.v_bias, append.q_norm, append.k_norm)
    assert append.q is not None
    if not attention.head_major or any(given is not None for given in more) or not lie_well(append.q):
        return None
    problem = replace(attention_plan.problem_of(attention, after_append=True), appends=True)
    schedule = make_schedule(problem, attention.num_splits)
    config = step_config(schedule.config, append_plan.config_of(append, leads=True))
    return None if config is None else _Chosen(config, problem, schedule)


def config_of(append: AppendCall, attention: AttentionCall) -> StepConfig | None:
    """The kernel that serves a step of one token a request in one launch; None where two launches do."""
    chosen = _chosen(append, attention)
    return None if chosen is None else chosen.config


def make_plan(append: AppendCall, attention: AttentionCall) -> OneLaunchPlan | None:
    """The plan of a checked step that has tokens; None where two launches serve it."""
    chosen = _chosen(append, attention)
    if chosen is None:
        return None
    config, problem, schedule = chosen.config, chosen.problem, chosen.schedule
    fixed, options = attention_plan.known_arguments(attention, schedule)
    steps = None if append.rope is None else append.rope.phase_steps(attention.q.device)
    fixed |= {"phase_steps": 0 if steps is None else steps.data_ptr()}
    fixed |= {"rope_factor": 1.0 if append.rope is None else append.rope.attention_factor}
    function = load(StepSpec(config), arch_of(attention.q.device.index))
    send = step_arguments(config).bound(function, fixed, options, {"k": ("new", 0), "v": ("new", 1)})
    return OneLaunchPlan(attention_plan.plan_of(attention, problem, schedule, send), steps)
