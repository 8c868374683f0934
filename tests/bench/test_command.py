"""The command line: `python -m bench`."""

import json

import pytest
import torch

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
