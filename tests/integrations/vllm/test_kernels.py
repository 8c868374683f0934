"""The kernels that a served model asks for are among those that are made ready; no vLLM is needed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from cute_kernels import append_and_decode, extend_attention
from cute_kernels.formats.kv import format_of, register
from cute_kernels.formats.weights import integers
from cute_kernels.gemm.experts.call import MAX_TOKENS
from cute_kernels.gemm.packed_experts import ExpertsForm
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.deferred_config import GIVES
from cute_kernels.integrations import attention_kernels, expert_kernels, mla_kernels, ready
from cute_kernels.integrations.engine_cache import Formats
from cute_kernels.integrations.vllm import engine_kernels, kv_formats, prepare
from cute_kernels.kv_cache import CacheTransform
from cute_kernels.kv_cache.compile import BulkSpec
from cute_kernels.kv_cache.config import BulkConfig
from cute_kernels.names import CacheLayout
from cute_kernels.runtime import workers
from cute_kernels.runtime.cache import using
from cute_kernels.runtime.gpu import Gpu, standing_in
from cute_kernels.runtime.spec import KernelSpec
from tests.compilers import kept
from tests.gpu.vllm_scenarios import SCENARIOS, kernels_of
from tests.launchers import recording


@pytest.fixture
def h200() -> Iterator[None]:
    with standing_in(Gpu(num_sms=lambda device: 132, name=lambda device: "NVIDIA H200")):
        yield


def unread() -> str:
    """The name of a format that extend attention has no reader of."""
    form = replace(format_of("int4_g4"), name="int4_unread", extend=None)
    return register(form).name


def layer(
    k: str, v: str, head_size: int = 128, window: int | None = None, num_heads: int = 32, num_kv_heads: int = 8
) -> SimpleNamespace:
    """What of a layer decides its kernels."""
    return SimpleNamespace(
        formats=Formats(format_of(k), format_of(v)),
        head_size=head_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        sliding_window=window,
        soft_cap=None,
        sinks=None,
        transform=None,
    )


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("window", [None, 1024, 1 << 20])
def test_attention_of_every_batch_and_every_continuation_is_ready(window: int | None):
    impl = layer("int8_token_head", "int4_g4", window=window)
    decodes = attention_kernels.Decodes((1, 8, 64), 4, 8448, 64, torch.bfloat16)
    specs = attention_kernels.specs([impl, impl], decodes, torch.device("cuda", 0))
    assert len(specs) == len(set(specs))
    names = [spec.symbol for spec in specs if spec.symbol.startswith(("decode", "step"))]
    assert any(name.startswith("step") and "queries" not in name for name in names)
    assert any(name.startswith("decode") and "after_append" in name and "queries" in name for name in names)
    assert all(("window" in name) == (window == 1024) for name in names)
    assert families(specs) == {"append", "extend", "decode", "step"}


def families(specs: list[KernelSpec]) -> set[str]:
    return {spec.symbol.split("_")[0] for spec in specs}


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("names", [("int8_token_head", "int4_g4"), ("int4_g4", "bf16"), ("bf16", "int4_g4")], ids=str)
def test_prompts_have_kernels_of_extend_attention(names: tuple[str, str]):
    impl = layer(*names)
    decodes = attention_kernels.Decodes((1, 8), 1, 8448, 64, torch.bfloat16)
    specs = attention_kernels.specs([impl], decodes, torch.device("cuda", 0))
    dequantised = {"dequantize"} if {"bf16"} & set(names) else set()  # for many new tokens: nothing unpacks such pairs
    assert families(specs) == {"append", "extend", "decode", "step"} | dequantised


@pytest.mark.usefixtures("h200")
def test_prompts_that_extend_attention_does_not_serve_are_dequantised():
    """Over formats that somebody registers without a reader of extend attention's."""
    decodes = attention_kernels.Decodes((1, 8), 1, 8448, 64, torch.bfloat16)
    for impl in (layer(unread(), "bf16"), layer("bf16", unread())):
        specs = attention_kernels.specs([impl], decodes, torch.device("cuda", 0))
        assert families(specs) == {"append", "dequantize", "decode", "step"}


@pytest.mark.usefixtures("h200")
def test_a_transformed_cache_is_dequantised_in_fp32_and_has_appends_of_its_own():
    impl = layer("bf16", unread())
    impl.transform = CacheTransform(torch.zeros(8, 128), k_rotation=32, v_factor=torch.ones(8, 128))
    decodes = attention_kernels.Decodes((1,), 1, 8448, 64, torch.bfloat16)
    specs = attention_kernels.specs([impl, layer("bf16", unread())], decodes, torch.device("cuda", 0))
    symbols = [spec.symbol for spec in specs]
    assert {symbol for symbol in symbols if symbol.startswith("dequantize")} == {
        spec.symbol
        for dtype in ("bf16", "fp32")
        for spec in (BulkSpec(BulkConfig("dequantize", form, dtype, 128)) for form in ("bf16", unread()))
    }
    appends = [symbol for symbol in symbols if symbol.startswith("append")]
    assert len(appends) == 5 and sum("center_v_factor_k32" in symbol for symbol in appends) == 3
    assert sum("_decode_leads" in symbol for symbol in appends) == 1  # of one token alone, through the transform
    steps = [symbol for symbol in symbols if "after_append" in symbol]
    assert {symbol.split("_")[0] for symbol in steps} == {"step"}
    assert any("v_factor" in symbol for symbol in steps) and not all("v_factor" in symbol for symbol in steps)
    assert not any("v_factor" in symbol for symbol in symbols if symbol.startswith("decode"))


@pytest.mark.usefixtures("h200")
def test_a_step_that_must_not_depend_on_its_batch_has_no_kernels_that_do():
    decodes = attention_kernels.Decodes((1, 8), 1, 8448, 64, torch.bfloat16, invariant=True)
    specs = attention_kernels.specs([layer("e4m3_tensor", "e4m3_tensor")], decodes, torch.device("cuda", 0))
    assert families(specs) == {"append", "extend"}
    assert attention_kernels.why_not_invariant(Formats(format_of("int4_g4"), format_of("int4_g4")), 128) is None
    assert attention_kernels.why_not_invariant(Formats(format_of("int4_g4"), format_of("int8_token_head")), 128)


@pytest.mark.parametrize(
    ("captured", "most", "expected"),
    [
        ((1, 2, 512), 8192, [1, 2, 512, 640, 768, 896, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 6144, 8192]),
        ((1, 208), 300, [1, 208, 224, 240, 256, 288, 320]),
        ((), 30, [1, 16, 32]),
        ((1, 5, 40), 40, [1, 5, 40, 48]),
        ((1, 2), 1, [1, 2, 16]),
    ],
)
def test_numbers_of_rows(captured: tuple[int, ...], most: int, expected: list[int]):
    assert prepare.RowCounts(captured, most).all() == expected


def test_the_wheel_has_the_kernels_of_every_engines_rows_and_batches():
    """Whatever vLLM captures, which is part of what it captures at most, and however many tokens a step may have."""
    there = set(prepare.RowCounts(engine_kernels.CAPTURED, engine_kernels.MOST_TOKENS).all())
    for most_captured in (1, 8, 24, 200, 256, 304, 512):
        captured = tuple(m for m in engine_kernels.CAPTURED if m <= most_captured)
        for tokens in (1, 33, 300, 512, 2048, 5000, 8192, 16384):
            assert set(prepare.RowCounts(captured, max(tokens, most_captured)).all()) <= there, (captured, tokens)
    for requests in (1, 3, 64, 65, 100, 256, 512):
        asked = attention_kernels.batches_up_to(requests)
        assert asked[-1] >= requests and set(asked) <= set(engine_kernels.DECODED)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("name", "num_heads", "num_kv_heads"), [("e4m3_tensor", 8, 1), ("int4_g4", 32, 8)])
def test_steps_of_any_number_of_requests_have_kernels(name: str, num_heads: int, num_kv_heads: int):
    one = layer(name, name, num_heads=num_heads, num_kv_heads=num_kv_heads)

    def asked(batches: tuple[int, ...], q_len: int = 3) -> set[KernelSpec]:
        decodes = attention_kernels.Decodes(batches, q_len, 8448, 64, torch.bfloat16)
        return set(attention_kernels.specs([one], decodes, torch.device("cuda", 0)))

    ready = asked(attention_kernels.batches_up_to(200))
    for batch in (*range(1, 70), *range(71, 201, 5)):
        assert asked((batch,), 1) <= ready, batch
    assert asked((5,), 2) <= ready  # fewer tokens are drafted than asked for


@pytest.mark.parametrize("num_heads", [8, 16, 64, 128])
def test_chosen_tokens_of_any_number_of_queries_have_kernels(num_heads: int):
    """Of latent attention: every number up to what `mla.EACH_ROW` says, then a grid."""

    def asked(rows: Iterable[int]) -> set[KernelSpec]:
        return set(mla_kernels.specs(mla_kernels.Decodes("mla_fp8", True, num_heads, tuple(rows), (1,), 2048, 64), 132))

    ready = asked({*range(1, 257), *prepare.RowCounts((1, 2), 4096).all()})
    assert asked(range(250, 4096, 7)) <= ready


@pytest.mark.usefixtures("h200")
def test_layers_are_loaded_once_and_all_together():
    loaded: list[list[str]] = []

    def load_all(device: torch.device, specs: Iterable[KernelSpec]) -> None:
        loaded.append([spec.symbol for spec in specs])

    for n in (4096, 6144):
        prepare.note(LinearProblem(1, n, 4096, 4096, integers(4), "bf16"), prepare.RowCounts((1, 8), 8))
    for _ in range(2):
        prepare.load_noted(torch.device("cuda", 0), load_all=load_all)
    assert len(loaded) == 1 and len(loaded[0]) >= 4


def test_compilers_wait_for_the_kernels_of_the_next_layers():
    """Each of some five groups started its own, for 9 s each."""
    cache: Any = SimpleNamespace(has=lambda *_: False, load_many=lambda *_: None)
    with kept(0), using(cache), mock.patch.multiple(ready, outlasting=mock.DEFAULT, arch_of=mock.DEFAULT):
        ready.load(torch.device("cuda", 0), [], logging.getLogger())
        assert not workers._waiting.most, "there is nothing to compile"
        ready.load(torch.device("cuda", 0), [engine_kernels.linear_specs(LINEAR)[0]], logging.getLogger())
        assert workers._waiting.most and workers._waiting.seconds == ready.COMPILERS_WAIT


LINEAR = LinearProblem(1, 4096, 4096, 4096, integers(4), "bf16")


@pytest.mark.usefixtures("h200")
def test_the_wheel_has_the_kernels_of_products_beside_norms():
    """They were compiled as an engine started: some ten of each layer."""
    rows = prepare.RowCounts((1, 2, 4, 8, 16, 24, 32), 16384).all()
    found = [part.args for part in engine_kernels._linear() if part.args[0] == LINEAR]
    assert [kind for _, kind in found] == [GIVES]  # Llama-3 8B's o projection
    asked = ready.specs_beside_norm(LINEAR, rows, GIVES)
    assert asked and set(asked) <= set(engine_kernels.linear_specs(*found[0]))
    down = LinearProblem(1, 5120, 25600, 25600, integers(4), "bf16")  # Qwen3 32B's
    assert ready.whole_specs(down) and set(ready.whole_specs(down)) <= set(engine_kernels.linear_specs(down, GIVES))


@pytest.mark.usefixtures("h200")
def test_experts_of_any_number_of_tokens_have_kernels():
    """Of the tokens that `moe` asks for; in between kernels are those of neighbours."""
    gate_up = ExpertsForm(128, 1536, 2048, 2048, integers(4), torch.bfloat16, 0)
    down = ExpertsForm(128, 2048, 768, 768, integers(4), torch.bfloat16, 0)
    rows = prepare.RowCounts((1, 2, 4, 8, 16, 24, 32), 4096).all()

    def asked(tokens: Iterable[int]) -> set[KernelSpec]:
        return set(expert_kernels.specs(gate_up, down, 8, tuple(tokens), False))

    ready = asked(expert_kernels.tokens_of(rows, 8192))
    for tokens in (*range(1, 300), *range(300, 4096, 37)):
        assert asked([tokens]) <= ready, tokens


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("experts", [engine_kernels.EXPERTS[i] for i in (0, 1, -1)], ids=str)
def test_the_wheel_has_the_kernels_of_an_engines_experts(experts: engine_kernels.Experts):
    """Whatever tokens its steps have; as `moe` asks for them."""
    form = experts.weights[0]
    listed = set(engine_kernels.experts_specs(experts, form))
    shapes = (2 * experts.middle, experts.hidden), (experts.hidden, experts.middle)
    up, down = (ExpertsForm(experts.num_experts, n, k, k, form, torch.bfloat16, 0) for n, k in shapes)
    for captured, most in (((1, 2, 4, 8), 8192), (engine_kernels.CAPTURED[:20], 2048), ((), 16384)):
        tokens = expert_kernels.tokens_of(prepare.RowCounts(captured, most).all(), MAX_TOKENS)
        assert set(expert_kernels.specs(up, down, experts.topk, tokens, False, experts.activation)) <= listed


@pytest.mark.usefixtures("h200")
def test_experts_of_few_and_of_many_tokens_are_ready():
    gate_up = ExpertsForm(128, 1536, 2048, 2048, integers(4), torch.bfloat16, 0)
    down = ExpertsForm(128, 2048, 768, 768, integers(4), torch.bfloat16, 0)
    specs = expert_kernels.specs(gate_up, down, 8, (1, 32, 4096), False)
    kinds = {type(spec.config).__name__ for spec in specs}
    assert {"StreamConfig", "WgmmaConfig", "RouterConfig", "CombineConfig"} <= kinds
    assert len(specs) == len(set(specs))


@pytest.mark.usefixtures("h200")
def test_kernels_of_a_served_scenario_can_be_listed_before_it_runs():
    """Each of two GPUs has half the heads, so other kernels."""
    scenarios = SCENARIOS["two"]
    one, two = (kernels_of([scenarios[name]], invariant=False) for name in ("w4-int4", "w4-int4-two"))
    assert families(one) == families(two) == {"append", "decode", "extend", "linear", "step"}
    assert {spec.symbol for spec in one} != {spec.symbol for spec in two}
    assert families(kernels_of([SCENARIOS["latent"]["latent"]], invariant=False)) == {"mla"}
    assert kernels_of([scenarios["theirs"]], invariant=False) == []


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_transformed_steps_of_any_number_of_requests_run_kernels_that_are_listed(
    monkeypatch: pytest.MonkeyPatch, layout: CacheLayout
):
    """Whether append and attention are one launch depends on how many there are, too."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    impl = layer("int4_g1", "int4_g1")
    impl.formats = kv_formats.formats_for("int4_per_token_head")
    impl.transform = kv_formats.transform_for("int4_per_token_head", 8, 128)
    check_steps(impl, layout, (1, 33, 256))


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("names", [("int4_g4", "int4_g4"), ("int8_token_head", "int4_g4")], ids=str)
def test_steps_and_prompts_over_pages_of_headed_rows_run_kernels_that_the_wheel_has(names: tuple[str, str]):
    impl = layer(*names)
    impl.formats = engine_kernels.Caches(*names).formats
    assert impl.formats.cache_layout == "HND"
    check_steps(impl, "HND", (1, 7, 100), q_lens=(1, 2, 4))


def check_steps(
    impl: SimpleNamespace, layout: CacheLayout, batches: Iterable[int], q_lens: tuple[int, ...] = (1,)
) -> None:
    """Decode steps, and prompts that go on, load kernels that are listed beforehand."""
    kv_heads, page = impl.num_kv_heads, 64
    decodes = attention_kernels.Decodes(attention_kernels.batches_up_to(256), max(q_lens), 8192, page, torch.bfloat16)
    listed = attention_kernels.specs_of(impl, decodes, 132)
    inner = (kv_heads, page) if layout == "HND" else (page, kv_heads)
    k_cache, v_cache = (
        torch.zeros(4, *inner, form.row_elements(128), dtype=form.cache_dtype)
        for form in (impl.formats.k, impl.formats.v)
    )
    for batch, q_len in product(batches, q_lens):
        q, new = (torch.zeros(batch, q_len, heads, 128, dtype=torch.bfloat16) for heads in (32, kv_heads))
        table, lengths = (torch.zeros(batch, 8192 // page, dtype=torch.int32), torch.ones(batch, dtype=torch.int32))
        options = {"kv_format": impl.formats.name, "block_table": table, "transform": impl.transform}
        options["cache_layout"] = layout
        starts = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32)
        with recording() as recorded:
            append_and_decode(q, new, new, k_cache, v_cache, lengths, **options)
            extend_attention(q.flatten(0, 1), k_cache, v_cache, lengths, cu_seqlens_q=starts, **options)
        assert recorded.loaded, batch
        assert all(spec in listed for spec, _ in recorded.loaded), (batch, q_len)


@pytest.mark.usefixtures("h200")
def test_the_wheel_has_one_order_of_pages_for_each_format():
    for caches in engine_kernels.CACHES[: len(engine_kernels.KV_FORMATS)]:
        listed = engine_kernels.attention_specs(engine_kernels.HEADS[0], caches, 0, (1, 64))
        decodes = [spec.symbol for spec in listed if "decode_" in spec.symbol and not spec.symbol.startswith("append")]
        headed = caches.formats.k.has_header or caches.formats.v.has_header
        assert decodes and all(("head_major" in symbol) == headed for symbol in decodes), caches
