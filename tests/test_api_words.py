"""Words of arguments: pairs of a window, kinds of formats, -1 for a row, and what a query without keys gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.compat import flash_mla
from cute_kernels.formats import kv as kv_formats
from cute_kernels.formats.weights import integers
from tests.misuse import calls

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


@pytest.mark.parametrize("name", ["decode", "append_then_decode", "append", "append_latents"])
def test_other_names_are_refused_as_by_any_function(name: str):
    function, arguments = calls.CALLS[name]()
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'windw'"):
        function(**arguments, windw=3)
