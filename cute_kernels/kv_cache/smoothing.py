"""Smoothing of K. Outlier channels of K are divided by factors, and q is multiplied by the same factors, so that scores
stay the same.

The keys of trained models have a few channels much larger than the rest (KIVI, Liu et al., 2024; KVQuant, Hooper et
al., 2024). In a format whose scale covers a whole row or group, these channels cost all other channels their
resolution. SmoothQuant (Xiao et al., 2023) moves factors from one operand of a product to the other. Here each channel
of K is divided by a factor before the cache, and q is multiplied by it. Scores do not change, and no kernel is needed:
the factors are folded into the projections' weights.

**The pairing rule.** RoPE rotates columns in pairs, (i, i + rotary_dim / 2) in the half-split form and (2i, 2i + 1) in
the interleaved one. Scaling commutes with a rotation only if both columns of a pair have the same factor. Factors that
are folded into weights act before RoPE, so they must be equal within each pair. `smooth_keys(rope=...)` makes such
factors, and `fold` refuses others. Columns from rotary_dim on may have any factors.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from cute_kernels.arguments import check_all_positive, check_floating, check_kind, check_shape

_LEAST_MAGNITUDE = 1e-5  # of a channel against its head's greatest, so that a dead channel gets a finite factor


@runtime_checkable
class RotaryPairs(Protocol):
    """The part of a `Rope` that smoothing needs: which pairs of columns are rotated together."""

    @property
    def rotary_dim(self) -> int: ...

    @property
    def interleaved(self) -> bool: ...


class Folded(NamedTuple):
    """The projections of q and k after smoothing was folded in: their weights, and their biases (None if not given)."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None


def smooth_keys(
    k_samples: torch.Tensor,
    q_samples: torch.Tensor | None = None,
    *,
    alpha: float = 0.5,
    rope: RotaryPairs | None = None,
) -> torch.Tensor:
    """Returns factors f for which k / f is easier to quantise than k. q has to be multiplied by f.

    f = max|k| ** alpha / max|q| ** (1 - alpha) per channel; without q_samples f = max|k| ** alpha. Each head's factors
    are scaled to geometric mean 1, since a common factor of a head would only change the range of q.

    Args:
        k_samples: floating [..., num_kv_heads, head_dim], finite.
        q_samples: floating [..., num_q_heads, head_dim]; num_q_heads a multiple of num_kv_heads.
        alpha: 0 to 1; the part of the outliers that moves to q. With 1, all of K's channels become equally large.
        rope: the rotation, if the factors will be folded into weights before it. Both columns of a pair then have the
            larger of their two magnitudes. None if the factors are applied after the rotation, or there is no rotation.

    Returns:
        fp32 [num_kv_heads, head_dim], positive.

    Raises:
        TypeError: samples are not floating, or alpha is no number.
        ValueError: shapes do not fit, alpha is out of range, or samples are empty or not finite.
    """
    if not isinstance(alpha, (int, float)):
        raise TypeError(f"alpha: got {alpha!r}, want a number from 0 to 1")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: got {alpha}, want 0 to 1")
    k_top = _channel_maxima("k_samples", k_samples)
    num_kv_heads, head_dim = k_top.shape
    if rope is not None:
        _check_rotary_dim(rope, head_dim)
    logs = alpha * _log(_pairwise_max(k_top, rope))
    if q_samples is not None:
        q_top = _channel_maxima("q_samples", q_samples)
        if q_top.shape[1] != head_dim or q_top.shape[0] % num_kv_heads:
            raise ValueError(
                f"q_samples: got shape {list(q_samples.shape)}, want [..., a multiple of {num_kv_heads}, {head_dim}]"
            )
        q_top = q_top.reshape(num_kv_heads, -1, head_dim).amax(1)
        logs = logs - (1 - alpha) * _log(_pairwise_max(q_top, rope))
    return torch.exp(logs - logs.mean(-1, keepdim=True))


def fold(
    factors: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    *,
    rope: RotaryPairs | None,
) -> Folded:
    """Multiplies the weights and biases of q's projection by factors, and divides those of k's projection by the
    factors. Scores stay the same up to rounding.

    Models that normalise q and k after the projection (QK-norm) cannot use this: the norm would undo the factors.

    Args:
        factors: [num_kv_heads, head_dim] from `smooth_keys`.
        q_weight: [num_q_heads * head_dim, hidden_size], as in `torch.nn.Linear`; any floating dtype.
        k_weight: [num_kv_heads * head_dim, hidden_size]; any floating dtype.
        q_bias, k_bias: [num_q_heads * head_dim], [num_kv_heads * head_dim] or None. All tensors are on one device.
        rope: the rotation of q and k after the projection; None if there is none.

    Returns:
        New tensors in the dtypes of the given tensors.

    Raises:
        TypeError: an argument is no floating tensor.
        ValueError: shapes do not fit, a factor is not positive and finite, or the factors of a rotated pair differ.
    """
    given = {"factors": factors, "q_weight": q_weight, "k_weight": k_weight, "q_bias": q_bias, "k_bias": k_bias}
    check_floating(**{name: tensor for name, tensor in given.items() if tensor is not None or "bias" not in name})
    if rope is not None:
        check_pairs(factors, rope)
    elif factors.dim() != 2 or not factors.numel():
        raise ValueError(f"factors: got shape {list(factors.shape)}, want [num_kv_heads, head_dim]")
    check_all_positive("factors", factors)
    columns = factors.numel()
    check_shape("k_weight", k_weight, columns, "hidden_size")
    if q_weight.dim() != 2 or q_weight.shape[0] % columns:
        raise ValueError(f"q_weight: got shape {list(q_weight.shape)}, want [a multiple of {columns}, hidden_size]")
    group = q_weight.shape[0] // columns
    k_factors = factors.flatten()
    q_factors = factors.repeat_interleave(group, dim=0).flatten()
    for name, bias, per_column in (("q_bias", q_bias, q_factors), ("k_bias", k_bias, k_factors)):
        if bias is not None:
            check_shape(name, bias, *per_column.shape)
    return Folded(
        (q_weight * q_factors[:, None]).to(q_weight.dtype),
        (k_weight / k_factors[:, None]).to(k_weight.dtype),
        None if q_bias is None else (q_bias * q_factors).to(q_bias.dtype),
        None if k_bias is None else (k_bias / k_factors).to(k_bias.dtype),
    )


def check_pairs(factors: torch.Tensor, rope: RotaryPairs) -> None:
    """Raises TypeError or ValueError unless factors, floating [num_kv_heads, head_dim], obey the pairing rule.

    rope: the rotation, whose pairs have to have equal factors.
    """
    check_floating(factors=factors)
    if factors.dim() != 2 or not factors.numel():
        raise ValueError(f"factors: got shape {list(factors.shape)}, want [num_kv_heads, head_dim]")
    _check_rotary_dim(rope, factors.shape[1])
    first, second = pairs(rope)
    wrong = (factors[:, first] != factors[:, second]).nonzero()
    if len(wrong):
        head, pair = (int(number) for number in wrong[0])
        columns = (int(first[pair]), int(second[pair]))
        values = [float(factors[head, column]) for column in columns]
        raise ValueError(
            f"factors: got {values[0]:g} and {values[1]:g} for columns {columns[0]} and {columns[1]} of head {head}, "
            "which RoPE rotates together; want equal ones, as smooth_keys(rope=...) gives"
        )


def pairs(rope: RotaryPairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first and the second column of each rotated pair: two int64 tensors [rotary_dim / 2]."""
    if rope.interleaved:
        even = torch.arange(0, rope.rotary_dim, 2, device="cpu")
        return even, even + 1
    low = torch.arange(rope.rotary_dim // 2, device="cpu")
    return low, low + rope.rotary_dim // 2


def _pairwise_max(top: torch.Tensor, rope: RotaryPairs | None) -> torch.Tensor:
    """Returns ``top`` [heads, head_dim], in which both columns of each rotated pair are set to the maximum of the
    pair.
    """
    if rope is None:
        return top
    first, second = pairs(rope)
    both = torch.maximum(top[:, first], top[:, second])
    paired = top.clone()
    paired[:, first], paired[:, second] = both, both
    return paired


def _channel_maxima(name: str, samples: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude of every channel of samples [..., heads, head_dim]: fp32 [heads, head_dim]."""
    check_floating(**{name: samples})
    if samples.dim() < 2 or not samples.numel():
        raise ValueError(f"{name}: got shape {list(samples.shape)}, want [..., heads, head_dim], not empty")
    top = samples.detach().reshape(-1, *samples.shape[-2:]).abs().amax(0).float()
    if not bool(top.isfinite().all()):
        raise ValueError(f"{name}: got NaN or infinity among the samples, want finite ones")
    return top


def _log(top: torch.Tensor) -> torch.Tensor:
    greatest = top.amax(-1, keepdim=True)
    return torch.log(torch.maximum(top, greatest * _LEAST_MAGNITUDE).clamp(min=torch.finfo(torch.float32).tiny))


def _check_rotary_dim(rope: RotaryPairs, head_dim: int) -> None:
    check_kind("rope", rope, RotaryPairs, "a Rope")
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
        raise ValueError(f"rope: got rotary_dim {rope.rotary_dim}, want an even number up to head_dim {head_dim}")
