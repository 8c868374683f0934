"""The decode step after the one that was asked for, begun before it is asked for.

Between two steps `generate` waits for the device, and then makes the next one's inputs on the host; the device has
nothing to do meanwhile. Where it takes the likeliest token, the device knows those inputs: that token, and the next
position. So the next step is begun at once, on a stream of its own. When it is asked for, what is given is compared
with what it was begun with: only if that is the same are its outputs handed out. Else it is called back: its token is
taken off the lengths, its row is written anew, and the step runs as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from cute_kernels.integrations.transformers.columns import Columns

if TYPE_CHECKING:
    from cute_kernels.integrations.transformers.graphs import Recorded, Step

_COUNTED = ("position_ids", "cache_position")
"""Inputs that are one more in the next step."""
_ALLOWED_MISSES, _STEPS_A_MISS = 1, 8
"""Steps that may be called back, at first and for so many that were not, before none is begun any more."""


class Lane:
    """A stream beside the current one. On a CPU all is done in order, and nothing is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Within it work goes to the lane."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.stream):
                yield

    def follow(self) -> None:
        """The lane goes on once the current stream's work is done."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def mark(self) -> Moment:
        """A moment of the lane: all that it has been given so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, moment: Moment) -> None:
        """The current stream goes on once the lane has come to a moment."""
        if self.stream is not None and moment is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(moment)


Moment: TypeAlias = "torch.cuda.Event | torch._C.Event | None"
"""Of a lane; None of one on a CPU."""


@dataclass
class Begun:
    """A step under way that nobody has asked for yet.

    Attributes:
        replay: the recorded step.
        inputs: what it was begun with, where it reads them. given: the same, in one tensor.
        outputs: where its outputs will be; the next replay overwrites them.
        ready, done: moments of the lane: its inputs are there, its outputs are.
        of: the call that it was begun for.
    """

    replay: Recorded
    inputs: Mapping[str, torch.Tensor]
    given: torch.Tensor
    outputs: Any
    lane: Lane
    ready: Moment
    done: Moment
    of: Lookahead

    def call_back(self, columns: Columns) -> None:
        """Forgets it. Its row is behind the lengths then, as if it had never been written."""
        self.of.missed += 1
        self.lane.wait(self.done)
        columns.seq_lens.sub_(1)


class Lookahead:
    """The steps of one call of `generate`.

    Args:
        limit: columns that the call will come to, so that nothing is begun behind its last step.

    Attributes:
        taken: steps that had been begun when they were asked for.
        missed: steps that were called back.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.missed = 0
        self._lane: Lane | None = None
        # int64 [batch, 1]: what a request is given at every step; -1: what it chooses.
        self._last: torch.Tensor | None = None

    def take(self, step: Step, columns: Columns, given: Mapping[str, torch.Tensor], own: Callable[..., Any]) -> Any:
        """The outputs of a step that was begun with these inputs, which no replay overwrites; None if there is none.

        own: outputs -> their copy, made by a function that copies a tensor.
        """
        begun = columns.begun
        if not isinstance(begun, Begun) or begun.replay is not step.recorded:
            return None
        begun.lane.wait(begun.ready)
        if not torch.equal(_in_one(given), begun.given):  # waits for the device, once
            self._miss(given["input_ids"], begun.inputs["input_ids"])
            return None
        columns.begun = None
        self.taken += 1

        def copied(value: torch.Tensor) -> torch.Tensor:
            copy = torch.empty_like(value)  # of the current stream, all of whose work `equal` has waited for
            with begun.lane.beside():
                return copy.copy_(value)

        outputs = own(begun.outputs, copied)
        begun.lane.wait(begun.lane.mark())
        step.outputs = begun.outputs
        return outputs

    def _miss(self, given: torch.Tensor, foreseen: torch.Tensor) -> None:
        """A request that has ended is given the same token from there on, whatever the model says."""
        last = torch.full_like(given, -1) if self._last is None else self._last
        self._last = torch.where(given == foreseen, last, torch.where(last < 0, given, -1))

    def begin(self, step: Step, columns: Columns, in_order: bool) -> None:
        """Begins the step after ``step``, whose outputs are being made, and which is counted.

        in_order: whether those are made by the lane.
        """
        if columns.count + 1 >= min(self.limit, columns.capacity + 1):
            return
        if self.missed > _ALLOWED_MISSES + self.taken // _STEPS_A_MISS or not _can_begin(step):
            return
        if self._lane is None:
            self._lane = Lane(columns.seq_lens.device)
        if not in_order:
            self._lane.follow()
        inputs = step.inputs
        with self._lane.beside():
            chosen = step.outputs["logits"][:, -1].argmax(-1, keepdim=True)
            if self._last is not None:
                chosen = torch.where(self._last < 0, chosen, self._last)
            inputs["input_ids"].copy_(chosen)
            for name in _COUNTED:
                if name in inputs:
                    inputs[name].add_(1)
            columns.before.fill_(columns.count)
            given = _in_one(inputs)
            ready = self._lane.mark()
            outputs = step.recorded.replay()
        done = self._lane.mark()
        columns.begun = Begun(step.recorded, inputs, given, outputs, self._lane, ready, done, self)


def _in_one(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Tensors in one, in the order of their names: to be compared at once."""
    return torch.cat([inputs[name].reshape(-1) for name in sorted(inputs)])


def _can_begin(step: Step) -> bool:
    """Whether the next token follows from a step's outputs. Inputs that are not counted are taken to stay the same."""
    logits = step.outputs.get("logits") if isinstance(step.outputs, Mapping) else None
    return isinstance(logits, torch.Tensor) and logits.dim() == 3 and len(logits) == len(step.inputs["input_ids"])
