"""Quotients and powers of two that are the same on every device."""

from __future__ import annotations

import torch


def quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Returns values / divisor, rounded once. The divisor becomes a tensor first: instead of dividing by a plain
    number, CUDA multiplies by its rounded reciprocal.
    """
    return values / values.new_full((), divisor)


def ceil_log2(values: torch.Tensor) -> torch.Tensor:
    """Returns ceil(log2(values)), int32, of positive, finite values."""
    mantissa, exponent = torch.frexp(values)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)
