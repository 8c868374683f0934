"""Importers call the families, never the reverse."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import cute_kernels
from cute_kernels import PackedWeight
from cute_kernels.integrations import checkpoints

ROOT = Path(cute_kernels.__file__).parent
IMPORTERS = ("awq", "compressed_tensors", "fastertransformer", "gptq", "hqq", "torchao")


@pytest.mark.parametrize("family", ["gemm", "attention"])
def test_a_family_imports_no_integration(family):
    for file in (ROOT / family).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("cute_kernels.integrations") for name in names), file


@pytest.mark.parametrize("name", IMPORTERS)
def test_a_weight_has_the_importers_and_their_documentation(name):
    importer = getattr(PackedWeight, f"from_{name}")
    assert callable(getattr(checkpoints, f"from_{name}")) and importer.__name__ == f"from_{name}"
    assert f"see `cute_kernels.integrations.checkpoints.{name}.from_{name}`" in (importer.__doc__ or "")


def test_a_weight_has_them_whatever_is_imported_first(output_of: Callable[..., str]):
    code = "from cute_kernels.gemm.weight import PackedWeight; print(PackedWeight.from_awq.__name__)"
    assert output_of(code) == "from_awq"


def test_importing_reads_no_other_library(output_of: Callable[..., str]):
    code = "import sys, cute_kernels; print([name for name in ('transformers', 'safetensors') if name in sys.modules])"
    assert output_of(code) == "[]"
