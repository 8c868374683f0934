"""The bank model against the GPU's own shared-memory counters, access by access."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.runtime import native
from layouts.patterns import ACCESSES

REPOSITORY = Path(__file__).parents[2]
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"


def find_ncu() -> str | None:
    """Nsight Compute: on PATH, or in a CUDA toolkit's usual place."""
    candidates = [shutil.which("ncu"), "/usr/local/cuda/bin/ncu"]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


@pytest.fixture(scope="module")
def counters():
    """Per launch, in order: {metric: value}."""
    ncu = find_ncu()
    if ncu is None:
        pytest.skip("ncu (Nsight Compute) is not installed")
    if native.dsl_version() is None:
        pytest.skip("the accesses are compiled as they are replayed, which needs nvidia-cutlass-dsl")
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name", "regex:kernel_cutlass", "--metrics", f"{WAVEFRONTS},{CONFLICTS}"]
    command += [sys.executable, "-m", "tests.gpu.bank_replay"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        pytest.skip("this machine does not allow GPU performance counters")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    rows = [row for row in csv.DictReader(lines[start:]) if row["ID"].isdigit()]
    return [{metric: float(row[metric].replace(",", "")) for metric in (WAVEFRONTS, CONFLICTS)} for row in rows]


def test_every_access_was_counted(counters):
    assert len(counters) == len(ACCESSES) >= 20


def test_model_predicts_the_wavefronts_that_the_hardware_counts(counters):
    from tests.gpu.bank_replay import REPEATS

    table, wrong = [], []
    for access, counted in zip(ACCESSES.values(), counters, strict=True):
        report = access.report()
        measured = counted[WAVEFRONTS] / REPEATS
        line = (
            f"{access.name:28} {access.kind:8} {access.width:2} B: model {report.wavefronts:2} wavefronts, "
            f"counted {measured:g}; conflicts: model {report.conflicts}, counted {counted[CONFLICTS] / REPEATS:g}"
        )
        table.append(line)
        # The replay's kernel itself costs one wavefront in all, whatever it repeats.
        if measured != report.wavefronts + 1 / REPEATS or counted[CONFLICTS] / REPEATS != report.conflicts:
            wrong.append(line)
    print("\n".join(table))
    assert not wrong, "\n".join(wrong)
