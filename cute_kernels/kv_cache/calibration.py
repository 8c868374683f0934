"""Finds scales of K or V from samples, ahead of time, for formats with a scale that is not stored in the rows.

The smallest scale without saturation maps the largest magnitude to the largest code (absmax). A few outliers can make
that scale too coarse for all other numbers. Then a scale from a percentile of the magnitudes is better, although
outliers saturate. TensorRT's and vLLM's calibrators use percentiles, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch

from cute_kernels import blocks
from cute_kernels.arguments import check_numbers, check_positive, check_shape
from cute_kernels.formats.kv import format_of
from layouts.numbers import quotient

Method = Literal["absmax", "percentile"]

# The histogram's bins are as wide as a float's steps with 6 explicit bits of mantissa: 64 to an octave.
_MANTISSA_BITS = 6
_SHIFT = 23 - _MANTISSA_BITS
_LEAST_EXPONENT, _GREATEST_EXPONENT = -24, 24
_FIRST_KEY = (127 + _LEAST_EXPONENT) << _MANTISSA_BITS
_NUM_BINS = 2 + ((_GREATEST_EXPONENT - _LEAST_EXPONENT) << _MANTISSA_BITS)  # first and last: what lies outside
_CHUNK_ELEMENTS = 1 << 24  # of x looked at at a time


class Calibrator:
    """Accumulates samples of K (or of V) of one layer and computes the scale for a format.

    Args:
        kv_format: a format with a scale beside the cache: "int8_tensor", "int8_head", "int8_channel", "e4m3_tensor" or
            "e4m3_head".
        method: how the magnitude that maps to the largest code is found. "absmax": it is the largest magnitude of all
            samples. "percentile": it is the smallest magnitude that ``percentile`` % of the elements do not exceed,
            found with a histogram of 3074 logarithmic bins per scale, for any number of samples. The histogram errs
            upwards only: for magnitudes from 2**-24 to 2**24 the result is at least the percentile, less than 1 + 2**-6
            times the percentile, and never above the largest magnitude.
        percentile: above 0, at most 100.

    The result is one scale for all elements ("tensor"), one for each head, or one for each column of each head
    ("channel").
    """

    def __init__(self, kv_format: str, method: Method = "absmax", percentile: float = 99.9) -> None:
        form = format_of(kv_format)
        if form.given_scale is None or form.code_max is None:
            raise ValueError(f"kv_format: got {kv_format!r}, want a format whose scale lies beside the cache")
        if method not in ("absmax", "percentile"):
            raise ValueError(f"method: got {method!r}, want 'absmax' or 'percentile'")
        check_positive("percentile", percentile)
        if percentile > 100:
            raise ValueError(f"percentile: got {percentile}, want above 0 and at most 100")
        self.granularity, self.code_max = form.given_scale, form.code_max
        self.method, self.percentile = method, percentile
        self._top: torch.Tensor | None = None  # [num_kv_heads, head_dim]: greatest magnitudes
        self._counts: torch.Tensor | None = None  # int64 [scales, bins]

    def update(self, x: torch.Tensor) -> Calibrator:
        """Adds samples: floating [..., num_kv_heads, head_dim], finite. Returns itself. Waits for the device.

        Raises:
            TypeError: x is no tensor, or not floating.
            ValueError: x has another shape than before or fewer than 2 dimensions, or holds NaN or infinity.
        """
        check_numbers(x=x)
        if not x.is_floating_point():
            raise TypeError(f"x: got dtype {x.dtype}, want a floating one")
        if x.dim() < 2 or 0 in x.shape[-2:]:
            raise ValueError(f"x: got shape {list(x.shape)}, want [..., num_kv_heads, head_dim]")
        top, counts = self._top, self._counts
        if top is None:
            top = torch.zeros(x.shape[-2:], dtype=torch.float32, device=x.device)
        check_shape("x", x, "...", *top.shape)
        if not x.numel():
            return self
        samples = x.reshape(-1, *x.shape[-2:])
        for chunk in samples.split(max(1, blocks.elements(_CHUNK_ELEMENTS) // top.numel())):
            top, counts = self._with(chunk.detach().float().abs(), top, counts)
        self._top, self._counts = top, counts
        return self

    def scale(self) -> torch.Tensor:
        """Returns the scale, fp32, in a shape that operators and formats take: [], [num_kv_heads, 1] or [num_kv_heads,
        head_dim]. A scale is 1 if all elements that share it were 0 in all samples. Raises ValueError if there were no
        samples."""
        if self._top is None:
            raise ValueError("x: got no samples, want at least one update")
        top = _grouped(self._top, self.granularity).amax(1)
        if self.method == "percentile" and self._counts is not None:
            top = torch.minimum(top, self._percentile(self._counts))
        scale = quotient(top, self.code_max)
        return scale.masked_fill(scale == 0, 1).reshape(scale_shape(self.granularity, *self._top.shape))

    def _with(
        self, size: torch.Tensor, top: torch.Tensor, counts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the maxima ``top`` and the histogram ``counts`` with further samples. size: magnitudes of samples,
        fp32 [samples, num_kv_heads, head_dim]."""
        top = torch.maximum(top, size.amax(0))
        if not bool(top.isfinite().all()):
            raise ValueError("x: got NaN or infinity among the samples, want finite ones")
        if self.method == "absmax":
            return top, None
        keys = size.view(torch.int32) >> _SHIFT  # of a float that is not negative: monotonic in its value
        bins = (keys - (_FIRST_KEY - 1)).clamp_(0, _NUM_BINS - 1)
        num_scales = len(_grouped(top, self.granularity))
        number = torch.arange(num_scales, device=size.device)
        number = number.repeat_interleave(top.numel() // num_scales).reshape(top.shape)
        found = torch.bincount((number * _NUM_BINS + bins).flatten(), minlength=num_scales * _NUM_BINS)
        found = found.reshape(num_scales, _NUM_BINS)
        return top, found if counts is None else counts + found

    def _percentile(self, counts: torch.Tensor) -> torch.Tensor:
        """Returns, for each scale, the upper end of the bin in which the percentile lies, fp32 [scales]; infinity for
        the last bin."""
        rank = torch.ceil(counts.sum(1, keepdim=True).double() * self.percentile / 100)
        found = (counts.cumsum(1) < rank).sum(1)
        upper = ((found + _FIRST_KEY) << _SHIFT).to(torch.int32).view(torch.float32)
        return torch.where(found == _NUM_BINS - 1, torch.inf, upper)


def compute_kv_scale(
    x: torch.Tensor | Iterable[torch.Tensor],
    *,
    kv_format: str,
    method: Method = "absmax",
    percentile: float = 99.9,
) -> torch.Tensor:
    """Computes a format's scale from samples x of one layer's K or V, for formats with a scale that is not stored in
    the rows.

    Args:
        x: floating [..., num_kv_heads, head_dim] as it goes into the cache (K after RoPE), or several such tensors.
        kv_format, method, percentile: as in `Calibrator`, which also says how exact the percentile is.

    Returns:
        fp32 [] ("tensor"), [num_kv_heads, 1] ("head") or [num_kv_heads, head_dim] ("channel"), for ``k_scale`` or
        ``v_scale``. With "absmax" the result equals that of `layouts.kv.ScaledRow.compute_scale`.

    Raises:
        TypeError, ValueError: as `Calibrator`.
    """
    calibrator = Calibrator(kv_format, method, percentile)
    if not isinstance(x, (torch.Tensor, Iterable)) or isinstance(x, str):
        raise TypeError(f"x: got {type(x).__name__}, want a torch.Tensor or several")
    for samples in (x,) if isinstance(x, torch.Tensor) else x:
        calibrator.update(samples)
    return calibrator.scale()


def scale_shape(granularity: str, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Returns the shape in which a scale beside the cache broadcasts over [..., num_kv_heads, head_dim]."""
    return {"tensor": (), "head": (num_kv_heads, 1), "channel": (num_kv_heads, head_dim)}[granularity]


def _grouped(columns: torch.Tensor, granularity: str) -> torch.Tensor:
    """Reshapes [num_kv_heads, head_dim] to [scales, columns that share a scale]."""
    if granularity == "tensor":
        return columns.reshape(1, -1)
    return columns if granularity == "head" else columns.reshape(-1, 1)
