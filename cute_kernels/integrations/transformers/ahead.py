"""Decode steps that begin before `generate` asks for them.

Between two steps `generate` waits for the device, then makes the next step's inputs on the host, while the device is
idle. In greedy decoding the device knows these inputs: the likeliest token, and the next position. So the next step
begins at once, on a stream of its own.

When `generate` asks for the step, the inputs that it gives are compared with the inputs that the begun step used. If
they are equal, the begun step's outputs are returned. Otherwise the begun step is called back: its token is subtracted
from the lengths, and the requested step overwrites its row.

To begin a step early, the host only replays a graph. A step that is recorded for greedy calls first copies its inputs
to the host. At its end it writes the next step's inputs to the tensors from which the next step reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from cute_kernels.integrations.transformers.columns import Columns
from cute_kernels.integrations.transformers.inputs import StepInputs

_COUNTED = ("position_ids", "cache_position")
"""Inputs that grow by one from a step to the next."""
_ALLOWED_MISSES, _STEPS_A_MISS = 1, 8
"""Steps begin early while at most `_ALLOWED_MISSES` early steps were called back, plus one for every `_STEPS_A_MISS`
early steps that were used."""


Copies: TypeAlias = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of (copy, source)."""


class Lane:
    """A stream in addition to the current one. On a CPU, work runs in order and nothing waits.

    Within ``with lane:`` work goes to the lane, as within `torch.cuda.stream`; the current stream is looked up once, on
    entry.

    Attributes:
        outside: the current stream when the lane was last entered; None on a CPU.
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
        """Records the lane's event after all of its work so far."""
        if self._moment is not None:
            self._moment.record(self.stream)

    def wait(self) -> None:
        """Makes the current stream wait for the event that `mark` recorded last."""
        if self.stream is not None and self._moment is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self._moment)


class NextInputs:
    """The end of a recorded step, which writes the next step's inputs over the step's own.

    Args:
        inputs: the step's inputs. Only the token and the inputs in `_COUNTED` may change from step to step.

    Attributes:
        last: int64 [batch, 1], each request's fixed next token; -1: the likeliest token.
    """

    @torch.inference_mode(False)  # what a call in inference mode makes, another one may write
    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self.last = torch.full_like(inputs.tensors["input_ids"], -1)

    def make(self, logits: torch.Tensor) -> None:
        """Writes the next step's inputs. logits: [batch, tokens, vocabulary] of this step."""
        given = self.inputs.tensors
        chosen = logits[:, -1].argmax(-1, keepdim=True)
        given["input_ids"].copy_(torch.where(self.last < 0, chosen, self.last))
        for name in _COUNTED:
            if name in given:
                given[name].add_(1)


class Recorded(Protocol):
    """A recorded function without arguments. ``outputs`` is its result, which each replay overwrites."""

    outputs: object

    def replay(self) -> None: ...


@dataclass
class Step:
    """One recorded step: its inputs, the recording, and the end of the step that writes the next step's inputs.

    ``following`` is None if the step was recorded for calls that begin no step early, or if its outputs have no logits.
    """

    inputs: StepInputs
    recorded: Recorded
    following: NextInputs | None = None


@dataclass
class Begun:
    """A step in flight that `generate` has not asked for yet. It reads the inputs of the recorded ``step`` and writes
    that step's outputs.

    Attributes:
        step: the recorded step.
        lane: the stream on which the step in flight runs.
        of: the call of `generate` that began it.
    """

    step: Step
    lane: Lane
    of: Lookahead

    def call_back(self, columns: Columns) -> None:
        """Discards the step. Its token is subtracted from the lengths, so its row will be overwritten. The current
        stream waits for the step.
        """
        self.of.missed += 1
        self.lane.mark()
        self.lane.wait()
        columns.seq_lens.sub_(1)


class Lookahead:
    """The steps of one call of `generate` that begin early.

    Args:
        limit: number of columns that the call will reach. No step begins early for a later column.

    Attributes:
        taken: number of steps that had begun when they were asked for.
        missed: number of steps that were called back.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self.missed = 0
        self._lane: Lane | None = None
        self._next: NextInputs | None = None
        self._missed: tuple[torch.Tensor, torch.Tensor] | None = None  # tokens that were given, and those foreseen

    def take(self, step: Step, columns: Columns, given: Mapping[str, torch.Tensor]) -> bool:
        """Returns whether ``step`` was begun early with the inputs ``given``. If so, the step is taken: it is counted,
        and can no longer be called back.

        Waits for the device until the inputs are known.
        """
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
        """Sets ``last`` of ``following``, the end of a step that is about to be replayed: the fixed token of each
        request that has ended.

        To a request that has ended `generate` gives a fixed token instead of the model's. A request counts as ended if
        the token that `generate` gave differs from the token with which the last early step began.
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
        """Begins the step after ``step`` early, if that is possible and `generate` is likely to ask for it. ``columns``
        already include the column of ``step``.

        copies: pairs of a tensor for a copy and an output of ``step``; empty if ``step`` ran on the current stream. If
        ``step`` began early, the next step would overwrite its outputs, so the stream of early steps fills the copies
        first.
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
        """Returns whether the step after ``step`` should begin early."""
        if columns.count + 1 >= min(self.limit, columns.capacity + 1) or step.following is None:
            return False
        return self.missed <= _ALLOWED_MISSES + self.taken // _STEPS_A_MISS


def chosen_from(outputs: object, inputs: StepInputs) -> torch.Tensor | None:
    """Returns the logits [batch, tokens, vocabulary] among a step's outputs; None for outputs without logits."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if isinstance(logits, torch.Tensor) and logits.dim() == 3 and len(logits) == len(inputs.tensors["input_ids"]):
        return logits
    return None
