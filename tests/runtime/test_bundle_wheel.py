"""The wheel of compiled kernels: installed beside the package, its kernels load without the compiler."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cute_kernels._version import __version__
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.deferred_config import GIVES
from cute_kernels.integrations.attention_kernels import Decodes, EngineLayer, batches_up_to, specs_of
from cute_kernels.integrations.vllm import engine_kernels, prepare
from cute_kernels.runtime import KernelCache, wanted
from cute_kernels.runtime.gpu import Gpu, standing_in
from tests.runtime.tiny import tiny_specs
from tools import bundle_wheel

LOADS = """
import sys
sys.modules["cutlass"] = None  # importing it fails
from cute_kernels.runtime import default_cache
from tests.runtime.tiny import tiny_specs
print([default_cache().load_from(spec, "sm_90a")[1] for spec in tiny_specs(2)])
"""
HOLDS = """
import warnings
from cute_kernels.runtime import default_cache
from tests.runtime.tiny import tiny_specs
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(default_cache().has(tiny_specs(1)[0], "sm_90a"), *(warning.message for warning in caught))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, warm_directory: Path) -> Path:
    return bundle_wheel.build(tiny_specs(2), tmp_path_factory.mktemp("dist"), KernelCache(warm_directory))


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """A folder of packages that has it alone."""
    folder = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True)
    return folder


def test_it_is_named_after_its_platform_and_wants_the_release_that_it_was_built_from(wheel: Path, site: Path):
    assert wheel.name == f"cute_kernels_sm90a-{__version__}-py3-none-manylinux2014_x86_64.whl"
    (metadata,) = site.glob("cute_kernels_sm90a-*.dist-info/METADATA")
    assert f"Requires-Dist: cute-kernels=={__version__}\n" in metadata.read_text()


def test_it_holds_this_projects_kernels_alone(site: Path):
    files = {path.name for path in (site / "cute_kernels_sm90a").iterdir()} - {"__pycache__"}
    assert files == {"__init__.py", "bundle.so", "manifest.json"}
    manifest = json.loads((site / "cute_kernels_sm90a/manifest.json").read_text())
    assert set(manifest["kernels"]) == {spec.symbol for spec in tiny_specs(2)}


def test_its_kernels_load_without_the_compiler(site: Path, tmp_path: Path, output_of: Callable[..., str]):
    printed = output_of(LOADS, path=site, CUTE_KERNELS_CACHE_DIR=str(tmp_path / "cache"), CUTE_KERNELS_AOT_DIR="")
    assert printed == "['bundle', 'bundle']"


def test_one_that_does_not_fit_is_left_out_with_a_warning(site: Path, tmp_path: Path, output_of: Callable[..., str]):
    path = site / "cute_kernels_sm90a/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "x86_64-v9"}))
    printed = output_of(HOLDS, path=site, CUTE_KERNELS_CACHE_DIR=str(tmp_path / "cache"), CUTE_KERNELS_AOT_DIR="")
    assert printed.startswith("False cute-kernels-sm90a is installed and not used: ") and "x86_64-v9" in printed


HEADS, CACHES = engine_kernels.Heads(32, 8), engine_kernels.Caches("e4m3_tensor", "e4m3_tensor")


@pytest.mark.parametrize("drafted", [0, 2])
def test_what_an_engine_asks_for_is_on_the_list(drafted: int):
    """Also for the numbers of requests between those that the list was made with, and for fewer drafted tokens."""
    listed = set(engine_kernels.attention_specs(HEADS, CACHES, engine_kernels.DRAFTED))
    asked = engine_kernels.attention_specs(HEADS, CACHES, drafted, (1, 2, 4, *range(8, 129, 24), 256))
    assert set(asked) <= listed


@pytest.mark.parametrize("context", [8452, 131076])
def test_what_an_engine_of_sglangs_asks_for_is_on_the_list(context: int):
    """Whose table of tokens is a little longer than a context, and which drafts nothing here."""
    listed = set(engine_kernels.attention_specs(HEADS, CACHES, engine_kernels.DRAFTED))
    layer = EngineLayer(CACHES.formats, HEADS.head_size, HEADS.num_heads, HEADS.num_kv_heads)
    decodes = Decodes(batches_up_to(256), 1, context, CACHES.page_size, torch.bfloat16)
    assert set(specs_of(layer, decodes, 132)) <= listed


def test_the_list_has_what_common_models_differ_by():
    """Activations in fp16, windows, sinks, sizes of pages, zero points, and the caches that the pages recommend."""
    parts = [part for part in engine_kernels._attention() if isinstance(part, functools.partial)]
    caches = {part.args[1] for part in parts}
    pair = "int8_token_head", "int4_g4"
    for names in (pair, ("e4m3_tensor", "e4m3_tensor")):
        alike = [each for each in caches if (each.k, each.v) == names]
        assert {each.page_size for each in alike} == {16, 32, 64, 128}
        assert {each.dtype for each in alike} == {torch.bfloat16, torch.float16}
        served = [part.args[0] for part in parts if (part.args[1].k, part.args[1].v) == names]
        assert {heads.sinks for heads in served} == {True, False} and {64, 128, 256} <= {h.head_size for h in served}
        assert {heads.window for heads in served} >= {None, 128, 1024, 4096}
    weights = {part.args[0] for part in engine_kernels._linear() if isinstance(part, functools.partial)}
    forms = {(problem.format.key, problem.dtype) for problem in weights}
    for form in (integers(4, 128), integers(4, 128, True)):
        assert {(form.key, "bf16"), (form.key, "fp16")} <= forms
    # Of every model whose experts have integers, the layers around attention are on the list, too.
    hidden = {problem.k for problem in weights}
    of_integers = [experts for experts in engine_kernels.EXPERTS if integers(4, 128) in experts.weights]
    assert {experts.hidden for experts in of_integers} <= hidden


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 7168)])
def test_what_a_layer_asks_for_is_on_the_list(n: int, k: int):
    problem = LinearProblem(1, n, k, k, integers(4, 128), "bf16")
    listed = engine_kernels.linear_specs(problem)
    rows = (1, 2, 8, 40, 256, 288, 512, 4096, 16384)
    asked = [spec for m in rows for spec in prepare.specs_for(problem, m)]
    assert set(asked) <= set(listed) and len(listed) == len(set(listed))


def test_the_list_has_attention_layers_and_experts_once_each():
    def some(name: str) -> mock._patch[Any]:
        part = next(getattr(engine_kernels, name)())
        return mock.patch.object(engine_kernels, name, lambda: [part, part])

    with some("_attention"), some("_linear"), some("_experts"):
        listed = engine_kernels.specs()
    assert {spec.family for spec in listed} == {"attention", "kv_cache", "linear", "moe"}
    assert len(listed) == len(set(listed))


def test_no_shape_is_listed_twice():
    parts = [str(part) for part in (*engine_kernels._attention(), *engine_kernels._linear())]
    assert len(parts) == len(set(parts))


def test_a_list_that_is_written_is_read_again(tmp_path: Path):
    of_attention = engine_kernels.attention_specs(HEADS, CACHES, 0, (1, 64))
    of_layers = engine_kernels.linear_specs(LinearProblem(1, 4096, 7168, 7168, integers(4, 128), "bf16"), GIVES)
    with standing_in(Gpu(num_sms=lambda device: 132)):
        of_experts = engine_kernels.experts_specs(engine_kernels.EXPERTS[0], integers(4, 128))
    found = [*of_attention, *of_layers, *of_experts]
    wanted.write(tmp_path / "list.json", found, "sm_90a")
    assert set(wanted.read(tmp_path / "list.json", "sm_90a")) == set(found)
