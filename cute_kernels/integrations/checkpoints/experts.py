"""The experts of a checkpoint's layer, stacked. Experts are added one at a time as they are read."""

from __future__ import annotations

import torch

from cute_kernels.gemm.experts.module import QuantizedExperts
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.quantize import differences, interleave_weights, wider
from cute_kernels.gemm.weight import PackedWeight, symmetric_zero
from cute_kernels.integrations.checkpoints.placement import DOWN, GATE, UP


class Stack:
    """A stack of experts, to which experts are added until it becomes `PackedExperts`. Memory holds each expert once,
    plus the expert that is being added.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._first: PackedWeight | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._filled = 0

    def put(self, expert: int, weight: PackedWeight) -> None:
        """Copies an expert's weight into its place.

        Raises:
            ValueError: the weight differs from the first expert's in shape or format, or permutes or scales its inputs.
        """
        for name in ("perm", "input_scale"):
            if getattr(weight, name) is not None:
                raise ValueError(f"{name}: got an expert that has one, want experts without: they share their inputs")
        if self._first is None:
            self._first, self._form = weight, weight.format
            for name in ("codes", "scales"):
                tensor = getattr(weight, name)
                self._tensors[name] = tensor.new_empty((self._count, *tensor.shape))
        for name, theirs, ours in differences(weight, self._first):
            raise ValueError(f"{name}: got {theirs}, want {ours}, that of the first expert that was read")
        self._form = wider(self._form, weight.format)
        if weight.zeros is not None and "zeros" not in self._tensors:
            middle = symmetric_zero(weight.bits)
            self._tensors["zeros"] = torch.full_like(self._tensors["scales"], middle, dtype=torch.uint8)
        for name, tensor in self._tensors.items():
            own = getattr(weight, name)
            if own is not None:
                tensor[expert] = own
        self._filled += 1

    @property
    def is_full(self) -> bool:
        return self._filled == self._count

    def finish(self) -> PackedExperts:
        """Returns the experts, once all have been put."""
        assert self.is_full and self._first is not None
        zeros, first = self._tensors.get("zeros"), self._first
        form = self._form.with_zero_points(zeros is not None)
        codes, scales = self._tensors["codes"], self._tensors["scales"]
        return PackedExperts(codes, scales, zeros, format=form, shape=first.shape, check_values=False)


class Experts:
    """The experts of a layer, gated or not. Their projections are added one by one, in any order."""

    def __init__(self, count: int, gated: bool = True) -> None:
        self._gated = gated
        self._stacks = {"gate_up": Stack(count), "down": Stack(count)}
        self._waiting: dict[int, tuple[str, PackedWeight]] = {}  # a gate or up, until the other one comes

    def put(self, role: str, expert: int, weight: PackedWeight) -> None:
        """Adds an expert's gate, up or down projection; raises ValueError as `Stack.put` and `interleave_weights`
        do."""
        if role == DOWN or not self._gated:
            self._stacks["down" if role == DOWN else "gate_up"].put(expert, weight)
            return
        other = self._waiting.pop(expert, None)
        if other is None:
            self._waiting[expert] = role, weight
            return
        parts = {role: weight, other[0]: other[1]}
        self._stacks["gate_up"].put(expert, interleave_weights(parts[GATE], parts[UP]))

    @property
    def is_full(self) -> bool:
        return all(stack.is_full for stack in self._stacks.values())

    def finish(self) -> dict[str, QuantizedExperts]:
        """Returns the finished parts of a layer: gate_up and down."""
        return {name: QuantizedExperts(stack.finish()) for name, stack in self._stacks.items()}
