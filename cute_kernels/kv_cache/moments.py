"""Transforms from samples, in closed form: the mean of every channel of K, and how large K, q and V are in it.

Let s_d be the variance of K's channel d, and t_d the mean square of q's. A quantiser's noise in a group grows with the
sum of the group's variances, and its weight in a score with the sum of q's. Multiplying K's channels by f and dividing
q's keeps scores, and

    f_d = (t_d / s_d) ** 1/4          makes sum(f^2 s) * sum(t / f^2) the least: (sum sqrt(s t)) ** 2.

A Hadamard rotation then spreads what is left evenly over its columns. It should not be wider than the columns that
share a scale: spread further, large columns of one group raise the noise of all.
"""

from __future__ import annotations

import torch

from cute_kernels.arguments import check_floating, shape_of
from cute_kernels.kv_cache.transforms import GREATEST_FACTOR, CacheTransform
from cute_kernels.kv_formats import ByteFormat, Int4Format, KvFormat

_LEAST_SHARE = 1e-6  # of a head's mean, that a channel's moments count for: a dead channel gets a finite factor
_CHUNK_TOKENS = 1 << 14  # of x that are widened to fp64 at a time


class _Sums:
    """Number, sum and sum of squares of samples [..., heads, columns], fp64, merged down to ``heads`` heads."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self.total = self.squares = torch.zeros(())

    def add(self, x: torch.Tensor, heads: int, columns: int) -> None:
        """Takes x [tokens, a multiple of heads, columns]."""
        for chunk in x.detach().split(_CHUNK_TOKENS):
            wide = chunk.double().reshape(len(chunk), heads, -1, columns)
            self.count += wide.shape[0] * wide.shape[2]
            self.total = self.total.to(wide.device) + wide.sum((0, 2))
            self.squares = self.squares.to(wide.device) + wide.square().sum((0, 2))
        if not bool(self.squares.isfinite().all()):
            raise ValueError(f"{self.name}: got NaN or infinity among the samples, want finite ones")

    @property
    def mean(self) -> torch.Tensor:
        return self.total / self.count

    @property
    def mean_square(self) -> torch.Tensor:
        return self.squares / self.count

    @property
    def variance(self) -> torch.Tensor:
        return (self.mean_square - self.mean.square()).clamp(min=0)


class Moments:
    """Accumulates samples of q, K and V of one layer, after RoPE, and gives the layer's transform.

    Examples:
        >>> moments = Moments()
        >>> _ = moments.update(torch.randn(100, 8, 64), torch.randn(100, 2, 64), torch.randn(100, 2, 64))
        >>> moments.transform(k_rotation=32, v_rotation=32).k_center.shape
        torch.Size([2, 64])
    """

    def __init__(self) -> None:
        self._sums = {name: _Sums(name) for name in "qkv"}
        self._sizes: tuple[int, int, int] | None = None  # num_kv_heads, head_dim, v_head_dim

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Moments:
        """Takes samples, floating, finite: q [tokens, num_q_heads, head_dim], k [tokens, num_kv_heads, head_dim], v
        [tokens, num_kv_heads, v_head_dim]; q may be of other tokens. Returns itself. Waits for the device.

        Raises:
            TypeError: a tensor is not floating.
            ValueError: shapes do not fit each other or those before, or samples are not finite.
        """
        check_floating(q=q, k=k, v=v)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 3 or 0 in x.shape[1:]:
                raise ValueError(f"{name}: got shape {shape_of(x)}, want [tokens, heads, head_dim]")
        sizes = (k.shape[1], k.shape[2], v.shape[2])
        heads, head_dim, v_head_dim = self._sizes or sizes
        if sizes != (heads, head_dim, v_head_dim) or v.shape[1] != heads:
            wanted = f"[tokens, {heads}, {head_dim}] and [tokens, {heads}, {v_head_dim}]"
            raise ValueError(f"k, v: got shapes {shape_of(k)} and {shape_of(v)}, want {wanted}")
        if q.shape[1] % heads or q.shape[2] != head_dim:
            raise ValueError(f"q: got shape {shape_of(q)}, want [tokens, a multiple of {heads}, {head_dim}]")
        self._sizes = sizes
        for name, x in (("q", q), ("k", k), ("v", v)):
            self._sums[name].add(x, heads, x.shape[2])
        return self

    @property
    def tokens(self) -> int:
        """Keys that there were, per head."""
        return self._sums["k"].count

    @property
    def deviation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The standard deviation of K's and of V's channels, fp32 [num_kv_heads, head_dim] each."""
        self._check_samples()
        return self._sums["k"].variance.sqrt().float(), self._sums["v"].variance.sqrt().float()

    def transform(
        self, *, k_rotation: int = 1, v_rotation: int = 1, center: bool = True, factors: bool = True, seed: int = 0
    ) -> CacheTransform:
        """The transform that the samples ask for.

        Args:
            k_rotation, v_rotation: see :class:`CacheTransform`; best as many columns as share a scale (`rotation_of`).
            center: whether K's mean is subtracted.
            factors: whether K's channels are multiplied by what the module's text says.
            seed: of the random signs that come before a rotation.

        Raises:
            ValueError: there were no samples, or a width does not fit.
        """
        self._check_samples()
        sums, generator = self._sums, torch.Generator().manual_seed(seed)
        k_noise = sums["k"].variance if center else sums["k"].mean_square
        factor = _balance(k_noise, sums["q"].mean_square) if factors else None
        signs = [_signs(width, sums[name].total, generator) for name, width in (("k", k_rotation), ("v", v_rotation))]
        if signs[0] is not None:
            factor = signs[0] if factor is None else factor * signs[0]
        return CacheTransform(
            k_center=sums["k"].mean.float() if center else None,
            k_factor=factor,
            k_rotation=k_rotation,
            v_factor=signs[1],
            v_rotation=v_rotation,
        )

    def _check_samples(self) -> None:
        if self._sizes is None or not all(sums.count for sums in self._sums.values()):
            raise ValueError("q, k, v: got no samples, want at least one update")


def rotation_of(form: KvFormat, head_dim: int) -> int:
    """How wide a rotation suits rows of a format: as many columns as share a scale.

    1, no rotation, for formats that gain nothing (codes with an exponent, a scale for each channel) and for head_dims
    that are no power of two, whose rows the kernels do not rotate.

    Examples:
        >>> from cute_kernels.kv_formats import format_of
        >>> rotation_of(format_of("int4_g4"), 128), rotation_of(format_of("bf16"), 128)
        (32, 1)
    """
    if head_dim & (head_dim - 1):
        return 1
    if isinstance(form, Int4Format):
        return head_dim // form.num_groups
    if isinstance(form, ByteFormat) and form.codes == "int8" and form.given_scale != "channel":
        return head_dim // form.num_groups
    return 1


def _balance(k_noise: torch.Tensor, q_square: torch.Tensor) -> torch.Tensor:
    """(q_square / k_noise) ** 1/4, fp32 [num_kv_heads, head_dim]; each head's geometric mean is 1."""
    k_noise, q_square = (
        x.clamp(min=torch.finfo(torch.float64).tiny).maximum(_LEAST_SHARE * x.mean(-1, keepdim=True))
        for x in (k_noise, q_square)
    )
    logs = 0.25 * (q_square.log() - k_noise.log())
    return torch.exp(logs - logs.mean(-1, keepdim=True)).clamp(1 / GREATEST_FACTOR, GREATEST_FACTOR).float()


def _signs(width: int, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """Random signs, fp32 [num_kv_heads, columns]; None where nothing is rotated."""
    if width == 1:
        return None
    return (torch.randint(0, 2, like.shape, generator=generator) * 2 - 1).float().to(like.device)
