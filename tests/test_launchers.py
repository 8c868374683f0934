"""Launches are compared in an order that finds every pair of calls of which one is served by the other's plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.launchers import assert_launched_alike_after_any_other

ROUNDS = 300
CALLS = {f"call {number}": number for number in range(12)}


class Launcher:
    """Keeps plans by a key that may tell too few calls apart.

    Attributes:
        key: of a call, what its plan is kept by. refused: calls that a plan's making refuses.
        served: of the call that a plan was made for and the one that it serves, what is launched.
    """

    def __init__(self, draw: random.Random) -> None:
        self.plans: dict[int, int] = {}
        kinds = draw.randint(4, 40)
        self.key = {number: draw.randrange(kinds) for number in CALLS.values()}
        self.refused = {number for number in CALLS.values() if draw.random() < 0.2}
        right = draw.choice([0.5, 0.97, 1.0])  # of plans for calls that another one's plan serves
        self.served = {
            (maker, call): call if draw.random() < right or maker == call else -1
            for maker in CALLS.values()
            for call in CALLS.values()
        }

    def launch(self, name: str) -> Any:
        call = CALLS[name]
        maker = self.plans.get(self.key[call])
        if maker is None:
            if call in self.refused:
                return "refused", call
            maker = self.plans[self.key[call]] = call
        return self.served[maker, call]


def fails(check: Callable[[Launcher], Any], launcher: Launcher) -> bool:
    try:
        check(launcher)
    except AssertionError:
        return True
    return False


def after_each_other(launcher: Launcher) -> None:
    """Every pair of calls by itself."""
    for name in CALLS:
        launcher.plans.clear()
        want = launcher.launch(name)
        for other in CALLS:
            launcher.plans.clear()
            launcher.launch(other)
            assert launcher.launch(name) == want


def in_few_passes(launcher: Launcher) -> dict[str, Any]:
    return assert_launched_alike_after_any_other(CALLS, launcher.launch, launcher.plans)


def test_what_no_pair_of_calls_shows_is_shown_by_no_other_order_and_the_reverse():
    found = [0, 0]
    for seed in range(ROUNDS):
        launcher = Launcher(random.Random(seed))
        wrong = fails(after_each_other, launcher)
        assert fails(in_few_passes, launcher) == wrong, seed
        found[wrong] += 1
    assert min(found) > ROUNDS // 10, "launchers of both kinds"


def test_each_pair_that_differs_is_named():
    launcher = Launcher(random.Random(0))
    launcher.key = dict.fromkeys(CALLS.values(), 0) | {3: 1}
    launcher.refused, launcher.served = {5}, {(a, b): a for a in CALLS.values() for b in CALLS.values()}
    with pytest.raises(AssertionError, match="'call 5' after 'call 2'") as error:
        in_few_passes(launcher)
    assert "'call 3'" not in str(error.value)


def test_what_each_call_launches_comes_back():
    launcher = Launcher(random.Random(0))
    launcher.key, launcher.refused = {number: number for number in CALLS.values()}, {5}
    assert in_few_passes(launcher) == CALLS | {"call 5": ("refused", 5)}
