"""Formats by layer from a budget of bytes: the knapsack, the file, measured losses, and caches that take them."""

import itertools
import json
from typing import Any

import pytest
import torch

from cute_kernels.__main__ import main
from cute_kernels.formats.kv import LayerFormats, format_of, told_formats
from cute_kernels.integrations.engine_cache import formats_named
from cute_kernels.integrations.vllm import kv_formats
from cute_kernels.kv_cache import KVCache
from tests.integrations.architectures import DECODERS, VOCABULARY

ck = pytest.importorskip("cute_kernels.integrations.transformers")
gather_moments = pytest.importorskip("cute_kernels.integrations.transformers.calibrate").gather_moments
budget = pytest.importorskip("cute_kernels.integrations.transformers.budget")
CANDIDATES = ["int8_token_head", ("int8_token_head", "int4_g2"), "int4_g2"]
MIX = LayerFormats((("int8_token_head", "int4_g2"), ("int4_g4", "int4_g4")), {"kl": 0.5})


def make_batches(count=2, tokens=48):
    return [torch.randint(1, VOCABULARY, (2, tokens)) for _ in range(count)]


@pytest.mark.parametrize("most", [9, 14, 20, 27, 31])
def test_the_knapsack_loses_least_of_all_choices(most):
    draw = torch.Generator().manual_seed(most)
    losses = torch.rand(5, 3, generator=draw).tolist()
    sizes = torch.randint(1, 9, (5, 3), generator=draw).tolist()

    def total(table, chosen):
        return sum(row[i] for row, i in zip(table, chosen, strict=True))

    there = [one for one in itertools.product(range(3), repeat=5) if total(sizes, one) <= most]
    if not there:
        with pytest.raises(ValueError, match=f"want at most {most}"):
            budget.least_loss(losses, sizes, most)
        return
    found = budget.least_loss(losses, sizes, most)
    assert found in there and total(losses, found) == pytest.approx(min(total(losses, one) for one in there))


def test_layers_that_lose_more_get_more_bits():
    losses = [[0.0, 9.0], [0.0, 1.0], [0.0, 1.0], [0.0, 8.0]]
    assert budget.least_loss(losses, [[4, 1]] * 4, 10) == (0, 1, 1, 0)


def test_formats_by_layer_are_what_their_file_says(tmp_path):
    MIX.save(tmp_path / "mix.json")
    for read in (LayerFormats.load(tmp_path / "mix.json"), told_formats(str(tmp_path / "mix.json"))):
        assert (
            isinstance(read, LayerFormats)
            and read == MIX
            and read.report == {"kl": 0.5}
            and dict(read) == dict(enumerate(MIX.layers))
        )
    assert told_formats("int4_g4") == "int4_g4" and told_formats({-1: "bf16"}) == {-1: "bf16"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no", "got no JSON"),
        ("[]", "got None"),
        (
            '{"format": "cute_kernels.layer_formats", "version": 2, "layers": []}',
            r"got \('cute_kernels.layer_formats', 2",
        ),
        ('{"format": "cute_kernels.layer_formats", "version": 1, "layers": []}', "layers: got none"),
        ('{"format": "cute_kernels.layer_formats", "version": 1, "layers": ["int3"]}', "got 'int3'"),
    ],
)
def test_a_file_that_says_no_formats_is_named(text, message, tmp_path):
    path = tmp_path / "mix.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        LayerFormats.load(path)
    assert str(path) in str(error.value)
    with pytest.raises(
        FileNotFoundError, match="none.json: no such file; `cute-kernels calibrate --budget` writes one"
    ):
        told_formats(tmp_path / "none.json")


def test_an_absent_or_wrong_file_of_formats_is_named_with_the_argument_or_variable(tmp_path, monkeypatch, capsys):
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    for path, kind in ((tmp_path / "none.json", FileNotFoundError), (wrong, ValueError)):
        monkeypatch.setenv("CUTE_KERNELS_VLLM_KV_FORMAT", str(path))
        with pytest.raises(kind, match=f"^CUTE_KERNELS_VLLM_KV_FORMAT: {path}: "):
            kv_formats.own_formats()
        with pytest.raises(kind, match=f"^kv_format: {path}: "):
            ck.DecodeCache(str(path), 64)
        with pytest.raises(ValueError, match=f"^CUTE_KERNELS_SGLANG_KV_FORMAT: got '{path}', want one or two"):
            formats_named(str(path), "CUTE_KERNELS_SGLANG_KV_FORMAT")
        with pytest.raises(SystemExit):
            main(["calibrate", "model", "--kv-format", str(path), "-o", "out.safetensors"])
        assert f"argument --kv-format: {path}: " in " ".join(capsys.readouterr().err.split())


def test_a_model_gets_the_formats_that_lose_least_within_its_bytes():
    model, said = DECODERS["llama"].build(torch.bfloat16), []
    formats, constants = ck.choose_formats(model, make_batches(), 0.45, say=said.append)
    report = json.loads(json.dumps(formats.report))
    assert len(formats) == constants.num_layers == len(said) == 2 and report["share"] <= 0.45
    assert set(report["all_layers"]) == {"bf16", "int8_token_head", "int8_token_head + int4_g2", "int4_g2", "mix"}
    assert report["all_layers"]["bf16"]["kl"] == 0 and report["all_layers"]["bf16"]["agreement"] == 1
    fitting = [one["kl"] for one in report["all_layers"].values() if one["share"] <= 0.45]
    assert report["kl"] == min(fitting) and report["needles"] == {"found": 0, "of": 0} and report["step_ms"] is None
    assert all(len(losses) == 2 for losses in report["layer_losses"].values())
    assert report["bytes_per_token"] == sum(
        4 * format_of(name).row_bytes(64) // 2 for pair in formats.layers for name in pair
    )
    assert all(
        (transform is None) == (pair[0] == "bf16")
        for transform, pair in zip(constants.transforms, formats.layers, strict=True)
    )


def test_all_of_the_bytes_lose_nothing_and_too_few_are_refused():
    model = DECODERS["llama"].build(torch.bfloat16)
    formats, constants = ck.choose_formats(model, make_batches(1), 1.0)
    assert formats.layers == (("bf16", "bf16"),) * 2 and constants.transforms == (None, None)
    assert formats.report["kl"] == 0
    with pytest.raises(ValueError, match="budget: got 0.2, want at least 0.313"):
        ck.choose_formats(model, make_batches(1), 0.2)
    with pytest.raises(ValueError, match="budget: got 42"):
        ck.choose_formats(model, make_batches(1), 42)
    with pytest.raises(ValueError, match="int4_channel32 .* lie in blocks"):
        ck.choose_formats(model, make_batches(1), 0.5, candidates=[("int4_channel32", "int4_g4")])
    padded = {"input_ids": make_batches(1)[0], "attention_mask": torch.ones(2, 48).tril()}
    with pytest.raises(ValueError, match="padding"):
        budget.Probes(model, [padded])


def test_layers_that_read_another_ones_cache_read_it_in_its_format():
    """Gemma 4's last two read the keys of the first two: without these, all four attend to nothing."""
    model = DECODERS["gemma 4"].build(torch.bfloat16)
    probes = budget.Probes(model, make_batches(1))
    probe = probes._texts[0]
    nothing = probes._again(probe, dict.fromkeys(range(2), lambda k, v: (k * 0, v * 0)))
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: out * 0) for layer in model.model.layers
    ]
    assert torch.equal(nothing, probes._again(probe, {})) and not torch.equal(nothing, probe.exact)
    for hook in hooks:
        hook.remove()
    assert torch.equal(probes._again(probe, {}), probe.exact)


def test_a_model_whose_layers_share_caches_takes_its_file(tmp_path):
    model, batches = DECODERS["gemma 4"].build(torch.bfloat16), make_batches(1)
    formats, constants = ck.choose_formats(
        model, batches, 0.6, candidates=["int8_token_head"], calibration={"factors": False}
    )
    assert len(formats) == constants.num_layers == 4 and formats.report["share"] <= 0.6
    formats.save(tmp_path / "mix.json")
    ck.accelerate(model, kv_format=tmp_path / "mix.json", kv_transform=constants, fuse_blocks=False)
    assert model.generate(batches[0], max_new_tokens=2, do_sample=False).shape == (2, 50)


def test_a_needle_is_asked_for_behind_the_cache():
    model = DECODERS["llama"].build(torch.float32)
    tokens = torch.randint(1, VOCABULARY, (40,))
    with torch.no_grad():
        for place in (38, 39):
            tokens[place] = model(tokens[None, :place]).logits[0, -1].argmax()
    probes = budget.Probes(model, make_batches(1), [budget.Needle(tokens, 5, 2)])
    assert probes.needles({}) == (1, 1)
    assert probes.loss({}) == (pytest.approx(0, abs=1e-6), 1.0)


def test_every_cache_takes_formats_by_layer(tmp_path):
    MIX.save(tmp_path / "mix.json")
    model = DECODERS["llama"].build(torch.bfloat16)
    ck.register()
    model.set_attn_implementation(ck.ATTENTION_NAME)
    tokens = make_batches(1)[0]
    found = []
    for kv_format in (tmp_path / "mix.json", str(tmp_path / "mix.json"), MIX, dict(MIX)):
        cache = ck.DecodeCache(kv_format, 64)
        with torch.no_grad():
            model(tokens, past_key_values=cache)
            found.append(model(tokens[:, :1], past_key_values=cache).logits)
        assert [layer.formats for layer in cache.layers] == list(MIX.layers)
    assert all(torch.equal(found[0], other) for other in found)


def test_a_paged_cache_of_several_formats_is_each_layers_own(tmp_path):
    MIX.save(tmp_path / "mix.json")
    mixed = KVCache(2, 8, 16, 2, 64, kv_format=tmp_path / "mix.json")
    apart = [KVCache(1, 8, 16, 2, 64, kv_format=pair) for pair in MIX.layers]
    for cache in (mixed, *apart):
        cache.allocate("a", 20)
        cache.fork("a", "b")
        cache.extend("b", 1)  # a page is copied in every layer
    q, k, v = (torch.randn(21, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for layer, own in enumerate(apart):
        results = []
        for cache, index in ((mixed, layer), (own, 0)):
            cache.append(index, cache.make_batch(1).update(["b"], 1), k[:1], v[:1])
            results.append(
                (cache.attend(index, cache.make_batch(1).update(["b"], 1), q[None, :1]), *cache.read(index, "b"))
            )
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert mixed.memory_report().token_bytes == sum(own.memory_report().token_bytes for own in apart)
    assert mixed.memory_report().layer_bytes == tuple(own.memory_report().layer_bytes[0] for own in apart)
    assert "int8_token_head + int4_g2, int4_g4" in str(mixed.memory_report())
    with pytest.raises(ValueError, match="layers differ in format"):
        mixed.export_sequence("a")
    with pytest.raises(ValueError, match="in some layers"):
        KVCache(2, 8, 32, 2, 64, kv_format={0: ("int4_channel32", "int4_g2"), -1: "int4_g4"}, max_seqs=2)
    with pytest.raises(ValueError, match="got none for layer 1"):
        KVCache(2, 8, 16, 2, 64, kv_format={0: "int4_g4"})


@pytest.mark.parametrize("layer", ["0", -2, 2, True, 0.5, None])
def test_a_format_for_a_layer_that_there_is_not_is_refused(layer):
    """It would be passed over, and the layer that was meant have the others' format."""
    formats: Any = {layer: "bf16", -1: "int4"}
    message = f"kv_format: got a format for layer {layer!r}, want"
    with pytest.raises(ValueError, match=f"{message} 0 to 1, or -1: all others"):
        KVCache(2, 4, 16, 2, 64, kv_format=formats)
    with pytest.raises(ValueError, match=message):
        ck.accelerate(DECODERS["llama"].build(torch.bfloat16), kv_format=formats)
    if layer != 2:  # whether a model has it, its first pass shows
        with pytest.raises(ValueError, match=f"{message} a layer's number, or -1"):
            ck.DecodeCache(formats)


def test_a_models_own_rounding_is_no_loss_of_a_layer():
    """In 16 bits K and V that INT8 changes by half a percent change tokens as much as INT4's: roundings decide then."""
    batches, losses = make_batches(1), []
    moments = gather_moments(DECODERS["llama"].build(torch.float32), batches)
    for dtype in (torch.float32, torch.bfloat16):
        model = DECODERS["llama"].build(dtype)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16())
        before = {name: x.clone() for name, x in model.state_dict().items()}
        found, _ = ck.choose_formats(model, batches, 0.7, candidates=CANDIDATES, moments=moments)
        losses.append(torch.tensor(list(found.report["layer_losses"].values())))
        assert all(torch.equal(x, before[name]) and x.dtype == dtype for name, x in model.state_dict().items())
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
