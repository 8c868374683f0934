"""Names from before 0.2: they work, they warn, and they cannot be mixed with today's. And what is new beside them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.compat import flash_mla
from cute_kernels.formats import kv as kv_formats
from cute_kernels.formats.weights import integers
from tests.misuse import calls

Change = Callable[[dict[str, Any]], None]


def rename(now: str, before: str) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments[before] = arguments.pop(now)

    return change


RENAMED = {
    "decode, window": ("decode", "window_size", "window"),
    "decode, soft_cap": ("decode", "softcap", "soft_cap"),
    "decode, bias": ("decode", "attn_bias", "bias"),
    "step, window": ("append_then_decode", "window_size", "window"),
    "step, soft_cap": ("append_then_decode", "softcap", "soft_cap"),
    "step, bias": ("append_then_decode", "attn_bias", "bias"),
    "append, bias": ("append", "qkv_bias", "bias"),
    "append, slots": ("append_by_slots", "slot_mapping", "slots"),
    "append_mla, slots": ("append_latents", "slot_mapping", "slots"),
}


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> list[torch.Tensor]:
    """What a call returns and what it leaves in its arguments."""
    result = function(**arguments)
    tensors = [result] if isinstance(result, torch.Tensor) else list(result or ())
    return [*tensors, *(arguments[name] for name in ("k_cache", "v_cache", "cache") if name in arguments)]


def both(name: str, change: Change) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """A call, its arguments, and the same numbers with a change."""
    torch.manual_seed(0)
    function, arguments = calls.CALLS[name]()
    torch.manual_seed(0)
    _, changed = calls.CALLS[name]()
    change(changed)
    return function, arguments, changed


@pytest.mark.parametrize(("name", "now", "before"), RENAMED.values(), ids=list(RENAMED))
def test_an_old_name_warns_and_means_the_same(name: str, now: str, before: str):
    function, arguments, changed = both(name, rename(now, before))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = outcome(function, arguments)
    with pytest.warns(DeprecationWarning, match=f"{before} is called {now} now") as caught:
        found = outcome(function, changed)
    assert caught[0].filename == __file__  # where the call stands
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("name", "now", "before"), RENAMED.values(), ids=list(RENAMED))
def test_both_names_at_once_are_refused(name: str, now: str, before: str):
    function, arguments = calls.CALLS[name]()
    with pytest.raises(TypeError, match=f"^{before}: got it together with {now}, .* want {now} alone"):
        function(**arguments, **{before: arguments[now]})


@pytest.mark.parametrize("name", ["decode", "append_then_decode", "append", "append_latents"])
def test_other_names_are_refused_as_by_any_function(name: str):
    function, arguments = calls.CALLS[name]()
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'windw'"):
        function(**arguments, windw=3)


@pytest.mark.parametrize("function", [ck.decode_attention, ck.append_kv, ck.append_and_decode, ck.append_mla])
def test_signatures_show_todays_names(function: Callable[..., Any]):
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    # Compiled code and callers that ask go by the function itself.
    assert inspect.signature(function).parameters.keys() & {"kv_format", "slot_mapping"}


def test_old_names_reach_the_calls_through_a_cache():
    cache = ck.KVCache(1, 8, 16, 2, 64, kv_format="bf16")
    cache.allocate("a", 20)
    batch = cache.make_batch(1)
    batch.update(["a"], [20])
    k, v = torch.randn(2, 20, 2, 64).bfloat16()
    cache.append(0, batch, k, v)
    q = torch.randn(1, 1, 4, 64).bfloat16()
    old: dict[str, Any] = {"window": 5}
    with pytest.warns(DeprecationWarning, match="window is called window_size"):
        found = cache.attend(0, batch, q, **old)
    assert torch.equal(found, cache.attend(0, batch, q, window_size=5))


def test_mla_decode_with_its_table_by_place():
    function, arguments = calls.CALLS["mla"]()
    q, cache, table, lens = (arguments.pop(name) for name in ("q", "cache", "block_table", "seq_lens"))
    wanted = function(q, cache, lens, block_table=table, **arguments).clone()
    with pytest.warns(DeprecationWarning, match="block_table goes by keyword now") as caught:
        found = function(q, cache, table, lens, **arguments)
    assert caught[0].filename == __file__ and torch.equal(found, wanted)
    with pytest.raises(TypeError, match=r"mla_decode\(\) takes 3 positional arguments"):
        function(q, cache, lens, lens, block_table=table, **arguments)
    with pytest.raises(TypeError, match="^block_table: got NoneType, want a torch.Tensor"):
        function(q, cache, lens, **arguments)


def test_nothing_warns_while_a_call_is_traced():
    function, arguments, changed = both("decode_pages", lambda a: a.update(window=5))
    step = torch.compile(lambda **given: function(**given), fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert torch.equal(step(**changed), function(**arguments, window_size=5))


# -- what is new -------------------------------------------------------------------------------------------------------

PAIRS = {(0, 0): 1, (4, 0): 5, (31, 0): 32, (10**9, 0): None, (-1, 0): None, (-1, -1): None}


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_window_may_be_said_as_flash_attention_says_it(pair: tuple[int, int], q_len: int):
    _, arguments = calls.CALLS["decode_pages"]()
    arguments["q"] = torch.randn(2, q_len, 4, 64).bfloat16()
    found = ck.decode_attention(**arguments, window_size=pair)
    assert torch.equal(found, ck.decode_attention(**arguments, window_size=PAIRS[pair]))


def test_a_pair_without_a_left_bound_still_hides_later_keys():
    _, arguments = calls.CALLS["decode_pages"]()
    arguments["q"] = torch.randn(2, 3, 4, 64).bfloat16()
    causal = ck.decode_attention(**arguments)
    assert torch.equal(ck.decode_attention(**arguments, causal=False, window_size=(-1, 0)), causal)
    free = ck.decode_attention(**arguments, causal=False)
    assert not torch.equal(free, causal)
    assert torch.equal(ck.decode_attention(**arguments, causal=False, window_size=(-1, -1)), free)


@pytest.mark.parametrize("pair", [(3, 1), (3, -1), (-2, 0), (3,), (3, 0, 0), (3.0, 0), (True, 0), (0, -1), "ab"])
def test_other_pairs_are_refused(pair: Any):
    _, arguments = calls.CALLS["decode_pages"]()
    with pytest.raises(ValueError, match="^window_size: got "):
        ck.decode_attention(**arguments, window_size=pair)


@pytest.mark.parametrize(("alias", "name"), kv_formats.ALIASES.items())
def test_a_kind_of_format_stands_for_the_recommended_one(alias: Any, name: Any):
    assert kv_formats.format_of(alias) is kv_formats.FORMATS[name]
    x = torch.randn(2, 32, 2, 64).bfloat16()
    rows = ck.quantize_kv(x, kv_format=alias)
    assert torch.equal(rows, ck.quantize_kv(x, kv_format=name))
    q, lens = torch.randn(2, 1, 4, 64).bfloat16(), torch.tensor([5, 32], dtype=torch.int32)
    found = ck.decode_attention(q, rows, rows, lens, kv_format=alias)
    assert torch.equal(found, ck.decode_attention(q, rows, rows, lens, kv_format=name))
    pair = ck.decode_attention(q, rows, rows, lens, kv_format=(alias, name))
    assert torch.equal(pair, found)
    cache = ck.KVCache(1, 8, 16, 2, 64, kv_format=alias)
    assert [form.name for form in cache.layer_formats[0]] == [name, name]


def test_minus_one_is_one_scale_a_row():
    w = torch.randn(64, 128).bfloat16()
    weight, wanted = ck.quantize_weight(w, group_size=-1), ck.quantize_weight(w, group_size=None)
    assert weight.group_size is None and torch.equal(weight.scales, wanted.scales)
    again = ck.PackedWeight(weight.codes, weight.scales, weight.zeros, integers(4, -1), (64, 128))
    assert again.group_size is None
    experts = ck.quantize_experts(w[None], group_size=-1)
    assert experts.group_size is None
    form: dict[str, Any] = {"format": integers(4, -1), "shape": (64, 128)}
    assert ck.PackedExperts(experts.codes, experts.scales, None, **form).group_size is None
    layer = ck.QuantizedLinear.from_linear(torch.nn.Linear(128, 64), group_size=-1)
    assert layer.group_size is None
    model = ck.quantize_model(torch.nn.Sequential(torch.nn.Linear(128, 64)), group_size=-1)
    assert model[0].group_size is None  # pyright: ignore[reportIndexIssue]
    with pytest.raises(ValueError, match="^group_size: got -2, want one of 16, 32, 64, 128, 256, or None or -1"):
        ck.quantize_weight(w, group_size=-2)


def test_the_lse_of_a_query_that_sees_nothing_is_the_same_everywhere():
    lens = torch.zeros(2, dtype=torch.int32)
    nothing = {"topk_length": lens, "extra_topk_length": lens}
    changes: dict[str, dict[str, Any]] = {
        "decode_pages": {"seq_lens": lens, "return_lse": True},
        "append_then_decode": {"seq_lens": lens, "return_lse": True},
        "mla": {"seq_lens": lens, "return_lse": True},
        "sparse_mla": {**nothing, "return_lse": True},
    }
    for name, change in changes.items():
        function, arguments = calls.CALLS[name]()
        assert torch.all(function(**(arguments | change))[1] == -torch.inf), name
    function, arguments = calls.CALLS["flash_mla_sparse"]()
    assert function is flash_mla.flash_mla_with_kvcache
    assert torch.all(function(**(arguments | nothing))[1] == torch.inf)  # FlashMLA's own
