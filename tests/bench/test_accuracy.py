"""`python -m bench accuracy`: text, model, errors, perplexity, and the command as a whole."""

import json
import math

import pytest
import torch

from bench import accuracy, corpus, plots, small_llama
from bench import record as records
from bench.__main__ import main
from bench.accuracy import VARIANTS, Variant, calibrate, errors, gaussian, with_outliers
from cute_kernels.formats.kv import FORMATS

CPU = torch.device("cpu")
TINY = small_llama.Scale(64, 96, 2, 4, 2, 64, context=24, batch=8, learning_rate=3e-3, seconds=math.inf, max_steps=120)
SENTENCE = "The quick brown fox jumps over the lazy dog and then sleeps in the warm afternoon sun. "


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models as small as these gain nothing from more, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def silent(line):
    pass


# -- text -------------------------------------------------------------------------------------------------------------


def write_packages(folder, count=60):
    for number in range(count):
        package = folder / f"package{number % 7}"
        package.mkdir(exist_ok=True)
        text = f"This is file number {'one ' * number}of a package that has a great deal to say about itself."
        (package / f"module{number}.py").write_text(f'"""{text}\n\n{SENTENCE}\n"""\n\nx = {number}\n')


def test_files_are_split_between_training_and_validation_and_repeats_left_out(tmp_path):
    write_packages(tmp_path)
    found = corpus.collect(1 << 20, [tmp_path])
    parts = [bytes(part.tolist()).decode() for part in (found.train, found.validation)]
    numbers = [{line.count("one ") for line in part.splitlines() if line.startswith("This is file")} for part in parts]
    assert not numbers[0] & numbers[1] and numbers[0] | numbers[1] == set(range(60))
    assert 0 < len(numbers[1]) < 15
    assert "".join(parts).count(SENTENCE.strip()) == 1
    assert "x = " not in parts[0]
    assert found.about["files"] == 60 and found.about["train_bytes"] == len(found.train)


def test_the_choice_is_the_same_every_time_and_bounded(tmp_path):
    write_packages(tmp_path)
    first, second = (corpus.collect(4000, [tmp_path]).about for _ in range(2))
    assert first == second
    assert first["train_bytes"] < 6000 and first["files"] < 60  # type: ignore[operator]


def test_headers_code_and_undecodable_files_are_left_out(tmp_path):
    write_packages(tmp_path)
    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: thing\nVersion: 1.0\n\nThe description. {SENTENCE}")
    (info / "README.md").write_text("a = [[1, 2], [3, 4]]; b = {5: 6}; c = (7, 8, 9); d = {'e': 10, 'f': 11, 'g': 12}")
    (info / "LICENSE").write_bytes(b"\xff\xfe not text " * 10)
    found = corpus.collect(1 << 20, [tmp_path])
    text = bytes(torch.cat((found.train, found.validation)).tolist()).decode()
    assert "The description." in text and "Version" not in text and "[3, 4]" not in text and "not text" not in text
    assert "thing" in found.about["packages"]  # type: ignore[operator]


def test_too_little_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="folders: got 0 files with text"):
        corpus.collect(1 << 20, [tmp_path])


# -- model ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(one_thread):
    model = small_llama.make_model(TINY, CPU)
    small_llama.train(model, text(), TINY, silent)
    return model


def text():
    return torch.tensor(list((SENTENCE * 20).encode()), dtype=torch.uint8)


def windows(count=4):
    return small_llama.spread(text(), count, TINY.context)


def test_training_learns(model):
    fresh = accuracy.losses(small_llama.make_model(TINY, CPU), windows())
    learnt = accuracy.losses(model, windows())
    assert fresh.shape == (4,) and fresh.mean() == pytest.approx(math.log(256), rel=0.1)
    assert learnt.mean() < 0.7 * fresh.mean()
    assert not model.training


def test_windows_hold_one_byte_more_than_the_context():
    assert windows(3).shape == (3, TINY.context + 1)
    assert windows(3)[0].tolist() == list(SENTENCE.encode())[:25]
    assert windows(3)[-1].tolist() == list((SENTENCE * 20).encode())[-25:]
    drawn = small_llama.draw(text(), 5, 10, torch.Generator().manual_seed(0))
    assert drawn.shape == (5, 11) and drawn.dtype == torch.int64
    assert all(bytes(row.tolist()).decode() in SENTENCE * 2 for row in drawn)


@torch.no_grad()
def test_attention_seen_from_inside_is_the_models_own(model):
    tokens = windows()[:, :-1]
    own = model(tokens, use_cache=False).logits
    layers = []

    def attention(layer, q, k, v):
        layers.append(layer)
        assert q.shape == (4, 4, 24, 64) and k.shape == v.shape == (4, 2, 24, 64)
        return small_llama.causal_attention(q, k, v)

    with small_llama.attention_through(model, attention):
        seen = model(tokens, use_cache=False).logits
    assert layers == [0, 1]
    torch.testing.assert_close(seen, own)
    model(tokens, use_cache=False)
    assert layers == [0, 1]  # only within the block


def test_a_perfect_format_costs_nothing_and_a_coarse_one_more_than_a_fine_one(model):
    samples = accuracy.capture(model, windows())
    exact = accuracy.losses(model, windows())
    worse = {}
    for name in ("fp16", "int8_tensor", "int4_g1"):
        variant = Variant(name, name)
        known = [calibrate(variant, sample, rotary=True) for sample in samples]
        worse[name] = float((accuracy.losses(model, windows(), variant, known) - exact).abs().max())
    assert worse["fp16"] < 1e-3 < worse["int4_g1"] and worse["int8_tensor"] < worse["int4_g1"]


@pytest.mark.parametrize(
    "variant",
    [
        Variant("int4_g4", "int4_g4"),
        Variant("int8_channel", "e4m3_head", percentile=99.9),
        Variant("int8_token_head", "bf16", smooth=True),
        Variant("fp16", "fp16"),
    ],
    ids=lambda variant: variant.name,
)
def test_decoding_token_by_token_gives_the_losses_of_all_tokens_at_once(model, variant):
    narrow = accuracy.in_dtype(model, torch.float16 if variant.k_format == "fp16" else torch.bfloat16)
    known = [calibrate(variant, sample, rotary=True) for sample in accuracy.capture(model, windows())]
    decoded, memory = accuracy.decode_losses(narrow, windows(2), variant, known)
    at_once = accuracy.losses(narrow, windows(2), variant, known)
    torch.testing.assert_close(decoded, at_once, atol=2e-2, rtol=0)
    assert "48 tokens of 2 sequences" in memory


def test_smoothing_in_the_model_leaves_exact_losses_alone(model):
    variant = Variant("fp16", "fp16", smooth=True)
    known = [calibrate(variant, sample, rotary=True) for sample in accuracy.capture(model, windows())]
    assert all(prepared.factors is not None and prepared.factors.std() > 0.05 for prepared in known)
    torch.testing.assert_close(
        accuracy.losses(model, windows(), variant, known), accuracy.losses(model, windows()), atol=1e-3, rtol=0
    )


# -- errors -----------------------------------------------------------------------------------------------------------


def synthetic_errors(name, **options):
    variant = Variant(name, name, **options)
    before, now = gaussian(256, CPU, 1), gaussian(256, CPU, 0)
    return (
        errors(variant, calibrate(variant, before, rotary=False), now),
        errors(variant, calibrate(variant, with_outliers(before), rotary=False), with_outliers(now)),
    )


def test_outliers_leave_exact_attention_as_it_is():
    sample = gaussian(256, CPU, 0)
    plains, hards = (accuracy.attend(s.q, s.k, s.v, s.positions) for s in (sample, with_outliers(sample)))
    for plain, hard in zip(plains, hards, strict=True):
        torch.testing.assert_close(plain, hard, rtol=1e-4, atol=1e-5)


def test_errors_are_those_of_the_formats_steps():
    for name, error in (
        ("fp16", 3e-4),
        ("bf16", 2.4e-3),
        ("int8_token_head", 9e-3),
        ("e5m2", 0.075),
        ("int4_g1", 0.14),
    ):
        assert synthetic_errors(name)[0]["error"] == pytest.approx(error, rel=0.2), name


def test_outlier_channels_hurt_shared_scales_and_smoothing_mends_it():
    for name in ("int4_g1", "int8_head", "int8_token_head"):
        plain, hard = synthetic_errors(name)
        mended = synthetic_errors(name, smooth=True)[1]
        assert hard["error"] > 5 * plain["error"] and hard["kl"] > 50 * plain["kl"], name
        assert mended["error"] < 1.2 * plain["error"] and mended["kl"] < 2 * plain["kl"], name
    for name in ("int8_channel", "e5m2"):  # a scale per channel, or none
        plain, hard = synthetic_errors(name)
        assert hard["error"] < 1.2 * plain["error"], name


def test_a_query_sees_no_key_after_it():
    sample = accuracy.Sample(
        torch.randn(1, 2, 2, 64), torch.randn(1, 5, 1, 64), torch.randn(1, 5, 1, 64), torch.tensor([0, 3])
    )
    log_weights, out = accuracy.attend(sample.q, sample.k, sample.v, sample.positions)
    assert (log_weights[0, :, 0, 1:] == -torch.inf).all() and (log_weights[0, :, 1, 4] == -torch.inf).all()
    torch.testing.assert_close(out[0, 0, 0], sample.v[0, 0, 0].double())
    assert errors(Variant("fp16", "fp16"), accuracy.Calibration(None, None, None), sample)["kl"] < 1e-5


def test_every_format_is_measured_and_every_variant_has_a_name_of_its_own():
    assert {v.k_format for v in VARIANTS if v.k_format == v.v_format and not v.percentile and not v.smooth} == set(
        FORMATS
    )
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    assert Variant("int4_g4", "int4_g4").bytes_per_token(128) == 160
    assert Variant("int8_token_head", "int4_g1").bytes_per_token(128) == 132 + 68


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(one_thread, tmp_path_factory):
    path = tmp_path_factory.mktemp("accuracy") / "accuracy.json"
    assert main(["accuracy", "--quick", "--device", "cpu", "--json", str(path)]) == 0
    return path


def test_a_quick_run_measures_everything(recorded):
    record = records.load(recorded)
    assert record["kind"] == "accuracy" and not record["failures"] and record["seconds"] > 0
    assert record["model"]["steps"] == small_llama.QUICK.max_steps == 20  # however slow the machine is
    assert [row["name"] for row in record["rows"]] == [variant.name for variant in VARIANTS]
    for row in record["rows"]:
        for part in ("gaussian", "outliers", "captured"):
            assert 0 < row[part]["error"] < 10 and row[part]["kl"] >= 0, row["name"]
        assert row["perplexity"] == pytest.approx(record["model"]["perplexity"], rel=0.05)
        assert row["decoded"]["difference"] < 0.02, row["name"]


def test_the_table_takes_its_place_and_the_figure_is_drawn(recorded, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    document = tmp_path / "accuracy.md"
    document.write_text("# Accuracy\n\n<!-- bench:accuracy -->\n<!-- /bench -->\n")
    assert main(["table", str(recorded), "--readme", str(document)]) == 0
    lines = document.read_text().splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + len(VARIANTS)
    assert any(line.startswith("CPU, torch") and "head_dim 64" in line for line in lines)
    capsys.readouterr()
    assert main(["table", str(recorded)]) == 0
    assert capsys.readouterr().out.startswith("| K and V | bytes | gaussian: error | KL |")
    (figure,) = plots.plot(records.load(recorded), tmp_path)
    assert figure.name == "accuracy.svg" and "int4_g4" in figure.read_text() and "smoothed" in figure.read_text()


def test_a_format_that_fails_to_decode_is_recorded_and_the_others_go_on(recorded, monkeypatch):
    recorder = records.Recorder(None, kind="accuracy")
    recorder.data["rows"] = json.loads(recorded.read_text())["rows"]
    for row in recorder.data["rows"]:
        del row["decoded"]
    tried = []

    def fails_once(model, windows, variant, known):
        tried.append(variant)
        if variant.name == "e5m2":
            raise RuntimeError("no such kernel")
        return torch.zeros(len(windows)), "memory"

    monkeypatch.setattr(accuracy, "decode_losses", fails_once)
    monkeypatch.setattr(accuracy, "losses", lambda model, windows, *rest: torch.zeros(len(windows)))
    model = small_llama.make_model(TINY, CPU)
    accuracy._decode_all(recorder, model, windows(2), accuracy.capture(model, windows(2)), silent)
    assert tried == list(VARIANTS)
    assert [failure["what"] for failure in recorder.data["failures"]] == ["e5m2"]
    assert sum("decoded" in row for row in recorder.data["rows"]) == len(VARIANTS) - 1


def test_numbers_are_short():
    from bench.accuracy_report import scientific

    assert [scientific(x) for x in (0, 0.0123, 0.00012, 3.14159, 150.2, 1e-9)] == [
        "0",
        "0.012",
        "1.2e-4",
        "3.1",
        "150",
        "1.0e-9",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert main(["accuracy", "--device", "cuda"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
