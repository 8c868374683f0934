"""`PackedExperts`: the quantised weights of one layer of a mixture of experts, all of one shape and format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from cute_kernels.arguments import check_contiguous, check_flag, check_kind, check_tensors
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm import weight as packed_weight
from cute_kernels.gemm.packed import Packed, kept
from cute_kernels.gemm.quantize import chosen_format, differences, interleave_weights, points_of, quantize_weight, wider
from cute_kernels.gemm.weight import PackedWeight

_TENSORS = ("codes", "scales", "zeros")


class ExpertsForm(NamedTuple):
    """The static properties of `PackedExperts`: everything but the contents of tensors.

    Attributes:
        device_index: index of the GPU, -1 on a CPU.
        activations: the format to which a call rounds x, "fp8" or None.
    """

    num_experts: int
    n: int
    k: int
    k_pad: int
    format: WeightFormat
    dtype: torch.dtype
    device_index: int
    activations: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class PackedExperts(Packed):
    """Weights [E, N, K] in 4- or 8-bit codes. Each tensor holds the tensors of E `PackedWeight`, one after the other.

    ``experts[e]`` is expert e as a `PackedWeight` that shares the memory. Act-order and input scales are not supported,
    as each expert would have its own.

    Args:
        codes, scales, zeros: as in `PackedWeight` with a dimension E in front; zeros is None if all are symmetric.
        format, shape: as in `PackedWeight`; shape is (N, K) of one expert.
        check_values: as in `PackedWeight`.

    Raises:
        TypeError, ValueError: a field is not as above; the message names it.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    format: WeightFormat
    shape: tuple[int, int]
    check_values: InitVar[bool] = True

    tensor_names: ClassVar[tuple[str, ...]] = _TENSORS

    def __post_init__(self, check_values: bool) -> None:
        packed_weight.check_weight_format(self.format)
        check_tensors(codes=self.codes, scales=self.scales)
        if self.codes.dim() != 4 or self.codes.shape[0] < 1:
            raise ValueError(f"codes: got shape {list(self.codes.shape)}, want [experts, N tiles, K tiles, 2048]")
        for name, tensor in self._tensors().items():
            check_tensors(**{name: tensor})
            if tensor.dim() != 4 or tensor.shape[0] != len(self):
                raise ValueError(f"{name}: got shape {list(tensor.shape)}, want [{len(self)}, N tiles, groups, 64]")
            check_contiguous(name, tensor)
        packed_weight.check_presence(self.zeros, self.format)
        self[0]  # which checks all else but numbers
        check_flag("check_values", check_values)
        if check_values and packed_weight.has_values(self.codes):
            groups = self.scales.shape[2] - self.format.more_groups
            self.format.check_values(self.scales[:, :, :groups], self.zeros)

    def __len__(self) -> int:
        return self.codes.shape[0]

    def __getitem__(self, expert: int) -> PackedWeight:
        """Returns an expert's weight, which shares the memory. Raises IndexError if there is no such expert, TypeError
        unless ``expert`` is an int."""
        if not isinstance(expert, int) or isinstance(expert, bool):
            raise TypeError(f"expert: got {expert!r}, want an int")
        if not -len(self) <= expert < len(self):
            raise IndexError(f"expert: got {expert}, want {-len(self)} to {len(self) - 1}")
        tensors: dict[str, Any] = {name: tensor[expert] for name, tensor in self._tensors().items()}
        form: dict[str, Any] = {"format": self.format, "shape": self.shape}
        return PackedWeight(**{"zeros": None} | tensors, **form, check_values=False)

    def __iter__(self) -> Iterator[PackedWeight]:
        return (self[expert] for expert in range(len(self)))

    @kept
    def form(self) -> ExpertsForm:
        """Everything that decides a plan for these weights. The addresses of their tensors do not."""
        k_pad = packed_weight.padded_shape(self.shape, self.group_size)[1]
        return ExpertsForm(len(self), *self.shape, k_pad, self.format, self.dtype, self.codes.get_device())

    def __repr__(self) -> str:
        sizes = f"{self.format.label}, [{len(self)}, {self.shape[0]}, {self.shape[1]}], group_size={self.group_size}"
        zeros = ", with zeros" if self.zeros is not None else ""
        return f"PackedExperts({sizes}, {self.dtype}{zeros}, {self.nbytes / 1e6:.1f} MB on {self.device})"

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns W [E, N, K] in ``dtype``, default the weights' own ``dtype``."""
        return torch.stack([weight.dequantize(dtype) for weight in self])

    def shard_n(self, rank: int, world_size: int) -> PackedExperts:
        """Returns a copy with only a rank's output features of every expert; see `PackedWeight.shard_n`."""
        return stack_experts([weight.shard_n(rank, world_size) for weight in self])

    def shard_k(self, rank: int, world_size: int) -> PackedExperts:
        """Returns a copy with only a rank's input columns of every expert; see `PackedWeight.shard_k`."""
        return stack_experts([weight.shard_k(rank, world_size) for weight in self])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the tensors by name, and "format", int64 [6]: version, N, K, bits, group_size or 0, experts.

        For formats other than integers "format" is version 2, N, K, experts, and the bytes of the format's key.
        """
        return {**self._tensors(), "format": packed_weight.format_numbers(self.format, self.shape, len(self))}

    @classmethod
    def from_state_dict(cls, tensors: dict[str, torch.Tensor]) -> PackedExperts:
        """Makes the weights of a `state_dict`'s tensors, which are not copied.

        Raises:
            TypeError, ValueError: a tensor is missing, unknown or does not fit; the message names it.
        """
        found, shape, (experts,) = packed_weight.checked_state(tensors, _TENSORS, 1)
        fields: dict[str, Any] = {name: tensors.get(name) for name in _TENSORS}
        weights = cls(**fields, format=found, shape=shape)
        if len(weights) != experts:
            raise ValueError(f"codes: got {len(weights)} experts, want {experts}, what format says")
        return weights


def stack_experts(weights: Sequence[PackedWeight]) -> PackedExperts:
    """Copies the experts of a layer into one `PackedExperts`. Importers of checkpoints make experts one after the
    other.

    Args:
        weights: of one shape, format, dtype and device. If some have zero points, the others get the symmetric zero as
            zero points.

    Raises:
        TypeError, ValueError: there are no weights, they are not alike, or one has perm or input_scale; the message
            says which.
    """
    check_kind("weights", weights, Sequence, "a sequence of PackedWeight")
    if not weights:
        raise ValueError("weights: got none, want at least one expert")
    for i, weight in enumerate(weights):
        _check_alike(i, weight, weights[0])
    zeros = any(weight.zeros is not None for weight in weights)
    return filled(lambda i: weights[i], len(weights), zeros)


def quantize_experts(
    w: torch.Tensor,
    bits: int = 4,
    group_size: int | None = 128,
    zero_point: bool = False,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | str | None = None,
    halves_in_turn: bool = False,
    format: WeightFormat | str | None = None,
) -> PackedExperts:
    """Quantises every expert as `quantize_weight` does.

    Args:
        w: floating [E, N, K], finite.
        bits, group_size, zero_point, dtype, device, format: as for `quantize_weight`.
        halves_in_turn: whether rows n and N / 2 + n become rows 2 n and 2 n + 1: stacked gate and up rows become
            interleaved ones.

    Raises:
        TypeError, ValueError: as `quantize_weight`, or w has no experts, or halves_in_turn is given with an odd N.
    """
    check_flag("halves_in_turn", halves_in_turn)
    check_tensors(w=w)
    if w.dim() != 3 or w.shape[0] < 1:
        raise ValueError(f"w: got shape {list(w.shape)}, want [E, N, K] with at least one expert")
    if halves_in_turn and w.shape[1] % 2:
        raise ValueError(f"w: got {w.shape[1]} rows, want an even number: gates, then ups")

    def expert(i: int) -> PackedWeight:
        rows = w[i].unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if halves_in_turn else w[i]
        return quantize_weight(rows, bits, group_size, zero_point, dtype, device=device, format=format)

    return filled(expert, w.shape[0], bool(chosen_format(bits, group_size, zero_point, dtype, format).has_zeros))


def interleave_experts(gate: PackedExperts, up: PackedExperts) -> PackedExperts:
    """Interleaves gate and up, [E, N, K] each, into experts [E, 2 N, K]: even rows are gate's, odd rows are up's. See
    `interleave_weights`.

    Raises:
        TypeError, ValueError: the two are no PackedExperts, or differ in number or in what `interleave_weights` names.
    """
    for name, weight in (("gate", gate), ("up", up)):
        check_kind(name, weight, PackedExperts, "PackedExperts")
    if len(gate) != len(up):
        raise ValueError(f"up: got {len(up)} experts, want {len(gate)}, as many as gate has")
    zeros = gate.zeros is not None or up.zeros is not None
    return filled(lambda i: interleave_weights(gate[i], up[i]), len(gate), zeros)


def filled(expert: Callable[[int], PackedWeight], count: int, zeros: bool) -> PackedExperts:
    """Stacks the weights expert(0) to expert(count - 1). At most one expert is in memory twice, since each is copied
    before the next is made. zeros: whether the result has zero points."""
    first = expert(0)
    form = first.format
    codes, scales = (tensor.new_empty((count, *tensor.shape)) for tensor in (first.codes, first.scales))
    points = torch.empty_like(scales, dtype=torch.uint8) if zeros else None
    for i in range(count):
        weight = first if i == 0 else expert(i)
        codes[i], scales[i], form = weight.codes, weight.scales, wider(form, weight.format)
        if points is not None:
            points[i] = points_of(weight, like=weight.scales)
    form = form.with_zero_points(zeros)
    return PackedExperts(codes, scales, points, format=form, shape=first.shape, check_values=False)


def _check_alike(index: int, weight: object, first: PackedWeight) -> None:
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weights: got {type(weight).__name__} as expert {index}, want a PackedWeight")
    for name, theirs, ours in differences(weight, first):
        raise ValueError(f"weights: got {name} {theirs} of expert {index}, want {ours}, that of expert 0")
    for name in ("perm", "input_scale"):
        if getattr(weight, name) is not None:
            raise ValueError(f"weights: got {name} with expert {index}, want weights without: experts have none")
