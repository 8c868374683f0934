"""`cute-kernels calibrate`, on a model and a tokenizer of this test's own."""

import argparse
import inspect
import json
from typing import Any

import pytest
import torch

from cute_kernels.__main__ import main
from cute_kernels.formats.kv import LayerFormats, format_pair
from cute_kernels.integrations import calibrate_command
from cute_kernels.integrations.transformers import accelerate
from cute_kernels.kv_cache.constants import CacheConstants
from tests.integrations.architectures import DECODERS, VOCABULARY

pytest.importorskip("safetensors")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A saved model whose tokens are words w0, w1, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    DECODERS["llama"].build(torch.bfloat16).save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def write_text(path, count):
    path.write_text(" ".join(f"w{i}" for i in torch.randint(1, VOCABULARY, (count,)).tolist()))
    return path


def test_a_directory_without_a_model_is_named(tmp_path, capsys):
    text = write_text(tmp_path / "text.txt", 9)
    wanted = ["--kv-format", "int8_token_head", "-o", str(tmp_path / "c.safetensors")]
    assert main(["calibrate", str(tmp_path), "--text", str(text), *wanted]) == 1
    assert f"MODEL: got the directory {tmp_path} without config.json" in capsys.readouterr().err


def test_a_model_is_calibrated_on_text(directory, tmp_path, capsys):
    texts = [write_text(tmp_path / name, 150) for name in ("one.txt", "two.txt")]
    out = tmp_path / "constants.safetensors"
    options = ["--kv-format", "int8_head,int4_g4", "--window", "64", "--windows", "3", "--device", "cpu"]
    assert main(["calibrate", str(directory), "--text", *map(str, texts), "-o", str(out), *options]) == 0
    said = capsys.readouterr().out
    assert f"{out}: 2 layers" in said and "one.txt, two.txt" in said
    read = CacheConstants.load(out)
    assert read.num_layers == 2 and len(read.scales) == 2
    assert read.about["tokens"] == "192" and read.about["method"] == "center factors rotation"
    assert [(one.k_rotation, one.v_rotation) for one in read.transforms if one] == [(64, 1)] * 2


def test_constants_are_by_default_those_of_the_cache_that_accelerate_makes_by_default(directory, tmp_path, capsys):
    """Keys in INT4 lose answers, with constants too (docs/accuracy.md)."""
    wanted = inspect.signature(accelerate).parameters["kv_format"].default
    assert wanted == ("int8_token_head", "int4_g4")
    text, out = write_text(tmp_path / "text.txt", 40), tmp_path / "constants.safetensors"
    assert main(["calibrate", str(directory), "--text", str(text), "-o", str(out), "--device", "cpu"]) == 0
    read = CacheConstants.load(out)
    assert read.about["kv_format"] == str(wanted)
    assert [(one.k_rotation, one.v_rotation) for one in read.transforms if one] == [(64, 1)] * 2  # INT4 has 16 columns
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    assert f"(default: {','.join(wanted)})" in " ".join(capsys.readouterr().out.split())


def test_values_are_had_for_the_asking(directory, tmp_path):
    text, out = write_text(tmp_path / "text.txt", 40), tmp_path / "constants.safetensors"
    options = ["--kv-format", "int4_g1", "--values", "--device", "cpu"]
    assert main(["calibrate", str(directory), "--text", str(text), "-o", str(out), *options]) == 0
    first = CacheConstants.load(out).transforms[0]
    assert first is not None and first.v_rotation == 64 and first.v_factor is not None


def test_values_may_have_factors_alone(directory, tmp_path):
    text, out = write_text(tmp_path / "text.txt", 40), tmp_path / "constants.safetensors"
    options = ["--kv-format", "int8_token_head,int4_g2", "--values", "factors", "--device", "cpu"]
    assert main(["calibrate", str(directory), "--text", str(text), "-o", str(out), *options]) == 0
    read = CacheConstants.load(out)
    assert read.about["method"] == "center factors rotation value factors"
    assert all(one is not None and one.v_rotation == 1 and one.v_factor is not None for one in read.transforms)


def test_parts_may_be_left_out(directory, tmp_path):
    text, out = write_text(tmp_path / "text.txt", 40), tmp_path / "constants.safetensors"
    options = ["--no-rotation", "--no-factors", "--device", "cpu"]
    assert main(["calibrate", str(directory), "--text", str(text), "-o", str(out), *options]) == 0
    first = CacheConstants.load(out).transforms[0]
    assert first is not None and set(first.arrays) == {"k_center"} and first.k_rotation == 1


def test_a_budget_of_bytes_gives_formats_by_layer_with_a_report(directory, tmp_path, capsys):
    text, out = write_text(tmp_path / "text.txt", 400), tmp_path / "mix.json"
    options = ["--budget", "0.42", "--window", "48", "--windows", "4", "--device", "cpu", "--needles", "2"]
    assert main(["calibrate", str(directory), "--text", str(text), "-o", str(out), *options]) == 0
    said = capsys.readouterr().out
    assert "layer 2 of 2: KL bf16 0.0e+00" in said and "chosen" in said and "time of a step: not measured" in said
    formats = LayerFormats.load(out)
    report = json.loads(json.dumps(formats.report))
    assert len(formats) == 2 and report["share"] <= 0.42 and report["needles"]["of"] <= 2
    constants = CacheConstants.load(tmp_path / "mix.safetensors")
    assert constants.num_layers == 2 and " in " in constants.about["kv_format"]
    again = ["--kv-format", str(out), "--window", "48", "--device", "cpu"]
    second = tmp_path / "second.safetensors"
    assert main(["calibrate", str(directory), "--text", str(text), "-o", str(second), *again]) == 0
    assert CacheConstants.load(second).num_layers == 2


def test_the_time_of_a_step_is_in_the_report(tmp_path, capsys):
    model, pair = DECODERS["llama"].build(torch.bfloat16), format_pair(("int8_token_head", "int4_g2"))
    one = {"share": 0.4, "kl": 0.1, "agreement": 0.9}
    report: Any = {"bytes_per_token": 1, "all_layers": {"mix": one}, "chosen": "mix", "needles": {"found": 0, "of": 0}}
    formats, none = LayerFormats((pair, pair), report), CacheConstants((None, None))
    timed = calibrate_command.with_step(formats, model, none, torch.randint(1, VOCABULARY, (2, 20)))
    assert timed.report["step_requests"] == [2, 20] and timed.layers == formats.layers
    calibrate_command._write_formats(tmp_path / "mix.json", timed, none)
    assert LayerFormats.load(tmp_path / "mix.json").report["step_ms"] == timed.report["step_ms"]
    assert f"time of a step: {timed.report['step_ms']:.2f} ms" in capsys.readouterr().out


def test_needles_are_told_before_they_are_asked_for():
    def letters(text):
        return {"input_ids": [ord(char) for char in text]}

    for needle in calibrate_command.needles_of(letters, torch.full((900,), 32), 200, 3):
        told = "".join(map(chr, needle.tokens.tolist()))
        answer = told[-needle.answer :]
        assert len(needle.tokens) == 200 and told.count(answer) == 2 and answer.isdecimal()
        assert told[: -needle.answer].endswith(" is ") and told[-needle.asked - needle.answer :].startswith("\nWhat")


@pytest.mark.parametrize("wrong", ["model", "text", "short", "binary"])
def test_what_cannot_be_read_is_an_error_that_names_it(directory, tmp_path, capsys, wrong):
    text, model = write_text(tmp_path / "text.txt", 15 if wrong == "short" else 40), directory
    if wrong == "binary":
        text.write_bytes(b"\xff\xfe\x00")
    if wrong == "model":
        model = tmp_path / "none"
    if wrong == "text":
        text = tmp_path / "none.txt"
    out = tmp_path / "constants.safetensors"
    assert main(["calibrate", str(model), "--text", str(text), "-o", str(out), "--device", "cpu"]) == 1
    wanted = {"model": "none", "text": "none.txt", "short": "got 15 tokens, want at least 16", "binary": "no UTF-8"}
    said = capsys.readouterr().err
    assert said.startswith("error: ") and wanted[wrong] in said and not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "none.txt"], "--text: got none.txt, which does not exist"),
        (["--budget", "0.4"], "--output: got"),
        (
            ["-o", "/nowhere/constants.safetensors"],
            "--output: got /nowhere/constants.safetensors, want a file in a dir",
        ),
        (["-o", "/"], "--output: got /, want a file"),
        (["--budget", "42"], "--budget: got 42, want a share of BF16's bytes"),
        (["--budget", "nan"], "--budget: got nan, want a share of BF16's bytes"),
        (["--budget", "0.4", "--kv-format", "int8"], "--kv-format: got it with --budget"),
        ([], "MODEL: got /nowhere, which does not exist"),
    ],
)
def test_what_needs_no_model_to_be_seen_is_refused_before_one_is_loaded(options, message, tmp_path, capsys):
    text, out = write_text(tmp_path / "text.txt", 10), tmp_path / "constants.safetensors"
    assert main(["calibrate", "/nowhere", "--text", str(text), "-o", str(out), *options]) == 1
    assert message in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("int4", "int4_g4"), ("int8_head,int4_g4", ("int8_head", "int4_g4")), ("fp8,fp8", "e4m3_token_head")],
)
def test_formats_are_read(text, wanted):
    assert calibrate_command.kv_format(text) == wanted


@pytest.mark.parametrize("text", ["int3", "int4,int4,int4", "", "int4,", "/nowhere/mix.json"])
def test_what_is_no_format_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        calibrate_command.kv_format(text)


@pytest.mark.parametrize(
    ("tokens", "length", "most", "starts"),
    [(100, 20, 9, [0, 20, 40, 60, 80]), (100, 20, 2, [0, 40]), (30, 64, 4, [0]), (199, 20, 3, [0, 60, 120])],
)
def test_windows_are_spread_over_the_text(tokens, length, most, starts):
    windows = calibrate_command.windows_of(torch.arange(tokens), length, most)
    assert windows[:, 0].tolist() == starts
    assert windows.shape[1] == min(length, tokens) and (windows.diff(dim=1) == 1).all()
