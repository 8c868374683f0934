"""The command line: `python -m bench`."""

import json

import pytest
import torch

from bench import record as records
from bench.__main__ import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_timing_without_a_gpu_is_refused_in_words(capsys):
    assert main(["decode"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_table_and_plot_read_a_recorded_run(record, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.json"
    path.write_text(json.dumps(record))
    assert main(["table", str(path)]) == 0
    assert capsys.readouterr().out.startswith("| KV cache |")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:decode -->\n<!-- /bench -->\n")
    assert main(["table", str(path), "--readme", str(readme)]) == 0
    assert readme.read_text().startswith("<!-- bench:decode -->\n| KV cache |")
    assert main(["plot", str(path), "--folder", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "decode_time.svg").is_file()
    readme.write_text("no marks")
    for given, words in ((readme, "want exactly these marks"), (tmp_path / "none.md", "No such file")):
        assert main(["table", str(path), "--readme", str(given)]) == 2
        assert words in capsys.readouterr().err
    assert main(["table", str(path), "--suite", "none"]) == 2
    assert "suite: got 'none', want one that the record has" in capsys.readouterr().err


RECORDS = [path for path in sorted(records.RESULTS.glob("*.json")) if path.name != "versions.json"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_is_shown_or_refused_in_words(path, capsys):
    """Studies are refused, and suites that a record has not."""
    status, said = main(["table", str(path)]), capsys.readouterr()
    if status == 0:
        assert len(said.out.splitlines()) > 3 and not said.err
    else:
        assert status == 2 and said.err.startswith(("record: got", "suite: got")) and not said.out


def test_a_table_that_no_page_holds_is_printed_alone(tmp_path, capsys):
    path = records.RESULTS / "append_options.json"
    assert main(["table", str(path)]) == 0
    assert "K centred" in capsys.readouterr().out
    assert main(["table", str(path), "--readme", str(tmp_path / "page.md")]) == 2
    assert "no page holds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "No such file"), ("{", "Expecting property name"), ("[]", "got schema None, want 1"), ("{}", "got schema")],
)
@pytest.mark.parametrize("command", [["table"], ["plot"], ["linear", "--peers-from"]], ids=" ".join)
def test_what_is_no_recorded_run_is_refused_in_words(command, text, words, tmp_path, capsys):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main([*command, str(path)])
    said = capsys.readouterr().err
    assert f"got {path}, want a recorded run" in said and words in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("demo --steps 0", "argument --steps: got 0, want a number of at least 1"),
        ("demo --prompt /there/is/none", "argument --prompt: got /there/is/none, want a file with text in it"),
        ("demo --prompt /dev/null", "argument --prompt: got /dev/null, want"),
        ("demo --format int8_head", "argument --format: got 'int8_head', want one of"),
        ("decode --batches 1 x", "argument --batches: got x, want a number of at least 1"),
        ("linear --rows 8 --samples 0", "argument --samples: got 0, want"),
        ("moe --tokens 1.5", "argument --tokens: got 1.5, want"),
        ("decode --formats int4", "argument --formats: invalid choice: 'int4'"),
        ("append --formats int4", "argument --formats: invalid choice: 'int4'"),
        ("accuracy --minutes=-1", "argument --minutes: got -1, want a number of minutes, such as 2.5"),
        ("accuracy --minutes nan", "argument --minutes: got nan, want"),
        ("accuracy --minutes inf", "argument --minutes: got inf, want"),
        ("accuracy --minutes few", "argument --minutes: got few, want"),
    ],
)
def test_arguments_that_make_no_run_are_refused_by_name(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert said in capsys.readouterr().err


def test_a_peer_that_there_is_not_cannot_be_left_out(capsys):
    assert main(["moe", "--without", "Marlin"]) == 2
    assert capsys.readouterr().err == "--without: got 'Marlin', want one of torch grouped bf16, Marlin MoE\n"


def test_places_that_cannot_be_written_are_said_before_anything_is_measured(record, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("bench.accuracy.run", lambda *arguments, **options: pytest.fail("measured"))
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "run.json"
    assert main(["accuracy", "--quick", "--device", "cpu", "--json", str(place)]) == 2
    assert f"--json {place}: " in capsys.readouterr().err
    path = tmp_path / "run.json"
    path.write_text(json.dumps(record))
    assert main(["plot", str(path), "--folder", str(tmp_path / "file")]) == 2
    assert f"--folder {tmp_path / 'file'}: " in capsys.readouterr().err
