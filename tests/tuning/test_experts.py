"""Layers of experts in `python -m cute_kernels tune`: what is measured of them, with plans that compute on the CPU."""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels import __main__ as command_line
from cute_kernels.gemm.config import NO_ACTIVATION, SWIGLU
from cute_kernels.gemm.experts.compile import MODELS
from cute_kernels.gemm.experts.reference import grouped_linear_reference
from cute_kernels.gemm.experts.tuned import RANGES, GroupedCandidate
from cute_kernels.gemm.plan import OUT_KINDS
from cute_kernels.gemm.tuned import FEW, MANY
from cute_kernels.gemm.tuning import command, experts
from cute_kernels.gemm.tuning.experts import Experts, ExpertsSubject, random_routing
from cute_kernels.gemm.tuning.linear import Format
from cute_kernels.runtime.tuned import TunedTable
from tests.launchers import recording

LAYER = 4, 2, 128, 192


def subjects(*tokens: int, form: Format | None = None) -> list[ExpertsSubject]:
    return experts.subjects([LAYER], tokens, [form or Format()], 132, Experts("cpu"))


def ints(address: int, count: int) -> torch.Tensor:
    return torch.tensor((ctypes.c_int32 * count).from_address(address)[:], dtype=torch.int32)


@dataclass
class CpuPlan:
    """Stands for a `ProductPlan`: computes what its kernel would, from the same numbers and addresses."""

    machine: Machine
    subject: ExpertsSubject
    candidate: GroupedCandidate

    @property
    def gathers(self) -> bool:
        return self.candidate.kernel in (FEW, RANGES) or getattr(self.candidate.schedule.config, "limbs", False)

    @property
    def stores_fp32(self) -> bool:
        return self.candidate.kernel in (FEW, RANGES)

    def run(self, x, addresses, places, numbers) -> None:
        subject = self.subject
        problem, weight = subject.problem, subject.experts.of(subject.problem)
        n, activation, out_kind = numbers
        assert (n, activation) == (problem.n, SWIGLU if subject.is_first else NO_ACTIVATION)
        assert addresses[:2] == (weight.codes.data_ptr(), weight.scales.data_ptr()) and addresses[3] == 0
        offsets = ints(places[0], problem.num_experts + 1)
        rows = ints(places[1], problem.places) if places[1] else None
        assert (rows is None) == (not subject.is_first or not self.gathers)
        dtype = next(dtype for dtype, kind in OUT_KINDS.items() if kind == out_kind)
        kind = "swiglu" if subject.is_first else None
        result = grouped_linear_reference(
            x[:, : problem.k], weight, offsets, rows=rows, activation=kind, out_dtype=dtype
        )
        if self.candidate.name in self.machine.wrong:
            result = result * 1.1
        self.machine.seen.append((self.candidate.name, result.dtype))
        ctypes.memmove(addresses[4], result.contiguous().data_ptr(), result.nbytes)


class Machine:
    """Stands for a GPU; ``wrong`` are names of candidates that compute something else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.wrong: set[Any] = set()
        self.seen: list[Any] = []
        self.brought: list[int] = []
        monkeypatch.setattr(experts, "launch_gather", self._gather)
        monkeypatch.setattr(ExpertsSubject, "plan", lambda subject, one, device: CpuPlan(self, subject, one))

    def _gather(self, x, offsets, rows):
        self.brought.append(int(offsets[-1]))
        return x[rows.long()]


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


def test_both_products_of_a_layer_are_subjects():
    found = subjects(1, 16)
    assert [(one.key, one.is_first) for one in found] == [
        ("experts w4_bf16_g128 e4 n384 k128 p2 sms132", True),
        ("experts w4_bf16_g128 e4 n384 k128 p32 sms132", True),
        ("experts w4_bf16_g128 e4 n128 k192 p2 sms132", False),
        ("experts w4_bf16_g128 e4 n128 k192 p32 sms132", False),
    ]
    assert found[2].problem.k_pad == 256
    assert experts.LAYERS == MODELS, "what ships is what is tuned by default"


@pytest.mark.parametrize("form", [Format(), Format(8, 0, True, "fp16")])
@pytest.mark.parametrize("tokens", [1, 24])
def test_candidates_of_all_kernels_agree(machine, tokens, form):
    """Rows by index reach kernels of few rows as they are, and the other one in order; results in fp32 stay so."""
    for subject in subjects(tokens, form=form):
        kernels = {one.kernel for one in subject.candidates}
        calls = subject.calls()
        assert (
            kernels == {FEW, MANY} | ({RANGES} if form == Format() else set())
            and len(calls) == len(subject.names)
            and None not in calls
        )
    kinds = {(name[0] != MANY, dtype) for name, dtype in machine.seen}
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[form.dtype]
    assert kinds == {(True, dtype), (False, dtype), (True, torch.float32)}
    assert set(machine.brought) == {2 * tokens}


def test_a_candidate_that_computes_something_else_is_left_out(machine):
    (subject, _) = subjects(5)
    machine.wrong = set(subject.names[1:2])
    calls = subject.calls()
    assert calls[1] is None and calls.count(None) == 1


def test_routing_is_random_and_complete():
    problem = subjects(50)[0].problem
    routing = random_routing(problem, 2, "cpu")
    counts = routing.offsets.diff()
    assert routing.offsets[0] == 0 and routing.offsets[-1] == 100 and routing.offsets.dtype == torch.int32
    assert counts.min() > 10 and counts.max() < 40
    assert routing.rows is not None and torch.equal(routing.rows.bincount(), torch.full((50,), 2))
    for expert in range(4):
        rows = routing.rows[routing.offsets[expert] : routing.offsets[expert + 1]]
        assert rows.unique().numel() == rows.numel(), "a token chooses an expert once"


def test_weights_are_made_once_for_a_product():
    first, more, second, _ = subjects(1, 16)
    weight = first.experts.of(first.problem)
    assert weight.shape == (384, 128) and len(weight) == 4
    assert first.experts.of(more.problem) is weight and first.experts.of(second.problem) is not weight


def arguments(*words: str) -> argparse.Namespace:
    return command_line.parser().parse_args(["tune", *words])


def test_the_command_writes_a_table_of_experts(machine, tmp_path: Path, capsys):
    path = tmp_path / "table.json"
    given = arguments("--experts", "4x2x128x192", "--rows", "1,16", "-o", str(path))

    def timer(calls) -> list[float]:
        """The later, the faster."""
        for call in calls:
            call()
        return [100.0 / (1 + index) for index in range(len(calls))]

    with recording() as recorded:
        assert command.run(given, lambda _: None, lambda: timer) == 0
    table = TunedTable.read(path)
    assert set(table.entries) == {one.key for one in subjects(1, 16)}
    for subject in subjects(1, 16):
        entry = table.entries[subject.key]
        assert (entry.kernel, entry.config, entry.cut) in subject.names[1:] and entry.us < entry.model_us
        assert set(subject.specs()) <= {spec for spec, _ in recorded.loaded}
    assert "[4/4] experts w4_bf16_g128" in capsys.readouterr().out
    machine.seen.clear()
    with recording():
        assert command.run(given, lambda _: None, lambda: timer) == 0
    assert not machine.seen, "what the table has is not measured again"


def test_what_is_asked_for_is_measured_and_all_if_nothing_is():
    def kinds(*words: str) -> set[str]:
        return {one.key.split()[0] for one in command.subjects_of(arguments(*words), 132, "cpu")}

    assert kinds() == {"linear", "experts"}
    assert kinds("--shape", "64x64") == {"linear"} and kinds("--experts", "8x2x64x64") == {"experts"}
    assert kinds("--shape", "64x64", "--experts", "8x2x64x64") == {"linear", "experts"}


@pytest.mark.parametrize("text", ["8x2x64", "8x9x64x64", "513x8x64x64", "8x0x64x64"])
def test_bad_layers_are_named(text, capsys):
    with pytest.raises(SystemExit):
        arguments("--experts", text)
    assert f"argument --experts: got '{text}'" in capsys.readouterr().err
