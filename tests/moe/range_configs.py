"""Configurations of work ranges, with fields of their policies among their own."""

from __future__ import annotations

from typing import Any

from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm.experts.ranges.config import EntryLimbs, RangeConfig
from cute_kernels.gemm.stream.config import StreamConfig
from cute_kernels.runtime.composed import changed


def range_config(form: WeightFormat, dtype: str, **choices: Any) -> RangeConfig:
    return changed(StreamConfig(form, dtype, activations=EntryLimbs()), **choices)
