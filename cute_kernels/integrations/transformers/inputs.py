"""The inputs of a recorded step: where it reads them, and what they are, which the host knows without asking for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNED_BYTES = 256
"""Of each input's place: as aligned as a tensor of its own."""


class StepInputs:
    """Where a recorded step reads its inputs; those of one dtype lie side by side.

    Inputs are compared on the host, where that needs no kernel: one that compares on a GPU waits for a place beside the
    step that runs there.

    Args:
        given: the first step's, by the names of ``forward``'s arguments.

    Attributes:
        tensors: where the step reads each of them.
    """

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        kinds = dict.fromkeys((x.dtype, x.device) for x in given.values())
        self._groups = [
            _Group({name: x for name, x in given.items() if (x.dtype, x.device) == kind}, *kind) for kind in kinds
        ]
        self.tensors = {name: x for group in self._groups for name, x in group.read.items()}
        self._asked = {name: x for group in self._groups for name, x in group.asked.items()}
        self._devices = [device for _, device in kinds if device.type == "cuda"]
        self.place(given)

    def place(self, given: Mapping[str, torch.Tensor]) -> None:
        """Copies these inputs to where the step reads them."""
        for name, tensor in self.tensors.items():
            tensor.copy_(given[name])

    def note(self) -> None:
        """Tells the host what the inputs are; it knows once the current stream has come to this."""
        for group in self._groups:
            group.noted.copy_(group.memory, non_blocking=True)

    def are(self, given: Mapping[str, torch.Tensor]) -> bool:
        """Whether the inputs that were noted have these values. Waits for the current stream."""
        for name, tensor in self._asked.items():
            tensor.copy_(given[name], non_blocking=True)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        return all(torch.equal(group.all_asked, group.noted) for group in self._groups)


class _Group:
    """Inputs of one dtype on one device.

    Attributes:
        memory, noted, all_asked: all of them: on the device; on the host, as noted; and as asked for.
        read, asked: each one's part of ``memory`` and of ``all_asked``.
    """

    @torch.inference_mode(False)  # what a call in inference mode makes, another one may write
    def __init__(self, given: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        step = _ALIGNED_BYTES // dtype.itemsize
        size = sum(-(-x.numel() // step) * step for x in given.values())
        self.memory = torch.zeros(size, dtype=dtype, device=device)
        self.noted, self.all_asked = (torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda") for _ in "na")
        self.read: dict[str, torch.Tensor] = {}
        self.asked: dict[str, torch.Tensor] = {}
        start = 0
        for name, x in given.items():
            for memory, parts in ((self.memory, self.read), (self.all_asked, self.asked)):
                parts[name] = memory[start : start + x.numel()].view(x.shape)
            start += -(-x.numel() // step) * step
