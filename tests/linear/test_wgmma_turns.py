"""Warpgroups that take the units of a tile in turn: which stages they wait for, multiply and give back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cute_kernels.device import ring
from cute_kernels.linear.wgmma import kernel
from cute_kernels.linear.wgmma.config import WgmmaConfig

PUSHED = WgmmaConfig(
    4, "bf16", 128, tokens=16, unit_k=128, num_stages=6, splits_k=True, cluster=2, pushes=True, turns=2
)


@pytest.fixture
def stepping(monkeypatch) -> list[tuple[int, int]]:
    """The kernel's loops in plain Python, and what they wait for: (stage, parity)."""
    waited: list[tuple[int, int]] = []
    wait = SimpleNamespace(mbarrier_wait=lambda stage, phase: waited.append((stage, phase)))
    monkeypatch.setattr(kernel, "cute", SimpleNamespace(arch=wait))
    loops = SimpleNamespace(
        range=lambda begin, end, step, unroll: range(begin, end, step), select_=lambda which, a, b: a if which else b
    )
    monkeypatch.setattr(kernel, "cutlass", loops)
    monkeypatch.setattr(ring, "cutlass", loops)
    monkeypatch.setattr(kernel, "Int32", int)
    return waited


@pytest.mark.parametrize("begin, units", [(0, 1), (3, 2), (0, 7), (8, 31), (5, 64)])
@pytest.mark.parametrize("turns, stages", [(2, 4), (2, 6), (3, 6), (3, 12), (4, 8), (4, 12)])
def test_every_unit_is_multiplied_once_and_given_back_once(begin: int, units: int, turns: int, stages: int, stepping):
    config = replace(PUSHED, turns=turns, warpgroups=turns, num_stages=stages)
    taken: list[int] = []
    for group in range(turns):
        subject: Any = kernel.WgmmaKernel(config)
        log: list[tuple[int, int, bool]] = []
        subject.multiply_unit = lambda sums, memory, stage, place, channel, last, teller, tokens, log=log: log.append(
            (stage, last, bool(teller))
        )
        turn = subject.turn(group)
        item = SimpleNamespace(begin=begin, end=begin + units)
        place, memory = SimpleNamespace(turn=turn), SimpleNamespace(full=0)
        multiply = kernel.WgmmaKernel.multiply_each.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        stepping.clear()
        ring = (turn, 0, 0)
        _, _, last = multiply(subject, None, memory, item, place, [], ring, True, config.tokens)
        own = range(turn, units, turns)
        assert stepping == [(unit % stages, unit // stages % 2) for unit in own]
        assert [at for at, _, _ in log] == [unit % stages for unit in own]
        # Each unit's stage is given back under the products of the next one of the turn, the last one's behind all.
        assert [at for _, at, told in log if told] == [unit % stages for unit in own[:-1]]
        assert last == own[-1] % stages if own else not log
        taken += [begin + unit for unit in own]
    assert sorted(taken) == list(range(begin, begin + units))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"turns": 0}, "turns 0 is not one of 1, 2, 3, 4"),
        ({"warpgroups": 3}, "3 warpgroups are no multiple of 2 turns"),
        ({"num_stages": 5}, "num_stages 5 is no multiple of 2 turns"),
        ({"num_stages": 2}, "or less than two for each"),
        ({"pushes": False}, "where parts of K are pushed"),
        ({"digits": True}, "not in digits of a ring"),
    ],
)
def test_turns_that_cannot_be_had_are_refused(changes: dict[str, Any], message: str):
    assert PUSHED.can_implement() is None
    assert message in (replace(PUSHED, **changes).can_implement() or "")
