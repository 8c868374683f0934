"""Reports: what a terminal, the README and the figures show of a recorded run."""

import json

import pytest

from bench import plots, report
from bench import record as records
from bench.bars import judge


def test_the_text_holds_measurements_peers_absences_and_bars(record):
    record["bars"] = [verdict.as_dict() for verdict in judge(record)]
    lines = report.text(record).splitlines()
    assert lines[0] == "Test GPU, driver 1.0, commit 0123456789, 2026-01-02T03:04:05+00:00"
    header = next(line for line in lines if line.startswith("format"))
    assert "/ floor" in header and header.endswith("SDPA cudnn")
    bf16 = next(line for line in lines if line.startswith("bf16"))
    assert bf16.split()[-1] == "480.0" and "470.0" in bf16
    assert "FBGEMM (int4_g1): not installed: import fbgemm_gpu" in lines
    assert any(line.startswith("NOT MET") for line in lines)
    assert lines[-1] == f"{sum(bar['met'] for bar in record['bars'])} of {len(record['bars'])} bars met"


def test_numbers_align_to_the_right_and_words_to_the_left():
    assert report.aligned([["name", "us"], ["a", "1.5"], ["long", "-"], ["b", "123.0"]]) == [
        "name     us",
        "a       1.5",
        "long      -",
        "b     123.0",
    ]


def test_the_markdown_table_has_one_line_per_measured_row_and_says_where_from(record):
    table = report.markdown(record)
    lines = table.splitlines()
    assert lines[0].startswith("| KV cache | batch |") and lines[0].endswith("| SDPA cudnn, us |")
    assert len([line for line in lines if line.startswith("|")]) == 2 + 4
    assert "| bf16 | 512 | 5120 | 465.0 | **470.0** |" in table
    assert "Test GPU, driver 1.0, torch 2.13.0, commit 0123456789, 2026-01-02" in lines[-1]


def test_a_table_takes_its_place_in_a_document_and_leaves_the_rest(record):
    begin = report.mark("main")
    text = f"# Title\n\n{begin}\nearlier\n{report.MARK_END}\n\nbelow <!-- bench:decode-shapes -->x{report.MARK_END}\n"
    once = report.filled(text, begin, report.markdown(record))
    assert once.startswith(f"# Title\n\n{begin}\n| KV cache |") and "earlier" not in once
    assert once.endswith(f"{report.MARK_END}\n\nbelow <!-- bench:decode-shapes -->x{report.MARK_END}\n")
    assert report.filled(once, begin, report.markdown(record)) == once
    with pytest.raises(ValueError, match="text: got no <!-- bench:decode-ladder -->"):
        report.filled(text, report.mark("ladder"), "table")


def test_a_suite_that_was_not_run_is_named(record):
    with pytest.raises(ValueError, match="suite: got 'ladder'"):
        report.markdown(record, "ladder")


def test_a_failed_row_shows_as_missing_not_as_zero(record):
    del record["rows"][1]["us"], record["rows"][1]["floor_ratio"], record["rows"][1]["gb_per_s"]
    line = next(line for line in report.text(record).splitlines() if " B=1 " in line)
    assert line.split()[-8:] == ["4.0", "-", "-", "-", "-", "-", "-", "-"]  # floor us, then nothing measured, no peer


def test_figures_are_drawn_from_what_is_there(record, tmp_path):
    pytest.importorskip("matplotlib")
    record["ladder"] = [
        {
            "kv_format": "int4_g1",
            "name": "B=512",
            "shape": {"batch": 512},
            "rungs": [
                {"title": "Prefetch V", "on_us": 100.0, "off_us": 150.0},
                {"title": "Swizzle P", "how": "not in shared memory"},
            ],
        }
    ]
    files = plots.plot(record, tmp_path)
    assert [path.name for path in files] == [
        "decode_time.svg",
        "decode_ratio.svg",
        "decode_shapes.svg",
        "decode_ladder.svg",
    ]
    times = files[0].read_text()
    assert "SDPA cudnn" in times and "streaming floor, bf16" in times and "commit 0123456789" in times
    assert "Prefetch V" in files[3].read_text() and "Swizzle P" not in files[3].read_text()


def test_the_same_record_draws_the_same_bytes(record, tmp_path):
    pytest.importorskip("matplotlib")
    first = [path.read_bytes() for path in plots.plot(record, tmp_path / "a")]
    second = [path.read_bytes() for path in plots.plot(record, tmp_path / "b")]
    assert first == second


def test_the_record_is_on_disk_after_every_row_and_survives_failures(tmp_path, record):
    path = tmp_path / "deep" / "run.json"
    recorder = records.Recorder(path, kind="decode", samples=15)
    for row in record["rows"]:
        recorder.add_row(row)
        assert len(json.loads(path.read_text())["rows"]) == len(recorder.data["rows"])
    recorder.add_failure("a row", RuntimeError("went wrong"))
    loaded = records.load(path)
    assert loaded["failures"][0]["what"] == "a row" and "went wrong" in loaded["failures"][0]["error"]
    assert loaded["bars"] and loaded["environment"]["versions"]["torch"]
    assert not list(path.parent.glob("*.partial"))


def test_a_file_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="got schema 99, want 1"):
        records.load(path)
