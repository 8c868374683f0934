"""Dynamic symbols are read as the dynamic linker sees them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cute_kernels.runtime.elf import dynamic_symbols

SOURCE = """
extern int from_elsewhere(int);
extern int maybe(int) __attribute__((weak));
static int hidden(int x) { return x + 1; }
int exported(int x) { return from_elsewhere(hidden(x)) + (maybe ? maybe(x) : 0); }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="makes a library with cc")
def test_exported_and_wanted_symbols_of_a_library(tmp_path: Path):
    (tmp_path / "one.c").write_text(SOURCE)
    library = tmp_path / "one.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-nostdlib", "-o", library, tmp_path / "one.c"], check=True)
    symbols = dynamic_symbols(library)
    assert symbols.exported >= {"exported"} and "hidden" not in symbols.exported
    assert symbols.wanted == {"from_elsewhere"}


def test_another_file_is_refused(tmp_path: Path):
    (tmp_path / "text").write_text("no library at all")
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        dynamic_symbols(tmp_path / "text")
