"""The loop over problems: what has been measured stays, whatever comes after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cute_kernels.runtime.tuned import Choice, TunedTable

Timer = Callable[[Sequence[Callable[[], object]]], list[float]]
"""Microseconds of each of some calls, measured in turn."""

FINALISTS = 3  # that are measured again, beside the model's choice: of many, the first round's best is partly luck
MARGIN = 0.98  # what something must take, at most, of the model's choice to be worth an entry of its own


class Subject(Protocol):
    """A problem to be tuned for."""

    @property
    def key(self) -> str:
        """Its name in tables."""
        ...

    @property
    def names(self) -> Sequence[tuple[str, str, int]]:
        """(kernel, configuration, cut) of each candidate; the first is what is taken without a table."""
        ...

    def calls(self) -> list[Callable[[], object] | None]:
        """Each candidate as a call; None for one whose results are not those of the first."""
        ...


@dataclass(frozen=True)
class Step:
    """A problem is done: ``done`` of ``total``. choice is None if it had been measured before.

    Attributes:
        refused: candidates whose results were not those of the first.
    """

    done: int
    total: int
    key: str
    choice: Choice | None
    refused: int = 0


def tune(
    subjects: Iterable[Subject],
    table: TunedTable,
    path: Path,
    timer: Timer,
    *,
    again: bool = False,
    progress: Callable[[Step], None] | None = None,
) -> TunedTable:
    """Measures the candidates of each subject, and writes the table after each.

    Args:
        table: what is known; its entries are kept, and not measured again unless ``again``.
        path: of the file.

    Returns:
        ``table`` with the new entries.
    """
    subjects = list(subjects)
    for done, subject in enumerate(subjects, 1):
        step = Step(done, len(subjects), subject.key, None)
        if again or subject.key not in table.entries:
            choice, refused = measure(subject, timer)
            table.entries[subject.key] = choice
            table.write(path)
            step = Step(done, len(subjects), subject.key, choice, refused)
        if progress is not None:
            progress(step)
    return table


def measure(subject: Subject, timer: Timer) -> tuple[Choice, int]:
    """The fastest candidate whose results are right, and how many others were not.

    What is taken without a table stays unless another is faster by more than times vary, in a second round of the best.
    """
    calls = subject.calls()
    if calls[0] is None:
        raise RuntimeError(f"{subject.key}: the first candidate differs from itself")
    right = [(name, call) for name, call in zip(subject.names, calls, strict=True) if call is not None]
    times = timer([call for _, call in right])
    order = sorted(range(1, len(right)), key=times.__getitem__)
    finalists = [right[0], *(right[index] for index in order[:FINALISTS])]
    if len(finalists) > 1:
        times = timer([call for _, call in finalists])
    best = min(range(len(finalists)), key=times.__getitem__)
    if times[best] > MARGIN * times[0]:
        best = 0
    choice = Choice(*finalists[best][0], us=round(times[best], 2), model_us=round(times[0], 2))
    return choice, len(calls) - len(right)
