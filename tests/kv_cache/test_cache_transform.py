"""`KVCache` with transforms: the same attention, sequences that move only between caches that read each other."""

from typing import Any

import pytest
import torch

from cute_kernels.kv_cache import CacheTransform, KVCache
from cute_kernels.kv_cache.constants import CacheConstants
from cute_kernels.kv_cache.exported import ExportedSequence
from cute_kernels.kv_cache.rope import Rope

HEADS, GROUP, DIM, TOKENS = 2, 3, 64, 40
ROPE = Rope(DIM)
SINKS = torch.randn(HEADS * GROUP)
FEATURES = [{}, {"softcap": 8.0}, {"sinks": SINKS}, {"softcap": 8.0, "sinks": SINKS}, {"window_size": 9}]


def signs(*shape):
    return (torch.randint(0, 2, shape) * 2 - 1).float()


def make_transform(values=True):
    return CacheTransform(
        k_center=2 * torch.randn(HEADS, DIM),
        k_factor=signs(HEADS, DIM) * torch.exp(0.5 * torch.randn(HEADS, DIM)),
        k_rotation=32,
        v_factor=signs(HEADS, DIM) if values else None,
        v_rotation=64 if values else 1,
    )


def make_cache(transform: Any = None, kv_format: Any = "fp16", num_layers=1, **options: Any) -> Any:
    return KVCache(
        num_layers, 8, 16, HEADS, DIM, kv_format=kv_format, dtype=torch.float16, transform=transform, **options
    )


def make_inputs(count=TOKENS, loud=None) -> Any:
    q, k, v = (torch.randn(count, heads, DIM) for heads in (HEADS * GROUP, HEADS, HEADS))
    if loud is not None:
        k[:, :, [3, 40]] *= loud
        q[:, :, [3, 40]] /= loud
    return [x.half() for x in (q, k, v)]


def fill(cache, q, k, v, layer=0, seq_id="a", q_shift=None) -> Any:
    """The first tokens of a sequence; returns q as `append` does."""
    if seq_id not in cache.seq_ids:
        cache.allocate(seq_id, len(k))
    batch = cache.make_batch(1).update([seq_id], len(k))
    return batch, cache.append(layer, batch, k, v, q=q, rope=ROPE, q_shift=q_shift)


@pytest.mark.parametrize("options", FEATURES, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("cache_layout", ["NHD", "HND"])
def test_attention_is_that_without_a_transform(options, cache_layout):
    q, k, v = make_inputs()
    plain = make_cache(cache_layout=cache_layout)
    batch, rotated = fill(plain, q, k, v)
    want, want_lse = plain.attend(0, batch, rotated[-1:][None], return_lse=True, **options)

    cache = make_cache(make_transform(), cache_layout=cache_layout)
    shift = torch.empty(TOKENS, HEADS * GROUP)
    batch, transformed = fill(cache, q, k, v, q_shift=shift)
    assert (transformed.float() - rotated.float()).norm() > 0.1 * rotated.float().norm()
    ways = {
        "as append returns it": cache.attend(
            0, batch, transformed[-1:][None], q_transformed=True, q_shift=shift[-1:][None], return_lse=True, **options
        ),
        "after RoPE alone": cache.attend(0, batch, rotated[-1:][None], q_transformed=False, return_lse=True, **options),
    }
    for way, (out, lse) in ways.items():
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2, msg=way)
        torch.testing.assert_close(lse, want_lse, rtol=1e-2, atol=2e-2, msg=way)


@pytest.mark.parametrize("options", FEATURES, ids=lambda options: "+".join(options) or "plain")
def test_append_and_attend_is_that_without_a_transform(options):
    q, k, v = make_inputs()
    results = []
    for cache in (make_cache(), make_cache(make_transform())):
        fill(cache, q[:-2], k[:-2], v[:-2])
        cache.extend("a", 2)
        batch = cache.make_batch(1).update(["a"], 2)
        results.append(cache.append_and_attend(0, batch, *(x[None, -2:] for x in (q, k, v)), rope=ROPE, **options))
    torch.testing.assert_close(results[1], results[0], rtol=2e-2, atol=2e-2)


def test_four_bits_keep_loud_channels_once_transformed():
    q, k, v = make_inputs(loud=100.0)
    factor = ROPE.apply(k.float(), torch.arange(TOKENS)).std(0) ** -0.5
    levelled = CacheTransform(k_factor=factor * signs(HEADS, DIM), k_rotation=64)
    results = []
    for cache in (make_cache(), make_cache(None, "int4_g1"), make_cache(levelled, "int4_g1")):
        batch, _ = fill(cache, q, k, v)
        rotated = ROPE.apply(q[-16:].float(), torch.arange(TOKENS - 16, TOKENS)).half()
        results.append(cache.attend(0, batch, rotated[None], q_transformed=False).float())
    plain, remedied = ((found - results[0]).norm() / results[0].norm() for found in results[1:])
    assert remedied < 0.5 * plain


def test_results_are_written_where_they_are_wanted():
    q, k, v = make_inputs()
    cache = make_cache(make_transform())
    batch, transformed = fill(cache, q, k, v)
    want = cache.attend(0, batch, transformed[-1:][None], q_transformed=True)
    out = torch.empty_like(want)
    assert cache.attend(0, batch, transformed[-1:][None], q_transformed=True, out=out) is out
    assert torch.equal(out, want)


def test_what_was_written_is_read_as_it_was():
    q, k, v = make_inputs()
    cache = make_cache(make_transform())
    fill(cache, q, k, v)
    read_k, read_v = cache.read(0, "a")
    assert read_k.dtype == torch.float16
    torch.testing.assert_close(read_k, ROPE.apply(k.float(), torch.arange(TOKENS)).half(), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(read_v, v, rtol=1e-2, atol=1e-2)


def test_whether_q_is_transformed_has_to_be_said():
    q, k, v = make_inputs()
    cache = make_cache([make_transform(), None], num_layers=2)
    batch, transformed = fill(cache, q, k, v)
    newest = transformed[-1:][None]
    with pytest.raises(ValueError, match="q_transformed: got None for layer 0, which has a transform; want True"):
        cache.attend(0, batch, newest)
    with pytest.raises(TypeError, match="q_transformed: got 1, want True or False"):
        cache.attend(0, batch, newest, q_transformed=1)
    for options in ({"softcap": 5.0}, {"sinks": SINKS}, {"return_lse": True}):
        with pytest.raises(ValueError, match="q_shift: got None for layer 0, whose keys are centred"):
            cache.attend(0, batch, newest, q_transformed=True, **options)
    fill(cache, q, k, v, layer=1)
    cache.attend(1, batch, newest)  # nothing to say of a layer without


def test_a_transform_that_does_not_fit_names_the_layer():
    with pytest.raises(ValueError, match=r"transform\[1\]: k_center: got shape \[3, 64\], want \[2, 64\]"):
        make_cache([None, CacheTransform(k_center=torch.zeros(3, 64))], num_layers=2)
    with pytest.raises(ValueError, match=r"transform: got 3 transforms, want 2, one for each layer"):
        make_cache([None] * 3, num_layers=2)
    with pytest.raises(TypeError, match="transform: got str"):
        make_cache("hadamard")


@pytest.mark.parametrize("layouts", [("NHD", "NHD"), ("NHD", "HND"), ("HND", "NHD")])
def test_a_sequence_moves_to_a_cache_that_reads_it(layouts):
    q, k, v = make_inputs()
    transforms = [make_transform(), None]
    source, target = (make_cache(transforms, "int4_g4", 2, cache_layout=layout) for layout in layouts)
    for layer in range(2):
        fill(source, q, k, v, layer)
    target.allocate("other", 17)
    target.import_sequence("b", source.export_sequence("a"))
    assert target.seq_len("b") == TOKENS
    for layer in range(2):
        for got, want in zip(target.read(layer, "b"), source.read(layer, "a"), strict=True):
            assert torch.equal(got, want)


def test_rows_written_otherwise_are_refused():
    q, k, v = make_inputs()
    source = make_cache([make_transform(), None], "int4_g4", 2)
    fill(source, q, k, v)
    exported = source.export_sequence("a")
    others = {
        "no transform": make_cache(None, "int4_g4", 2),
        "another one": make_cache([make_transform(), None], "int4_g4", 2),
        "another format": make_cache(source.transforms, ("int4_g4", "int4_g2"), 2),
    }
    for other in others.values():
        with pytest.raises(ValueError, match="exported: got layer 0 written with int4_g4 x 64, .* as the cache reads"):
            other.import_sequence("a", exported)
        assert other.seq_ids == () and other.num_free_pages == 8
    with pytest.raises(ValueError, match="exported: got rows of 2 layers, want 1"):
        make_cache(source.transforms[0], "int4_g4").import_sequence("a", exported)
    with pytest.raises(TypeError, match="exported: got Tensor, want an ExportedSequence"):
        source.import_sequence("b", exported.k)
    with pytest.raises(ValueError, match=r"v: got shape \[2, 39, 2, 48\], want \[2, tokens, num_kv_heads, row\]"):
        ExportedSequence(exported.k, exported.v[:, 1:], exported.keys)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda k: k.float(), TypeError, "k: got dtype torch.float32, want torch.float16, that of the cache"),
        (lambda k: k[..., :1], ValueError, r"k: got shape \[1, 40, 2, 1\], want \[1, tokens, 2, 64\]"),
        (lambda k: k[..., :32], ValueError, r"k: got shape \[1, 40, 2, 32\], want \[1, tokens, 2, 64\]"),
    ],
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_that_do_not_fit_the_pages_change_nothing(change, error, message, layout):
    source, target = (make_cache(cache_layout=layout) for _ in range(2))
    fill(source, *make_inputs())
    exported = source.export_sequence("a")
    with pytest.raises(error, match=message):
        target.import_sequence("a", ExportedSequence(change(exported.k), exported.v, exported.keys))
    with pytest.raises(error, match=message.replace("k:", "v:")):
        target.import_sequence("a", ExportedSequence(exported.k, change(exported.v), exported.keys))
    with pytest.raises(ValueError, match=r"k: got shape \[1, 40, 1, 64\], want \[1, tokens, 2, 64\]"):
        target.import_sequence("a", ExportedSequence(exported.k[:, :, :1], exported.v[:, :, :1], exported.keys))
    assert target.seq_ids == () and target.num_free_pages == 8


def test_rows_with_another_scale_are_refused():
    caches = [make_cache(None, "int8_head") for _ in range(2)]
    for cache, scale in zip(caches, (0.02, 0.03), strict=True):
        cache.set_scales(0, k_scale=torch.full((HEADS,), scale), v_scale=torch.full((HEADS,), 0.02))
    fill(caches[0], *make_inputs())
    with pytest.raises(ValueError, match="exported: got layer 0 written with .* k_scale"):
        caches[1].import_sequence("a", caches[0].export_sequence("a"))


def test_constants_bring_transforms_and_scales(tmp_path):
    pytest.importorskip("safetensors")
    path = tmp_path / "constants.safetensors"
    scales = ((torch.full((HEADS, 1), 0.03), None),) * 2
    CacheConstants((make_transform(), None), scales, {"model": "a model"}).save(path)
    cache = make_cache(None, ("int8_head", "int4_g4"), 2)
    cache.set_constants(path)
    assert cache.transforms[1] is None and cache.transforms[0] is not None
    fill(cache, *make_inputs())
    assert "transform none" in cache.keys[1] and "transform none" not in cache.keys[0]
    with pytest.raises(ValueError, match="constants: got some for a cache with 1 sequences, want an empty cache"):
        cache.set_constants(path)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        (CacheConstants((None,)), "constants: got 1 transforms, want 2, one for each layer"),
        (CacheConstants((None, None)), "k_scale: got None, want"),
        (CacheConstants((None, None), ((torch.ones(HEADS), None), (None, None))), "k_scale: got None, want"),
        (
            CacheConstants((CacheTransform(k_center=torch.zeros(1, 64)), None)),
            r"constants\[0\]: k_center: got shape \[1, 64\], want \[2, 64\]",
        ),
    ],
)
def test_constants_that_do_not_fit_change_nothing(constants, message):
    cache = make_cache(make_transform(), ("int8_head", "int4_g4"), 2)
    cache.set_scales(0, k_scale=torch.full((HEADS,), 0.5))
    before = cache.transforms, cache.keys
    with pytest.raises(ValueError, match=message):
        cache.set_constants(constants)
    assert (cache.transforms, cache.keys) == before
