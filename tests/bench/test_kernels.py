"""Kernels of benchmarks: those of calls are found without running them, compiled beforehand, and never in silence."""

from __future__ import annotations

import pytest

from bench import kernels, options
from bench.options import Option
from bench.timing import Clock, Timing, ticking
from bench.workloads import DecodeShape, make_inputs
from cute_kernels.formats.kv import FORMATS
from cute_kernels.runtime.cache import using
from tests.launchers import RecordingCache, recording

SHAPE = DecodeShape(2, seq_len=64, num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16)


@pytest.fixture
def recorded():
    with recording() as cache:
        yield cache


class Missing(RecordingCache):
    """Has no kernel but those it has loaded."""

    def __init__(self):
        super().__init__(lambda spec: lambda *arguments: None)

    def has(self, spec, arch):
        return (spec, arch) in self.loaded


def calls_of(kv_format="int4_g4"):
    inputs = make_inputs(SHAPE, kv_format, device="cpu")
    return [option.call for option in options.decode_options(inputs).values()]


@pytest.mark.parametrize("kv_format", ["bf16", "int4_g4", "e4m3_head"])
def test_kernels_of_calls_are_found_and_their_later_launches_are_real(kv_format, recorded):
    assert kv_format in FORMATS
    calls = calls_of(kv_format)
    found = kernels.needed_by(calls)
    assert not recorded.loaded and not recorded.launches
    for call in calls:
        call()
    assert found == list(dict.fromkeys(spec for spec, _ in recorded.loaded))
    assert len(found) > 5 and len(recorded.launches) >= len(calls)


def test_a_call_that_fails_leaves_no_plan_that_launches_nothing(recorded):
    first = calls_of()[0]
    with pytest.raises(ZeroDivisionError):
        kernels.needed_by([first, lambda: 1 // 0])
    first()
    assert len(recorded.launches) == 1


def test_what_is_missing_is_said_once():
    said: list[str] = []
    cache = Missing()
    with recording(), using(cache):
        specs = kernels.needed_by(calls_of())
        kernels.make_ready([*specs, *specs], said.append)
        assert [spec for spec, _ in cache.loaded] == specs
        assert said[0].startswith(f"compiling {len(specs)} of {len(specs)} kernels") and said[1].startswith("compiled")
        kernels.make_ready(specs, said.append)
    assert len(said) == 2


def test_no_kernels_need_no_gpu():
    kernels.make_ready(kernels.needed_by(calls_of()), pytest.fail)  # CPU tensors: the reference


def test_a_call_says_what_it_compiles_and_only_that():
    said: list[str] = []
    call, cache = calls_of()[0], Missing()
    with recording(), using(cache), kernels.told(said.append), kernels.told(said.append):
        call()
        call()
        assert said == [f"compiling {spec}" for spec, _ in cache.loaded] and len(said) == 1


def test_kernels_of_all_cases_are_compiled_before_any_is_checked_and_timed():
    """A case that cannot be made says so when its turn comes."""
    steps: list[str] = []

    def clock(calls, flush, protocol):
        steps.append("timed")
        return {name: Timing(1.0, 1.0, 1.0, 1) for name in calls}

    def make(shape, kv_format):
        if kv_format == "none":
            raise ValueError("no such format")
        return {"plain": Option(calls_of(kv_format)[0])}

    def attempt(what, work):
        try:
            work()
        except ValueError as error:
            steps.append(f"{what}: {error}")

    record: dict = {}
    recorder = type("Recorder", (), {"set": staticmethod(record.__setitem__)})
    functions = {"say": staticmethod(steps.append), "attempt": staticmethod(attempt), "recorder": recorder}
    bench = type("Bench", (), {"flush": None, "protocol": None, **functions})
    cases = [(SHAPE, name) for name in ("none", "bf16", "int4_g4")]
    with recording(), using(Missing()), ticking(Clock(clock, lambda call, warmup: call)):
        options.run_cases(bench, cases, make, lambda checked: steps.append("checked"))  # type: ignore[arg-type]
    assert steps[0].startswith("compiling 2 of 2") and steps[1].startswith("compiled")
    assert steps[2] == f"options: none {SHAPE.name}: no such format"
    assert steps[3:] == 2 * ["checked", *options.RUNS * ["timed"]]
    assert [row["kv_format"] for row in record["options"]] == ["bf16", "int4_g4"]
