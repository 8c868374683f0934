"""The inputs of a recorded step: the tensors that the step reads, and copies of their values on the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNED_BYTES = 256
"""Alignment of each input within its group, equal to that of a tensor of its own."""


class StepInputs:
    """The tensors from which a recorded step reads its inputs; inputs of one dtype share one tensor.

    Inputs are compared on the host, since a kernel that compares them would wait until the running step leaves SMs
    free. The code makes few torch calls, since torch calls are most of the host's work: within `generate` one takes
    three times as long as in a loop.

    Args:
        given: the first step's inputs, by the names of ``forward``'s arguments.

    Attributes:
        tensors: the tensors that the step reads, by the same names.
    """

    def __init__(self, given: Mapping[str, torch.Tensor]) -> None:
        kinds = dict.fromkeys((x.dtype, x.device) for x in given.values())
        self._groups = [
            _Group({name: x for name, x in given.items() if (x.dtype, x.device) == kind}, *kind) for kind in kinds
        ]
        self.tensors = {name: x for group in self._groups for name, x in group.read.items()}
        self._names, self._read = tuple(self.tensors), tuple(self.tensors.values())
        self._asked = {name: x for group in self._groups for name, x in group.asked.items()}
        self._all_asked = tuple(self._asked.values())
        self._noted = {name: x for group in self._groups for name, x in group.told.items()}
        devices = dict.fromkeys(device for _, device in kinds if device.type == "cuda")
        # A recording that notes the inputs marks the moment at every replay: what is external to it may wait for that.
        self._moments = [(torch.cuda.Event(external=True), device) for device in devices]
        self.place(given)

    def place(self, given: Mapping[str, torch.Tensor]) -> None:
        """Copies inputs into the tensors that the step reads."""
        torch._foreach_copy_(self._read, [given[name] for name in self._names])

    def note(self) -> None:
        """Starts copying the inputs' values to the host; `wait` waits until they have arrived."""
        for group in self._groups:
            group.noted.copy_(group.memory, non_blocking=True)
        for moment, device in self._moments:
            moment.record(torch.cuda.current_stream(device))

    def wait(self, current: torch.cuda.Stream | None = None) -> None:
        """Makes the current stream wait for the copies of `note`. current: that stream, if the caller knows it."""
        for moment, device in self._moments:
            moment.wait(torch.cuda.current_stream(device) if current is None else current)

    def are(self, given: Mapping[str, torch.Tensor]) -> bool:
        """Returns whether these inputs equal the values of the last `note`. It copies the inputs to the host to compare
        them, and so waits for the current stream.
        """
        torch._foreach_copy_(self._all_asked, [given[name] for name in self._names])
        return all(torch.equal(group.all_asked, group.noted) for group in self._groups)

    def __del__(self) -> None:
        """Waits for the last `note`, because torch would reuse the host memory while a replay still writes it."""
        for moment, _ in getattr(self, "_moments", ()):
            if not torch.cuda.is_current_stream_capturing():
                moment.synchronize()

    def asked(self, name: str) -> torch.Tensor:
        """Returns the value of an input in the latest call of `are`, on the host."""
        return self._asked[name]

    def noted(self, name: str) -> torch.Tensor:
        """Returns the value of an input in the latest `note`, on the host."""
        return self._noted[name]


class _Group:
    """Inputs of one dtype on one device.

    Attributes:
        memory: all inputs in one tensor on the device, which the step reads.
        noted: a tensor on the host, the copy of ``memory`` from the last `note`.
        all_asked: a tensor on the host, the inputs of the last call of `are`.
        read, told, asked: lists of views of memory, of noted and of all_asked, one view for each input.
    """

    @torch.inference_mode(False)  # what a call in inference mode makes, another one may write
    def __init__(self, given: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        step = _ALIGNED_BYTES // dtype.itemsize
        size = sum(-(-x.numel() // step) * step for x in given.values())
        self.memory = torch.zeros(size, dtype=dtype, device=device)
        pinned = {"dtype": dtype, "device": "cpu", "pin_memory": device.type == "cuda"}
        self.noted, self.all_asked = (torch.zeros(size, **pinned) for _ in "na")
        self.read: dict[str, torch.Tensor] = {}
        self.told: dict[str, torch.Tensor] = {}
        self.asked: dict[str, torch.Tensor] = {}
        start = 0
        for name, x in given.items():
            for memory, parts in ((self.memory, self.read), (self.noted, self.told), (self.all_asked, self.asked)):
                parts[name] = memory[start : start + x.numel()].view(x.shape)
            start += -(-x.numel() // step) * step
