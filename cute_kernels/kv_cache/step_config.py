"""`StepConfig`, the configuration of a step in one launch, and the choice between one launch and two. There are no GPU
types here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.decode_schedule import DecodeSchedule
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.kv_cache.config import AppendConfig

MOST_STEP_COLUMNS = 256  # of rows, beside which a warp of attention has registers for what makes them
MOST_WAVES = 6  # of CTAs, whose queries meet more than RoPE


@dataclass(frozen=True)
class StepConfig:
    """One compiled variant: attention that rotates its queries and writes each request's newest token itself.

    Attributes:
        attention: the configuration of attention. Its ``after_append`` is set, although there is no separate launch of
            an append.
        append: the configuration of the steps that make rows of q, k and v.
        positions: whether the positions for RoPE are given.
    """

    attention: DecodeConfig
    append: AppendConfig
    positions: bool = False

    @property
    def smem_bytes(self) -> int:
        return self.attention.smem_bytes + self.attention.rotated_bytes

    @property
    def name(self) -> str:
        """A C identifier that tells configurations apart."""
        return f"step_{self.attention.name}_{self.append.name}" + "_positions" * self.positions

    @property
    def has_terms(self) -> bool:
        """Whether biases or norms may be applied to rows."""
        return self.append.prologue.has_bias or self.append.prologue.has_norm

    @property
    def queries_meet_more(self) -> bool:
        """Whether queries have steps in addition to RoPE: biases, norms, factors or a rotation."""
        transform = self.append.transform
        return self.has_terms or (transform is not None and (transform.k_rotation > 1 or transform.factor))

    def can_implement(self) -> str | None:
        """Returns why this configuration cannot be compiled, or None."""
        return self.attention.can_implement() or self.append.can_implement() or self._problem()

    def _problem(self) -> str | None:
        attention, append = self.attention, self.append
        if max(attention.head_dims) > MOST_STEP_COLUMNS:
            return (
                f"a step in one launch of head_dim {max(attention.head_dims)}: a warp's registers are full of attention"
            )
        if attention.features.queries or attention.features.tail:
            return "a step in one launch of several queries or of keys in blocks"
        if not attention.after_append or not attention.has_features:
            return "a step in one launch whose attention is not after an append, or without its features' arguments"
        if "word" in attention.copies:
            return "a step in one launch that copies words, which may be older in L1 than what it has written"
        if not append.decode or append.leads:
            return "a step in one launch of another append than that of one token a request"
        if append.transform is not None and append.transform.shift:
            return "a step in one launch that hands on what a center takes off its scores"
        if (append.dtype, append.k.head_dim, append.v.head_dim) != (attention.q_dtype, *attention.head_dims):
            return "attention and append of different rows"
        taken = (self.smem_bytes + attention.limits.reserved_shared_bytes) * attention.pipeline.ctas_per_sm
        if taken > attention.limits.sm_shared_bytes:
            return f"{attention.pipeline.ctas_per_sm} CTAs of {self.smem_bytes} bytes exceed the shared memory of an SM"
        return None


def serving_config(
    problem: AttentionProblem, schedule: DecodeSchedule, append: AppendConfig, positions: bool = False
) -> StepConfig | None:
    """Returns the result of `step_config`, or None if two launches are faster than one.

    Steps on queries in addition to RoPE delay the beginning of each CTA. With such steps and more than `MOST_WAVES`
    waves of CTAs, a separate append is faster; measurements at 15 and at 4 waves are in docs/design/kv_append.md.
    """
    config = step_config(schedule.config, append, positions)
    if config is None or not config.queries_meet_more:
        return config
    ctas = problem.batch * schedule.head_blocks * schedule.num_splits
    places = problem.num_sms * schedule.config.pipeline.ctas_per_sm
    return config if ctas <= MOST_WAVES * places else None


def step_config(attention: DecodeConfig, append: AppendConfig, positions: bool = False) -> StepConfig | None:
    """Returns the configuration of one launch that appends and attends, or None if it cannot be compiled.

    The launch writes the same rows as `append_kv`, bit for bit. For that, the sum of squares in a row's norm is
    computed by as many lanes as in `append_kv`.
    """
    rows = replace(append.for_decode(), leads=False)
    if positions and rows.prologue.has_norm:
        rows = replace(rows, lane_columns=append.lane_columns)
    config = StepConfig(attention, rows, positions)
    return config if config.can_implement() is None else None
