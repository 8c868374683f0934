"""FlashMLA's own tests, unchanged, against this package: `python -m tests.gpu.flash_mla_suite CHECKOUT [COUNT]`.

CHECKOUT is a copy of deepseek-ai/FlashMLA of April 2026, of which only the folder tests is needed; nothing of it is
part of this repository. Its tests are scripts whose cases are lists in their code: here the lists are read out of
them, COUNT cases of each are drawn (all of them without COUNT), and the scripts' own functions generate, run and judge
them. `flash_mla` is :mod:`cute_kernels.compat.flash_mla`; what it names that is for other GPUs is missing. Their timer
looks for FlashMLA's kernels by name in a profile: CUDA events take its place.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import random
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import cute_kernels.compat.flash_mla

KERNEL = "flash_fwd_splitkv_mla_fp8_sparse_kernel"


@dataclass(frozen=True)
class Suite:
    """One script: its name, the function that runs a case, and the dtype that its tensors have by default."""

    script: str
    function: str
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"{self.script.removeprefix('test_flash_mla_')} {self.dtype}".replace("torch.", "")


SUITES = (
    Suite("test_flash_mla_sparse_decoding", "test_flash_mla"),
    Suite("test_flash_mla_dense_decoding", "test_flash_mla"),
    Suite("test_flash_mla_dense_decoding", "test_flash_mla", torch.float16),
    Suite("test_flash_mla_sparse_prefill", "run_test"),
)


@dataclass
class Tally:
    """How the cases of a suite went."""

    suite: Suite
    num_cases: int
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Timer:
    """Stands for what FlashMLA's profiling timer returns: one kernel, and its time by CUDA events, in seconds."""

    def __init__(self, function: Callable[[], Any], num_tests: int = 30, *unused: Any, **options: Any):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_tests):
            function()
        end.record()
        end.synchronize()
        self.seconds = begin.elapsed_time(end) * 1e-3 / num_tests

    def get_kernel_names(self) -> list[str]:
        return [KERNEL]

    def get_kernel_time(self, name: str) -> float:
        return self.seconds


def prepare(checkout: Path) -> None:
    """Makes the scripts importable, with this package in FlashMLA's place."""
    sys.path.insert(0, str(checkout / "tests"))
    sys.modules["flash_mla"] = cute_kernels.compat.flash_mla
    for name in ("rich", "rich.console", "rich.table"):  # for a table that is not made
        if not _exists(name):
            sys.modules[name] = types.ModuleType(name)
    bench: Any = types.ModuleType("kernelkit.bench")
    bench.bench_kineto, bench.bench_by_cuda_events = Timer, None
    sys.modules["kernelkit.bench"] = bench


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # a submodule of what does not exist, or a stand-in
        return False


def cases_of(module: types.ModuleType) -> list[Any]:
    """The cases that a script would run."""
    if hasattr(module, "gen_testcase"):
        return [case.to_test_param() for case in module.gen_testcase()]
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _makes_cases(node)]
    space = dict(vars(module))
    exec(compile(ast.Module(sorted(lists, key=lambda node: node.lineno), []), module.__file__, "exec"), space)
    return space["testcases"]


def _makes_cases(node: ast.Assign) -> bool:
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return any("case" in name and name != "failed_cases" for name in names)


def run(suite: Suite, count: int | None, seconds: float) -> Tally:
    """Runs ``count`` cases of a suite, drawn at random, for so long at most."""
    module = importlib.import_module(suite.script)
    torch.set_default_dtype(torch.float32)
    cases = cases_of(module)
    chosen = cases if count is None else random.Random(0).sample(cases, min(count, len(cases)))
    torch.set_default_dtype(suite.dtype)
    torch.set_default_device("cuda")
    tally, begin = Tally(suite, len(cases)), time.monotonic()
    try:
        for case in chosen:
            if time.monotonic() - begin > seconds:
                break
            outcome, words = judge(getattr(module, suite.function), case)
            tally.outcomes[outcome] += 1
            if outcome != "passed":
                tally.failures.append(f"{case}: {words}")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device("cpu")
    return tally


def judge(function: Callable[[Any], Any], case: Any) -> tuple[str, str]:
    """("passed", ...), ("wrong", what FlashMLA's comparison said), or ("raised", the error)."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            result = function(case)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory", "the test's reference"
    except AssertionError as error:
        return "wrong", f"{error} {said.getvalue()[-300:]}"
    except Exception:
        return "raised", traceback.format_exc(limit=-3)
    correct = result is None or (result if isinstance(result, bool) else result.is_correct)
    return ("passed", "") if correct else ("wrong", said.getvalue()[-300:])


def main(arguments: Sequence[str] | None = None) -> int:
    """COUNT cases of each suite; 0 if all of them are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("count", type=int, nargs="?", metavar="COUNT")
    options = parser.parse_args(arguments)
    prepare(options.checkout)
    wrong = 0
    for suite in SUITES:
        tally = run(suite, options.count, seconds=3600)
        print(f"{suite.name}: {dict(tally.outcomes)} of {tally.num_cases} cases", flush=True)
        for line in tally.failures[:5]:
            print(f"  {line}", flush=True)
        wrong += sum(number for outcome, number in tally.outcomes.items() if outcome in ("wrong", "raised"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
