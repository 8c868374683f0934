"""The kernels that a served model asks for are among those that are made ready; no vLLM is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cute_kernels.attention.compile import DecodeSpec
from cute_kernels.integrations.vllm import attention_kernels, expert_kernels, prepare
from cute_kernels.integrations.vllm.kv_formats import Formats
from cute_kernels.kv_formats import format_of
from cute_kernels.linear.experts import ExpertsForm
from cute_kernels.linear.schedule import Problem
from cute_kernels.weight_formats import integers


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("window", [None, 1024, 1 << 20])
def test_attention_of_every_batch_and_every_continuation_is_ready(window: int | None):
    impl = SimpleNamespace(
        formats=Formats(format_of("int8_token_head"), format_of("int4_g4")),
        head_size=128,
        num_heads=32,
        num_kv_heads=8,
        sliding_window=window,
        soft_cap=None,
        sinks=None,
    )
    decodes = attention_kernels.Decodes((1, 8, 64), 4, 8448, 64, torch.bfloat16)
    specs = attention_kernels.specs([impl, impl], decodes, torch.device("cuda", 0))
    assert len(specs) == len(set(specs))
    names = [spec.symbol for spec in specs if isinstance(spec, DecodeSpec)]
    assert any("after_append" in name and "queries" not in name for name in names)
    assert any("after_append" in name and "queries" in name for name in names)
    assert all(("window" in name) == (window == 1024) for name in names)
    families = [spec.symbol.split("_")[0] for spec in specs]
    assert {"append", "dequantize", "decode"} <= set(families), families


@pytest.mark.parametrize(
    ("captured", "most", "expected"),
    [
        ((1, 2, 512), 8192, [1, 2, 512, 640, 768, 896, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 6144, 8192]),
        ((), 300, [1, 128, 256, 300]),
        ((1, 5, 40), 40, [1, 5, 40]),
        ((1, 2), 1, [1, 2]),
    ],
)
def test_numbers_of_rows(captured: tuple[int, ...], most: int, expected: list[int]):
    assert prepare.RowCounts(captured, most).all() == expected


def test_layers_are_loaded_once_and_all_together(monkeypatch: pytest.MonkeyPatch):
    loaded: list[list[str]] = []
    monkeypatch.setattr(prepare, "load", lambda device, specs: loaded.append([spec.symbol for spec in specs]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    for n in (4096, 6144):
        prepare.note(Problem(1, n, 4096, 4096, integers(4), "bf16"), prepare.RowCounts((1, 8), 8))
    prepare.load_noted(torch.device("cuda", 0))
    prepare.load_noted(torch.device("cuda", 0))
    assert len(loaded) == 1 and len(loaded[0]) >= 4


@pytest.mark.usefixtures("h200")
def test_experts_of_few_and_of_many_tokens_are_ready(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    # A device that no other test has: layouts are kept by it.
    gate_up = ExpertsForm(128, 1536, 2048, 2048, integers(4), torch.bfloat16, 63)
    down = ExpertsForm(128, 2048, 768, 768, integers(4), torch.bfloat16, 63)
    specs = expert_kernels.specs(gate_up, down, 8, (1, 32, 4096), torch.bfloat16, False)
    kinds = {type(spec).__name__ for spec in specs}
    assert {"RangeSpec", "GroupedWgmmaSpec", "RoutingSpec", "CombineSpec"} <= kinds
    assert len(specs) == len(set(specs))
