"""`CacheTransform`, which makes keys and values easier to quantise and does not change attention's result.

A layer's cache holds k' and v' in place of k and v, and attention reads them with q' in place of q. After RoPE, for KV
head h, with H_w the Hadamard matrix of ``w`` columns, block by block along head_dim (`rotated`):

    k' = H_w (k_factor[h] * (k - k_center[h]))          q' = H_w (q_factor[h] * q),  q_factor = 1 / k_factor
    v' = H_u (v_factor[h] * v)                          out = (1 / v_factor[h]) * H_u out'

H_w is orthogonal and symmetric, so q . k = q' . k' + shift with **shift = q . k_center[h]**. A query has the same shift
for all keys, so a softmax does not depend on the shift. Three results do, so the shift is added for them: a soft cap
(before the cap), an attention sink (whose logit competes with q . k), and the log-sum-exp. The log-sum-exp is needed to
merge parts with different centers.

Subtracting the *center* removes the mean of K's channels, which would otherwise take much of a group's range. The
*factors* move quantisation noise between channels of K and q, like SmoothQuant's (Xiao et al., 2023; `smoothing` folds
such factors before RoPE). The *rotation* spreads the remaining part of an outlier over its block (QuIP#, Tseng et al.,
2024; QuaRot, Ashkboos et al., 2024). Signs of the factors are the random signs of a randomised Hadamard matrix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from cute_kernels.arguments import check_contiguous, check_count, check_dtype, check_floating, check_kind, shape_of

# Factors beyond would leave fp16's range, which q' may have, or lose all of a channel's bits.
LEAST_FACTOR, GREATEST_FACTOR = 2.0**-14, 2.0**14


@dataclass(frozen=True, eq=False)
class CacheTransform:
    """The transform of one layer's K and V, and the matching transform of q. The module's docstring has the formulas.
    The object is immutable.

    Args:
        k_center: fp32 [num_kv_heads, head_dim], finite; subtracted from K after RoPE. None: nothing is subtracted.
        k_factor: fp32 [num_kv_heads, head_dim], magnitudes from 2**-14 to 2**14, any signs; None: 1.
        k_rotation: number of columns of the Hadamard blocks of K and q: 1 (no rotation) or a power of two that divides
            head_dim.
        v_factor: fp32 [num_kv_heads, v_head_dim], as k_factor.
        v_rotation: as k_rotation, for V and attention's output.

    Raises:
        TypeError: an array is no fp32 tensor, or a width no int.
        ValueError: an array is not finite or out of range; arrays differ in shape or device; a width is no power of
            two, or does not divide the head_dim of an array.
    """

    k_center: torch.Tensor | None = None
    k_factor: torch.Tensor | None = None
    k_rotation: int = 1
    v_factor: torch.Tensor | None = None
    v_rotation: int = 1

    def __post_init__(self) -> None:
        for name, array in self.arrays.items():
            _check_array(name, array)
            if name != "k_center":
                _check_factor(name, array)
        for name in ("k_rotation", "v_rotation"):
            width = getattr(self, name)
            check_count(name, width, 1)
            if width & (width - 1):
                raise ValueError(f"{name}: got {width}, want 1 or a power of two")
        if self.arrays:
            first = next(iter(self.arrays.values()))
            heads = first.shape[0]
            of_k, of_v = (
                next((x.shape[1] for name, x in self.arrays.items() if name.startswith(side)), None) for side in "kv"
            )
            self._check_fit(heads, of_k, of_v, first.device)

        # Made now: not in the midst of a graph's capture, nor where torch.compile traces, which takes no locks.
        _ = self.q_factor, self.out_factor, self.kind

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copied or loaded object from its arguments. Cached properties, such as addresses, are computed
        again for the object's own arrays.
        """
        self.__init__(**{each.name: state[each.name] for each in fields(self)})

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def arrays(self) -> dict[str, torch.Tensor]:
        """The given tensors among k_center, k_factor and v_factor, by name."""
        named = {"k_center": self.k_center, "k_factor": self.k_factor, "v_factor": self.v_factor}
        return {name: array for name, array in named.items() if array is not None}

    @cached_property
    def q_factor(self) -> torch.Tensor | None:
        """1 / k_factor, fp32 [num_kv_heads, head_dim]; None if k_factor is None."""
        return None if self.k_factor is None else self.k_factor.reciprocal()

    @cached_property
    def out_factor(self) -> torch.Tensor | None:
        """1 / v_factor, fp32 [num_kv_heads, v_head_dim]; None if v_factor is None."""
        return None if self.v_factor is None else self.v_factor.reciprocal()

    @property
    def identity(self) -> bool:
        """Whether the transform changes nothing."""
        return not self.arrays and self.k_rotation == self.v_rotation == 1

    @cached_property
    def kind(self) -> tuple[Any, ...] | None:
        """The part of the transform that decides a kernel and its launch: everything except the arrays' values. None
        for the identity."""
        if self.identity:
            return None
        arrays = [(x.shape, x.device) if x is not None else None for x in (self.k_center, self.k_factor, self.v_factor)]
        return self.k_rotation, self.v_rotation, *arrays

    @property
    def device(self) -> torch.device | None:
        """The device of the arrays; None without arrays."""
        return next((array.device for array in self.arrays.values()), None)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of k_center, k_factor, q_factor and v_factor; 0 for a missing array."""
        arrays = self.k_center, self.k_factor, self.q_factor, self.v_factor
        return tuple(0 if array is None else array.data_ptr() for array in arrays)

    @property
    def changes_values(self) -> bool:
        """Whether V is transformed, so that attention's output has to be restored."""
        return self.v_factor is not None or self.v_rotation > 1

    @cached_property
    def key(self) -> str:
        """A digest of the transform, 16 hexadecimal digits. Transforms that write the same cache have the same digest.
        Waits for the device, once. It is "none" for the identity.

        Examples:
            >>> CacheTransform().key
            'none'
        """
        if self.identity:
            return "none"
        digest = hashlib.sha256(f"cache-transform 1 {self.k_rotation} {self.v_rotation}".encode())
        for name, array in self.arrays.items():
            digest.update(f" {name} {shape_of(array)} ".encode())
            digest.update(array.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def validate(self, num_kv_heads: int, head_dim: int, v_head_dim: int | None = None) -> None:
        """Raises ValueError unless the transform fits a cache of these sizes. v_head_dim: columns of V; default:
        head_dim."""
        device = next((array.device for array in self.arrays.values()), torch.device("cpu"))
        self._check_fit(num_kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim, device)

    def to(self, device: torch.device | str | None) -> CacheTransform:
        """Returns the transform with its arrays on a device; the same object if they are already there."""
        moved = {name: array.to(device) for name, array in self.arrays.items()}
        if all(moved[name] is array for name, array in self.arrays.items()):
            return self
        return replace(self, **moved)

    # -- the reference ------------------------------------------------------------------------------------------------
    # In x's dtype, 16-bit ones in fp32 and rounded once.

    def keys(self, k: torch.Tensor) -> torch.Tensor:
        """Transforms keys k to k', floating [..., num_kv_heads, head_dim] after RoPE."""
        x = _wide(k)
        x = x if self.k_center is None else x - self.k_center.to(x.dtype)
        x = x if self.k_factor is None else x * self.k_factor.to(x.dtype)
        return rotated(x, self.k_rotation).to(k.dtype)

    def original_keys(self, k: torch.Tensor) -> torch.Tensor:
        """Recovers k from k': the inverse of `keys`."""
        x = rotated(_wide(k), self.k_rotation)
        x = x if self.k_factor is None else x / self.k_factor.to(x.dtype)
        return (x if self.k_center is None else x + self.k_center.to(x.dtype)).to(k.dtype)

    def values(self, v: torch.Tensor) -> torch.Tensor:
        """Transforms values v to v', floating [..., num_kv_heads, v_head_dim]."""
        x = _wide(v)
        x = x if self.v_factor is None else x * self.v_factor.to(x.dtype)
        return rotated(x, self.v_rotation).to(v.dtype)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Transforms queries q to q', floating [..., num_q_heads, head_dim] after RoPE. num_q_heads is a multiple of
        num_kv_heads."""
        x = _wide(q)
        x = x if self.k_factor is None else x / _per_q_head("q", q, self.k_factor).to(x.dtype)
        return rotated(x, self.k_rotation).to(q.dtype)

    def shift(self, q: torch.Tensor) -> torch.Tensor | None:
        """Returns q . k_center, [..., num_q_heads], in fp32 or wider; None without a center. The result is q . k minus
        q' . k', not multiplied by softmax_scale. q is given after RoPE and *before* `queries`."""
        if self.k_center is None:
            return None
        x = _wide(q)
        return (x * _per_q_head("q", q, self.k_center).to(x.dtype)).sum(-1)

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """Recovers attention's output over v from the output over v', floating [..., num_q_heads, v_head_dim]. Applied
        to [..., num_kv_heads, v_head_dim], it is the inverse of `values`.
        """
        x = rotated(_wide(out), self.v_rotation)
        return (x if self.v_factor is None else x / _per_q_head("out", out, self.v_factor).to(x.dtype)).to(out.dtype)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_fit(self, heads: int, head_dim: int | None, v_head_dim: int | None, device: torch.device) -> None:
        """Raises ValueError unless arrays are [heads, head_dim] on the device (V's: [heads, v_head_dim]), and the
        rotations' widths divide head_dim and v_head_dim. A dimension of None is not checked."""
        for name, array in self.arrays.items():
            dim = v_head_dim if name.startswith("v") else head_dim
            if tuple(array.shape) != (heads, dim):
                raise ValueError(f"{name}: got shape {shape_of(array)}, want [{heads}, {dim}]")
            if array.device != device:
                raise ValueError(f"{name}: got a tensor on {array.device}, want all of a transform on {device}")
        for name, dim in (("k_rotation", head_dim), ("v_rotation", v_head_dim)):
            width = getattr(self, name)
            if dim is not None and dim % width:
                raise ValueError(f"{name}: got {width}, want a power of two that divides head_dim {dim}")


# -- as arguments of an operator ---------------------------------------------------------------------------------------

TRANSFORM_SCHEMA = (
    "Tensor? k_center=None, Tensor? k_factor=None, Tensor? q_factor=None, Tensor? v_factor=None, "
    "Tensor? out_factor=None, int k_rotation=1, int v_rotation=1"
)
"""The arguments for a transform in an operator's schema. An operator's implementation may get only the first of them:
the missing ones then have their default values."""


PART_NAMES = ("k_center", "k_factor", "q_factor", "v_factor", "out_factor", "k_rotation", "v_rotation")


def named_parts_of(transform: CacheTransform | None) -> dict[str, Any]:
    """Returns the parts of a transform (`parts_of`) as a dict by name."""
    return dict(zip(PART_NAMES, parts_of(transform), strict=False))


def parts_of(transform: CacheTransform | None) -> tuple[Any, ...]:
    """Returns a transform as the arguments of `TRANSFORM_SCHEMA`, in their order. The result is empty for None."""
    if transform is None:
        return ()
    arrays = transform.k_center, transform.k_factor, transform.q_factor, transform.v_factor, transform.out_factor
    return *arrays, transform.k_rotation, transform.v_rotation


def transform_of(
    k_center: torch.Tensor | None = None,
    k_factor: torch.Tensor | None = None,
    q_factor: torch.Tensor | None = None,
    v_factor: torch.Tensor | None = None,
    out_factor: torch.Tensor | None = None,
    k_rotation: int = 1,
    v_rotation: int = 1,
) -> CacheTransform | None:
    """Returns the transform with these parts, which come from `parts_of`. They are not checked again, since that would
    wait for a GPU."""
    if k_center is k_factor is v_factor is None and k_rotation == v_rotation == 1:
        return None
    made = object.__new__(CacheTransform)
    parts = (k_center, k_factor, q_factor, v_factor, out_factor, k_rotation, v_rotation)
    for name, part in zip(PART_NAMES, parts, strict=True):
        object.__setattr__(made, name, part)  # as torch.compile traces it on PyTorch 2.11 too
    return made


def key_of(transform: CacheTransform | None) -> str:
    """Returns `CacheTransform.key`; "none" without a transform."""
    return "none" if transform is None else transform.key


def check_transform(name: str, transform: object) -> None:
    """Raises TypeError unless an argument is a transform or None."""
    check_kind(name, transform, CacheTransform | None, "a CacheTransform or None")


def check_transforms(name: str, transforms: object, num_layers: int) -> tuple[CacheTransform | None, ...]:
    """Returns a transform, or None, for every layer. ``transforms`` is one transform for all layers, or a sequence of
    ``num_layers`` transforms.

    Raises:
        TypeError, ValueError: ``transforms`` is neither.
    """
    if transforms is None or isinstance(transforms, CacheTransform):
        return (transforms,) * num_layers
    if not isinstance(transforms, Sequence) or isinstance(transforms, str):
        raise TypeError(f"{name}: got {type(transforms).__name__}, want a CacheTransform, one for each layer, or None")
    if len(transforms) != num_layers:
        raise ValueError(f"{name}: got {len(transforms)} transforms, want {num_layers}, one for each layer")
    for layer, transform in enumerate(transforms):
        check_transform(f"{name}[{layer}]", transform)
    return tuple(transforms)


def rotated(x: torch.Tensor, width: int) -> torch.Tensor:
    """Returns x times the Hadamard matrix of ``width`` columns, block by block of the last dimension.

    The matrix is in natural (Sylvester's) order, times width ** -0.5. It is orthogonal, symmetric and its own inverse.

    Args:
        x: floating [..., columns].
        width: a power of two that divides columns; 1 changes nothing.

    Examples:
        >>> rotated(torch.tensor([3.0, 1.0]), 2) * 2**0.5
        tensor([4., 2.])
    """
    if width == 1:
        return x
    blocks = x.unflatten(-1, (-1, width))
    step = 1
    while step < width:  # a butterfly: the device's order of additions, too
        low, high = blocks.unflatten(-1, (-1, 2, step)).unbind(-2)
        blocks = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    return blocks.flatten(-2) * width**-0.5


def _wide(x: torch.Tensor) -> torch.Tensor:
    check_floating(x=x)
    return x if x.dtype == torch.float64 else x.float()


def _per_q_head(name: str, x: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """Repeats an array [num_kv_heads, columns] for the q heads of x [..., num_q_heads, columns]. Returns [num_q_heads,
    columns]."""
    heads, columns = array.shape
    if x.dim() < 2 or x.shape[-1] != columns or not x.shape[-2] or x.shape[-2] % heads:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want [..., a multiple of {heads}, {columns}]")
    return array.repeat_interleave(x.shape[-2] // heads, dim=0)


def _check_array(name: str, array: torch.Tensor) -> None:
    check_floating(**{name: array})
    check_dtype(name, array, torch.float32)
    if array.dim() != 2 or not array.numel():
        raise ValueError(f"{name}: got shape {shape_of(array)}, want [num_kv_heads, head_dim]")
    check_contiguous(name, array)
    if not bool(array.isfinite().all()):
        raise ValueError(f"{name}: got NaN or infinity, want finite numbers")


def _check_factor(name: str, array: torch.Tensor) -> None:
    size = array.abs()
    wrong = ((size < LEAST_FACTOR) | (size > GREATEST_FACTOR)).nonzero()
    if len(wrong):
        head, column = (int(number) for number in wrong[0])
        raise ValueError(
            f"{name}: got {float(array[head, column]):g} for column {column} of head {head}, want magnitudes from "
            f"{LEAST_FACTOR:g} to {GREATEST_FACTOR:g}"
        )
