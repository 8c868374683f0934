"""A mixed load: what arrives when, and what is measured of it. The engine and its clock are stand-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench import e2e_mixed
from bench.e2e_mixed import Arrival


class Engine:
    """Takes a second for a step, and gives each request in it a token, of three."""

    def __init__(self) -> None:
        self.now, self.tokens, self.added = 0.0, dict[str, int](), dict[str, float]()

    def add(self, name: str, prompt: Sequence[int]) -> None:
        self.tokens[name], self.added[name] = len(prompt), self.now

    def step(self) -> Mapping[str, bool]:
        self.now += 1
        self.tokens = {name: left - 1 for name, left in self.tokens.items() if left > 0}
        return {name: left == 0 for name, left in self.tokens.items()}

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_requests_are_added_when_they_arrive_and_waits_count_from_then_on():
    engine = Engine()
    load = [Arrival(0.0, [1] * 2), Arrival(0.5, [1] * 2), Arrival(10.0, [1])]
    found = e2e_mixed.serve(engine, load, lambda: engine.now, engine.sleep)
    assert engine.added == {"0": 0.0, "1": 1.0, "2": 10.0}
    assert list(found.first_token_s) == [1.0, 1.5, 1.0] and found.seconds == 11.0
    assert found.waited(0.5) == 1.0 and found.waited(0.99) == 1.5


def test_a_load_is_the_same_for_every_engine_and_its_prompts_differ():
    load = e2e_mixed.arrivals(8192)
    lengths = [len(arrival.prompt) for arrival in load]
    assert load == e2e_mixed.arrivals(8192) != e2e_mixed.arrivals(8192, seed=1)
    assert len(load) == 64 and min(lengths) >= 1024 and max(lengths) <= 8192 and max(lengths) > 2 * min(lengths)
    times = [arrival.after_s for arrival in load]
    assert times == sorted(times) and times[0] == 0 and 3 < times[-1] < 12
