"""Processes that start side by side and are timed one at a time.

An engine takes a minute to start and seconds to time. Processes share their starts; each waits until all have started,
and then for its turn, so that nothing else runs on the machine while it is timed.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.2


@dataclass(frozen=True)
class Turn:
    """One process's side: files in a folder that it shares with `in_turns`."""

    folder: Path

    def wait(self) -> None:
        """Says that this process has started, and returns when it is its turn."""
        (self.folder / "started").touch()
        while not (self.folder / "turn").exists():
            time.sleep(POLL_S)


def in_turns(processes: Mapping[Path, subprocess.Popen[bytes]], limit_s: float, say: Callable[[Path], None]) -> None:
    """Waits until every process has started or ended, then gives turns in the order of the mapping.

    processes: by the folder of each one's `Turn`. limit_s: for all of them; those that still run then are killed.
    say: called for each when it has ended.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not all(_has_started(folder, process) for folder, process in processes.items()):
        time.sleep(POLL_S)
    for folder, process in processes.items():
        (folder / "turn").touch()
        try:
            process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        say(folder)


def _has_started(folder: Path, process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None or (folder / "started").exists()
