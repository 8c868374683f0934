"""What hypothesis draws: arguments of :func:`tests.attention.cases.make_call`, small enough to print and to shrink."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from cute_kernels.attention.tiles import cannot_read
from cute_kernels.formats.kv import HEAD_DIMS, format_of, format_pair
from tests.attention.cases import ALL_FORMATS


def format_pairs(formats: Sequence[str] = ALL_FORMATS) -> st.SearchStrategy[str | tuple[str, str]]:
    """One format for both operands, or two that do not want q in different dtypes."""
    pair = st.tuples(st.sampled_from(formats), st.sampled_from(formats)).filter(lambda p: set(p) != {"bf16", "fp16"})
    return st.one_of(st.sampled_from(formats), pair)


@st.composite
def features(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination of what a call may ask for besides plain attention."""
    chosen: dict[str, Any] = {}
    if draw(st.booleans()):
        chosen["window_size"] = draw(st.sampled_from([1, 2, 15, 16, 17, 40, 1000]))
    if draw(st.booleans()):
        chosen["softcap"] = draw(st.sampled_from([1e-3, 0.5, 30.0]))
    if draw(st.booleans()):
        chosen["attn_bias"] = draw(st.sampled_from(["fp32", "bf16"]))
        chosen["bias_dims"] = "".join(sorted(draw(st.sets(st.sampled_from("bihj"))), key="bihj".index))
    return chosen | draw(st.fixed_dictionaries({name: st.booleans() for name in ("sinks", "alibi", "causal")}))


@st.composite
def storage(draw: st.DrawFn) -> dict[str, Any]:
    """Contiguous or paged, tokens or heads first."""
    page_size = draw(st.sampled_from([None, None, 16, 32, 48, 256]))
    return {"page_size": page_size, "cache_layout": draw(st.sampled_from(["NHD", "HND"]))}


@st.composite
def calls(
    draw: st.DrawFn,
    formats: Sequence[str] = ALL_FORMATS,
    head_dims: Sequence[int] = HEAD_DIMS,
    max_tokens: int = 70,
    max_batch: int = 4,
    max_group: int = 9,
    max_kv_heads: int = 4,
) -> dict[str, Any]:
    """Everything: formats, shapes, storage, queries, features. Some requests are shorter than q_len, some empty."""
    q_len = draw(st.one_of(st.just(1), st.integers(1, 16)))
    lengths = draw(st.lists(st.integers(0, max_tokens), min_size=1, max_size=max_batch))
    kv_format = draw(format_pairs(formats))
    forms = [format_of(name) for name in format_pair(kv_format)]
    k_dims, v_dims = ([dim for dim in head_dims if not cannot_read(form, dim)] for form in forms)
    head_dim = draw(st.sampled_from(k_dims))
    own = st.none() if head_dim in v_dims else st.nothing()
    shape = {
        "kv_format": kv_format,
        "lengths": lengths,
        "max_seq_len": max(lengths) + draw(st.integers(0, 5)),
        "q_len": q_len,
        "num_kv_heads": draw(st.integers(1, max_kv_heads)),
        "group": draw(st.integers(1, max_group)),
        "head_dim": head_dim,
        "v_head_dim": draw(st.one_of(own, st.sampled_from(v_dims))),
        "q_dtype": draw(st.sampled_from(["bf16", "fp16"])),
        "seed": draw(st.integers(0, 2**31)),
    }
    return shape | draw(storage()) | draw(features())
