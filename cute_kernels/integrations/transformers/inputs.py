"""The inputs of a recorded step, side by side in one memory: one operator places them, one compares them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNED_BYTES = 256
"""Of each input's place: as aligned as a tensor of its own."""


class StepInputs:
    """Where a recorded step reads its inputs.

    Args:
        given: the first step's, by the names of ``forward``'s arguments.

    Attributes:
        tensors: where the step reads each of them.
    """

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._groups = [
            _Group({name: given[name] for name in sorted(given) if _kind(given[name]) == kind})
            for kind in dict.fromkeys(map(_kind, given.values()))
        ]
        for group in self._groups:
            self.tensors |= group.tensors

    def place(self, given: Mapping[str, torch.Tensor]) -> None:
        """Copies these inputs to where the step reads them."""
        for group in self._groups:
            torch.cat(group.parts(given), out=group.memory)

    def are(self, given: Mapping[str, torch.Tensor]) -> bool:
        """Whether the step's inputs have these values. Waits for the device."""
        return all(torch.equal(torch.cat(group.parts(given)), group.memory) for group in self._groups)


class _Group:
    """Inputs of one dtype on one device."""

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        self.names = tuple(given)
        first = next(iter(given.values()))
        step = _ALIGNED_BYTES // first.element_size()
        with torch.inference_mode(False):
            self.padding = [first.new_zeros(-x.numel() % step) for x in given.values()]
            self.memory = torch.cat(self.parts(given))
        self.tensors: dict[str, torch.Tensor] = {}
        start = 0
        for (name, x), padding in zip(given.items(), self.padding, strict=True):
            self.tensors[name] = self.memory[start : start + x.numel()].view(x.shape)
            start += x.numel() + padding.numel()

    def parts(self, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What lies in the memory, one after the other."""
        parts: list[torch.Tensor] = []
        for name, padding in zip(self.names, self.padding, strict=True):
            parts += (given[name].reshape(-1), padding)
        return parts


def _kind(x: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return x.dtype, x.device
