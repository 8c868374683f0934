"""The loop of `python -m cute_kernels tune` with a made-up timer: what is kept, what is left out, how it is resumed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import __main__ as command_line
from cute_kernels.gemm.reference import linear_reference
from cute_kernels.gemm.tuning import command, linear
from cute_kernels.gemm.tuning.tuner import Step, measure, tune
from cute_kernels.runtime.tuned import Choice, TunedTable
from tests.launchers import RecordingCache, recording


@dataclass
class Fake:
    """Candidates that take ``times`` microseconds; those of None compute something else."""

    key: str
    times: list[float | None]
    names: Sequence[tuple[str, str, int]] = field(init=False)

    def __post_init__(self):
        self.names = [("kernel", f"config{i}", i) for i in range(len(self.times))]

    def calls(self) -> list[Callable[[], object] | None]:
        return [None if time is None else (lambda time=time: time) for time in self.times]


def timer(calls: Sequence[Callable[[], Any]]) -> list[float]:
    return [call() for call in calls]


@pytest.mark.parametrize(
    "times, config, us",
    [
        ([10.0, 9.0, 8.0], "config2", 8.0),
        ([10.0, 9.9, 9.85], "config0", 10.0),  # no more than times vary
        ([10.0, None, 12.0], "config0", 10.0),
        ([10.0, None, 5.0], "config2", 5.0),
        ([10.0], "config0", 10.0),
    ],
)
def test_the_fastest_of_the_right_ones_is_kept(times, config, us):
    choice, refused = measure(Fake("a", times), timer)
    assert (choice.config, choice.us, choice.model_us) == (config, us, 10.0)
    assert refused == times.count(None)


def test_what_was_lucky_once_is_measured_again():
    """The best of the first round, and the model's choice, meet in a second one, which decides."""
    rounds: list[list[float]] = []

    def lucky(calls: Sequence[Callable[[], Any]]) -> list[float]:
        rounds.append([call() for call in calls])
        return [8.0 if time == 10.1 and len(rounds) == 1 else time for time in rounds[-1]]

    choice, _ = measure(Fake("a", [10.0, 9.5, 10.1, 9.0, 12.0, 11.0]), lucky)
    assert rounds == [[10.0, 9.5, 10.1, 9.0, 12.0, 11.0], [10.0, 10.1, 9.0, 9.5]]
    assert (choice.config, choice.us, choice.model_us) == ("config3", 9.0, 10.0)


def test_each_problem_is_written_when_it_is_measured_and_not_measured_again(tmp_path: Path):
    path, table = tmp_path / "deep" / "table.json", TunedTable("gpu", "1")
    calls = 0

    def stops_at_the_third(calls_now: Sequence[Callable[[], Any]]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 6:  # the second of two rounds of a problem
            raise KeyboardInterrupt
        return timer(calls_now)

    subjects = [Fake(name, [2.0, 1.0]) for name in "abcd"]
    with pytest.raises(KeyboardInterrupt):
        tune(subjects, table, path, stops_at_the_third)
    assert set(TunedTable.read(path).entries) == {"a", "b"}
    steps: list[Step] = []
    tune(subjects, TunedTable.read(path), path, timer, progress=steps.append)
    assert [(step.done, step.total, step.key, step.choice is None) for step in steps] == [
        (1, 4, "a", True),
        (2, 4, "b", True),
        (3, 4, "c", False),
        (4, 4, "d", False),
    ]
    assert set(TunedTable.read(path).entries) == set("abcd") and not list(path.parent.glob("*.tmp"))
    tune([Fake("a", [2.0, 0.5])], table, path, timer, again=True)
    assert TunedTable.read(path).entries["a"].us == 0.5


@pytest.mark.parametrize("bits, group_size, zero_point, dtype", [(4, 128, False, "bf16"), (8, 0, True, "fp16")])
def test_made_up_weights_are_weights_of_the_problem(bits, group_size, zero_point, dtype):
    problem = linear.Format(bits, group_size, zero_point, dtype).problem(3, 100, 200)
    weights = linear.Weights("cpu")
    weight = weights.of(problem)
    assert weight.shape == (100, 200) and weights.of(problem) is weight
    x = torch.randn(3, 200).to(weight.dtype)
    size = linear_reference(x, weight).float().pow(2).mean().sqrt()
    assert 0.1 < size < 4
    assert weights.of(linear.Format(bits).problem(3, 64, 64)) is not weight


class Machine:
    """Stands for what launches: candidate i writes x W^T, wrong where it is to be; the i-th takes ``times[i]``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: set[int], times: Callable[[int], float]):
        self.times = times
        monkeypatch.setattr(linear.LinearSubject, "plan", lambda subject, candidate, device: candidate)
        monkeypatch.setattr(linear, "_run", self._run)
        self.wrong, self.seen = wrong, {}

    def _run(self, candidate, x, addresses, n, out_kind, kept) -> int:
        out, weight = kept
        index = self.seen.setdefault(candidate.name, len(self.seen))
        out.copy_(linear_reference(x, weight))
        if index in self.wrong:
            out[0] += 1.0
        return index

    def timer(self) -> Callable[[Sequence[Callable[[], Any]]], list[float]]:
        return lambda calls: [self.times(call()) for call in calls]


@pytest.fixture
def gpu() -> Iterator[RecordingCache]:
    """What `python -m cute_kernels tune` sees of a GPU that is not there."""
    with recording() as recorded:
        yield recorded


def arguments(*words: str) -> argparse.Namespace:
    return command_line.parser().parse_args(["tune", *words])


def test_the_command_measures_what_it_is_asked_for(monkeypatch, gpu: RecordingCache, tmp_path: Path, capsys):
    machine = Machine(monkeypatch, wrong={2}, times=lambda index: 5.0 if index == 2 else 10.0 - index)
    path = tmp_path / "table.json"
    given = arguments("--shape", "256x512", "--rows", "4", "--format", "w4g128", "-o", str(path))
    assert command.run(given, lambda _: None, machine.timer) == 0
    table = TunedTable.read(path)
    (key,) = table.entries
    assert key == "linear w4_bf16_g128 n256 k512 m4 sms132" and table.gpu == "NVIDIA Test GPU"
    choice = table.entries[key]
    assert (choice.kernel, choice.config, choice.cut) != list(machine.seen)[2]
    assert choice.us < choice.model_us == 10.0
    assert gpu.loaded and "1 candidates computed something else" in capsys.readouterr().out
    assert command.run(given, lambda _: None, machine.timer) == 0
    assert "known" in capsys.readouterr().out


def test_an_interrupted_command_says_what_it_keeps(monkeypatch, gpu: RecordingCache, tmp_path: Path, capsys):
    Machine(monkeypatch, wrong=set(), times=lambda index: 1.0)

    def make_timer():
        def stop(calls):
            raise KeyboardInterrupt

        return stop

    given = arguments("--shape", "64x64", "--rows", "1", "-o", str(tmp_path / "table.json"))
    assert command.run(given, lambda _: None, make_timer) == command.INTERRUPTED
    assert "keeps 0 problems" in capsys.readouterr().out and gpu.loaded


@pytest.mark.usefixtures("gpu")
def test_a_table_of_another_gpu_is_begun_anew(monkeypatch, tmp_path: Path, capsys):
    machine, path = Machine(monkeypatch, wrong=set(), times=float), tmp_path / "table.json"
    TunedTable("NVIDIA Other", None, {"a": Choice("k", "c", 1, 1.0, 1.0)}).write(path)
    given = arguments("--shape", "64x64", "--rows", "1", "-o", str(path))
    assert command.run(given, lambda _: None, machine.timer) == 0
    assert "was measured on NVIDIA Other" in capsys.readouterr().out
    assert "a" not in TunedTable.read(path).entries


@pytest.mark.parametrize("words", [["--shape", "12"], ["--rows", "0"], ["--format", "w3g128"], ["--format", "w4g48"]])
def test_bad_arguments_are_named(words, capsys):
    with pytest.raises(SystemExit):
        arguments(*words)
    assert f"argument {words[0]}: got '{words[1]}'" in capsys.readouterr().err


def test_steps_are_said_once_a_second_where_nobody_watches(capsys):
    now = [0.0]
    show = command.ShowSteps(lambda: now[0])
    for done in range(1, 8):
        show(Step(done, 7, f"problem{done}", None, refused=int(done == 3)))
        now[0] += 0.4
    said = capsys.readouterr().out
    assert [done for done in range(1, 8) if f"problem{done} " in said] == [1, 3, 6, 7]


def test_formats_are_read():
    assert command.weight_format("w4g128") == linear.Format()
    assert command.weight_format("w8gchannelz-fp16") == linear.Format(8, 0, True, "fp16")
    for form in (linear.Format(), linear.Format(8, 0, True, "fp16")):
        assert command.weight_format(form.name) == form


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert command_line.main(["tune"]) == 1
    assert "error: no GPU: torch" in capsys.readouterr().err
