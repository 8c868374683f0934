"""Begins the decode step after the one that was asked for, before it is asked for.

Between two steps `generate` waits for the device, and then makes the next one's inputs on the host; the device is idle
meanwhile. In greedy decoding the device knows those inputs: the likeliest token, and the next position. So the next
step is begun at once, on a stream of its own. When `generate` asks for it, its inputs are compared with those that were
used. Only if they are equal are its outputs returned. Otherwise it is called back: its token is taken off the lengths,
its row is written anew, and the step runs as usual.

This costs the host little. A step that is recorded for such calls ends by making the next one's inputs, where it reads
them, and begins with a copy of its own on the host. So beginning the next one is one replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from cute_kernels.integrations.transformers.columns import Columns

if TYPE_CHECKING:
    from cute_kernels.integrations.transformers.graphs import Step
    from cute_kernels.integrations.transformers.inputs import StepInputs

_COUNTED = ("position_ids", "cache_position")
"""Inputs that are one more in the next step."""
_ALLOWED_MISSES, _STEPS_A_MISS = 1, 8
"""Steps that may be called back, at first and for so many that were not, before none is begun any more."""


Copies: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(copy, what is copied)."""


class Lane:
    """A stream besides the current one. On a CPU all is done in order, and nothing is waited for.

    Within ``with lane:`` work goes to the lane, as within `torch.cuda.stream`; the current stream is looked up once.

    Attributes:
        outside: the stream that was the current one when the lane was entered last; None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.outside: torch.cuda.Stream | None = None
        self._on_device = torch.cuda.device(device) if self.stream is not None else nullcontext()
        self._moment = torch.cuda.Event() if self.stream is not None else None

    def __enter__(self) -> None:
        self._on_device.__enter__()
        if self.stream is not None:
            self.outside = torch.cuda.current_stream()
            torch.cuda.set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.outside is not None:
            torch.cuda.set_stream(self.outside)
        self._on_device.__exit__(*error)

    def follow(self) -> None:
        """Makes the lane wait for the current stream's work."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def mark(self) -> None:
        """Marks a moment of the lane: all work so far."""
        if self._moment is not None:
            self._moment.record(self.stream)

    def wait(self) -> None:
        """Makes the current stream wait for the moment that was marked last."""
        if self.stream is not None and self._moment is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self._moment)


class NextInputs:
    """The end of a recorded step: makes the next one's inputs of its outputs, in the same place.

    Args:
        inputs: the step's. Those that are not counted are taken to stay the same.

    Attributes:
        last: int64 [batch, 1]: what a request is given at every step; -1: what it chooses.
    """

    @torch.inference_mode(False)  # what a call in inference mode makes, another one may write
    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self.last = torch.full_like(inputs.tensors["input_ids"], -1)

    def make(self, logits: torch.Tensor) -> None:
        """Makes the next step's inputs. logits: [batch, tokens, vocabulary], of the step."""
        given = self.inputs.tensors
        chosen = logits[:, -1].argmax(-1, keepdim=True)
        given["input_ids"].copy_(torch.where(self.last < 0, chosen, self.last))
        for name in _COUNTED:
            if name in given:
                given[name].add_(1)


@dataclass
class Begun:
    """A step in flight that has not been asked for yet; it reads the recorded step's inputs, and fills its outputs.

    Attributes:
        step: the recorded step. lane: where it runs. of: the call that it was begun for.
    """

    step: Step
    lane: Lane
    of: Lookahead

    def call_back(self, columns: Columns) -> None:
        """Forgets the step. Its row is after the lengths then, as if it had never been written."""
        self.of.missed += 1
        self.lane.mark()
        self.lane.wait()
        columns.seq_lens.sub_(1)


class Lookahead:
    """The steps of one call of `generate`.

    Args:
        limit: columns that the call will come to, so that nothing is begun after its last step.

    Attributes:
        taken: steps that had been begun when they were asked for.
        missed: steps that were called back.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.missed = 0
        self._lane: Lane | None = None
        self._next: NextInputs | None = None
        self._missed: tuple[torch.Tensor, torch.Tensor] | None = None  # tokens that were given, and those foreseen

    def take(self, step: Step, columns: Columns, given: Mapping[str, torch.Tensor]) -> bool:
        """Whether this step was begun with these inputs; if so, it is not called back any more. Waits for the device
        until it is known."""
        begun = columns.begun
        if not isinstance(begun, Begun) or begun.step is not step or begun.of is not self:
            return False
        if not step.inputs.are(given):
            self._missed = step.inputs.asked("input_ids").clone(), step.inputs.noted("input_ids").clone()
            return False
        columns.begun = None
        self.taken += 1
        return True

    def place(self, following: NextInputs) -> None:
        """Sets the inputs that a step derives the next step's from, before it is replayed in order.

        A request that has ended gets the same token from then on, not the model's.
        """
        missed, self._missed = self._missed, None
        if self._next is not following:
            self._next = following
            following.last.fill_(-1)
        elif missed is not None:
            given, foreseen = missed
            last = following.last.cpu()
            following.last.copy_(torch.where(given == foreseen, last, torch.where(last < 0, given, -1)))

    def go_on(self, step: Step, columns: Columns, copies: Copies = ()) -> None:
        """Begins the step after this one, which is counted, if it can be and is likely to be asked for.

        copies: of the outputs of a step that was taken, which the lane makes and the next step overwrites; none of a
            step that the current stream has run.
        """
        begins = self._begins(step, columns)
        if not begins and not copies:
            return
        if self._lane is None:
            self._lane = Lane(columns.seq_lens.device)
        lane = self._lane
        if not copies:
            lane.follow()
        with lane:
            for copy, value in copies:
                copy.copy_(value)
            if begins:
                columns.place_before()
                step.recorded.replay()
            else:
                lane.mark()
        if begins:
            step.inputs.wait(lane.outside)  # and so for what the lane was given before the step
            columns.begun = Begun(step, lane, self)
        else:
            lane.wait()

    def _begins(self, step: Step, columns: Columns) -> bool:
        """Whether the step after this one is begun."""
        if columns.count + 1 >= min(self.limit, columns.capacity + 1) or step.following is None:
            return False
        return self.missed <= _ALLOWED_MISSES + self.taken // _STEPS_A_MISS


def chosen_from(outputs: object, inputs: StepInputs) -> torch.Tensor | None:
    """The logits that the next token follows from, [batch, tokens, vocabulary]; None for outputs that have none."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if isinstance(logits, torch.Tensor) and logits.dim() == 3 and len(logits) == len(inputs.tensors["input_ids"]):
        return logits
    return None
