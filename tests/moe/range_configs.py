"""Configurations of work ranges, with fields of their activations among their own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from cute_kernels.gemm.config import LinearConfig
from cute_kernels.gemm.experts.ranges.config import EntryLimbs, RangeConfig

OF_ACTIVATIONS = {field.name for field in fields(EntryLimbs)}


def range_config(*arguments: Any, **choices: Any) -> RangeConfig:
    return LinearConfig(*arguments, **choices, activations=EntryLimbs())


def changed(config: RangeConfig, **choices: Any) -> RangeConfig:
    """The same with other fields, its own or those of its activations."""
    of_activations = {name: value for name, value in choices.items() if name in OF_ACTIVATIONS}
    own = {name: value for name, value in choices.items() if name not in OF_ACTIVATIONS}
    return replace(config, **own).with_activations(**of_activations)
