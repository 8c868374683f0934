"""A mixed load of an engine: requests with prompts of several lengths that arrive while others are served.

Lengths and times of arrival are drawn once, so that engines are compared by the same load. It takes about 12 s.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

REQUESTS = 64
NEW_TOKENS = 256  # of a request
SECONDS_APART = 0.1  # on average


@dataclass(frozen=True)
class Arrival:
    """A request's prompt, and when it arrives after the load has begun."""

    after_s: float
    prompt: Sequence[int]


def arrivals(context: int, seed: int = 0) -> list[Arrival]:
    """REQUESTS of prompts of context / 8 to context tokens, at random times."""
    draw, now, found = random.Random(seed), 0.0, []
    for _ in range(REQUESTS):
        prompt = [draw.randrange(5, 4000) for _ in range(draw.randint(context // 8, context))]
        found.append(Arrival(now, prompt))
        now += draw.expovariate(1 / SECONDS_APART)
    return found


class Engine(Protocol):
    """An engine that is stepped."""

    def add(self, name: str, prompt: Sequence[int]) -> None: ...

    def step(self) -> Mapping[str, bool]:
        """Returns of each request that the step gave tokens whether it has all."""
        ...


@dataclass(frozen=True)
class Load:
    """What was measured of a load: how long all of it took, and each request waited for its first token."""

    seconds: float
    first_token_s: Sequence[float]

    def waited(self, share: float) -> float:
        """The longest that this share of the requests waited."""
        return sorted(self.first_token_s)[min(int(share * len(self.first_token_s)), len(self.first_token_s) - 1)]


def serve(
    engine: Engine,
    load: Sequence[Arrival],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Load:
    """Serves a load, each request from its arrival on."""
    begin, waiting, first, open_requests = clock(), list(enumerate(load)), dict[str, float](), set[str]()
    while waiting or open_requests:
        while waiting and waiting[0][1].after_s <= clock() - begin:
            number, arrival = waiting.pop(0)
            engine.add(str(number), arrival.prompt)
            open_requests.add(str(number))
        if not open_requests:
            sleep(max(waiting[0][1].after_s - (clock() - begin), 0))
            continue
        for name, is_done in engine.step().items():
            first.setdefault(name, clock() - begin - load[int(name)].after_s)
            open_requests -= {name} if is_done else set()
    return Load(clock() - begin, list(first.values()))


def greedy(tokens: int) -> Any:
    """vLLM's sampling of so many tokens."""
    import vllm

    return vllm.SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0.0)


@dataclass
class MixedLoad:
    """What was measured of a load that vLLM served, in seconds, as `bench.e2e_vllm` has it of a batch.

    Attributes:
        cold, hit: the 99th percentile and the median of waits for a first token.
        per_token: the time in which as many tokens come as there are requests. turns: of each load.
    """

    llm: Any
    prompts: Sequence[Arrival]
    cold: float = 0.0
    hit: float = 0.0
    per_token: float = math.inf
    turns: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Serves the load, of which nothing is in the cache, and keeps what was measured if it took less time."""
        self.llm.reset_prefix_cache()
        found = serve(VllmEngine(self.llm.llm_engine, greedy(NEW_TOKENS)), self.prompts)
        self.turns.append(found.seconds / NEW_TOKENS)
        if found.seconds < self.per_token * NEW_TOKENS:
            self.per_token = found.seconds / NEW_TOKENS
            self.cold, self.hit = found.waited(0.99), found.waited(0.5)


@dataclass
class VllmEngine:
    """vLLM's engine in this process. sampling: of every request."""

    engine: Any
    sampling: Any

    def add(self, name: str, prompt: Sequence[int]) -> None:
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, self.sampling)

    def step(self) -> Mapping[str, bool]:
        outputs = self.engine.step()
        return {output.request_id: output.finished for output in outputs if output.outputs[0].token_ids}
