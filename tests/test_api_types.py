"""What a type checker says of a user's code: right calls pass, and a wrong word or name in a call is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from cute_kernels import names
from cute_kernels.attention.checks import CACHE_LAYOUTS
from cute_kernels.formats import kv as kv_formats
from cute_kernels.gemm.activations import STANDARD, Relu2
from cute_kernels.mla import formats as mla_formats

ROOT = Path(__file__).parents[1]
HEADER = """import torch
import cute_kernels as ck

x = torch.zeros(1)
weight = ck.quantize_weight(x)
cache = ck.KVCache(1, 8, 16, 2, 64, kv_format="int4")
batch = cache.make_batch(1)
"""
RIGHT = {
    "attention": """
out: torch.Tensor = ck.decode_attention(x, x, x, x, kv_format="int4", window_size=7, softcap=3.0, attn_bias=x)
both: tuple[torch.Tensor, torch.Tensor] = ck.decode_attention(
    x, x, x, x, kv_format=("int8_token_head", "int4_g4"), window_size=(6, 0), block_table=x, return_lse=True
)
""",
    "append": """
ck.append_kv(x, x, x, x, kv_format="fp8", slot_mapping=x, qkv_bias=(x, None, x), cache_layout="HND")
out: torch.Tensor = ck.append_and_decode(x, x, x, x, x, x, kv_format="int4_g4", qkv_bias=(x, x, x), attn_bias=x)
""",
    "cache": """
cache.append(0, batch, x, x, qkv_bias=(x, x, x), rope=ck.Rope(64))
out: torch.Tensor = cache.attend(0, batch, x, window_size=9, sinks=x)
both: tuple[torch.Tensor, torch.Tensor] = cache.append_and_attend(0, batch, x, x, x, return_lse=True, rope=None)
""",
    "layers": """
y: torch.Tensor = ck.quantized_linear(x, weight, activation="swiglu")
experts = ck.interleave_experts(ck.quantize_experts(x, group_size=-1), ck.quantize_experts(x))
y = ck.fused_moe(x, experts, ck.stack_experts([weight]), topk_weights=x, topk_ids=x, activation="swiglu")
""",
    "mla": """
out: torch.Tensor = ck.mla_decode(x, x, x, kv_format="mla_fp8", block_table=x)
ck.append_mla(x, x, x, kv_format="mla_bf16", slot_mapping=x)
""",
    "words": """
from cute_kernels.names import KvFormatName

def build(kv_format: KvFormatName) -> ck.KVCache:
    return ck.KVCache(1, 8, 16, 2, 64, kv_format=kv_format)
""",
}
WRONG = {
    'ck.decode_attention(x, x, x, x, kv_format="int5")': "int5",
    'ck.decode_attention(x, x, x, x, kv_format=("int4", "int5"))': "int5",
    'ck.decode_attention(x, x, x, x, kv_format="int4", cache_layout="NDH")': "NDH",
    'ck.decode_attention(x, x, x, x, kv_format="int4", windw_size=3)': "windw_size",
    'ck.decode_attention(x, x, x, x, kv_format="int4", window=3)': "window",
    'ck.append_kv(x, x, x, x, kv_format="int3")': "int3",
    'ck.append_kv(x, x, x, x, kv_format="int4", slots=x)': "slots",
    'ck.append_kv(x, x, x, x, kv_format="int4", bias=(x, x, x))': "bias",
    'ck.append_and_decode(x, x, x, x, x, x, kv_format="int4", soft_cap=3.0)': "soft_cap",
    "cache.append(0, batch, x, x, ropes=None)": "ropes",
    "cache.attend(0, batch, x, window=3)": "window",
    "cache.append_and_attend(0, batch, x, x, x, bias=x)": "bias",
    'ck.KVCache(1, 8, 16, 2, 64, kv_format="int5")': "int5",
    'ck.quantize_kv(x, kv_format="int9")': "int9",
    'ck.quantized_linear(x, weight, activation="swigloo")': "swigloo",
    "ck.quantize_weight(x, group_sise=64)": "group_sise",
    "ck.quantize_model(torch.nn.Module(), group_sise=64)": "group_sise",
    "ck.QuantizedLinear.from_linear(torch.nn.Linear(8, 8), group_sise=64)": "group_sise",
    'ck.fused_moe(x, ck.quantize_experts(x), ck.quantize_experts(x), x, x, activation="relu")': "relu",
    'ck.mla_decode(x, x, x, x, kv_format="mla_fp8")': "positional",
    'ck.mla_decode(x, x, x, kv_format="mla_fp9", block_table=x)': "mla_fp9",
    'ck.append_mla(x, x, x, kv_format="mla_fp8", slots=x)': "slots",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Errors by file, of all snippets in one run: pyright takes longer to read torch than to check all of them."""
    folder = tmp_path_factory.mktemp("snippets")
    for name, body in RIGHT.items():
        (folder / f"right_{name}.py").write_text(HEADER + body)
    for index, line in enumerate(WRONG):
        (folder / f"wrong_{index}.py").write_text(f"{HEADER}{line}\n")
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        sys.executable,
        "--outputjson",
        *map(str, folder.iterdir()),
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not found.stdout.startswith("{"):
        pytest.fail(f"pyright: {found.stdout}{found.stderr}")
    by_file: dict[str, list[dict[str, Any]]] = {path.stem: [] for path in folder.iterdir()}
    for entry in json.loads(found.stdout)["generalDiagnostics"]:
        if entry["severity"] == "error":
            by_file[Path(entry["file"]).stem].append(entry)
    return by_file


@pytest.mark.parametrize("name", RIGHT)
def test_right_calls_pass(said: dict[str, list[dict[str, Any]]], name: str):
    assert said[f"right_{name}"] == []


@pytest.mark.parametrize(("index", "line"), list(enumerate(WRONG)), ids=list(WRONG))
def test_a_wrong_word_is_found_where_it_stands(said: dict[str, list[dict[str, Any]]], index: int, line: str):
    errors = said[f"wrong_{index}"]
    assert errors and {error["range"]["start"]["line"] for error in errors} == {HEADER.count("\n")}
    told = (WRONG[line], "No overloads")  # of a function with overloads it does not say which argument fits none
    assert any(word in error["message"] for error in errors for word in told), errors


def test_the_words_are_those_that_the_families_know():
    in_blocks = {kv_formats.CHANNEL_BLOCKS.name}
    assert {*get_args(names.KvFormatName)} == {*kv_formats.FORMATS, *kv_formats.ALIASES} | in_blocks
    assert {*get_args(names.MlaFormatName)} == {*mla_formats.FORMATS}
    assert {*get_args(names.CacheLayout)} == {*CACHE_LAYOUTS}
    assert {*get_args(names.Activation)} == {*(each.name for each in STANDARD), Relu2().name}
