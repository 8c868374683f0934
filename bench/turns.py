"""Processes that start side by side and are timed one at a time, several times each.

An engine takes a minute to start and seconds to time. Processes share their starts; each waits until all have started,
and then for its turns, so that nothing else runs on the machine while it is timed. What a process takes in one turn is
much alike, and may be half as much again as in another: the host's part depends on the core that it runs on.
"""

from __future__ import annotations

import functools
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

    def wait(self, number: int) -> None:
        """Says that this process has started, and returns when it is its turn."""
        (self.folder / "started").touch()
        while not (self.folder / f"turn{number}").exists():
            time.sleep(POLL_S)

    def end(self, number: int) -> None:
        """Lets the others have theirs."""
        (self.folder / f"ended{number}").touch()


def in_turns(
    processes: Mapping[Path, subprocess.Popen[bytes]], limit_s: float, say: Callable[[Path], None], turns: int = 1
) -> None:
    """Waits until every process has started or ended, then gives turns in the order of the mapping.

    processes: by the folder of each one's `Turn`. limit_s: for all of them; those that still run then are killed.
    say: called for each when it has ended. turns: of each; a process ends in its last one.
    """
    end = time.monotonic() + limit_s

    def wait(*, until: Callable[[], bool]) -> None:
        while time.monotonic() < end and not until():
            time.sleep(POLL_S)

    wait(until=lambda: all(_is_at(folder, process, "started") for folder, process in processes.items()))
    for number in range(turns - 1):
        for folder, process in processes.items():
            (folder / f"turn{number}").touch()
            wait(until=functools.partial(_is_at, folder, process, f"ended{number}"))
    for folder, process in processes.items():
        (folder / f"turn{turns - 1}").touch()
        try:
            process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        say(folder)


def _is_at(folder: Path, process: subprocess.Popen[bytes], mark: str) -> bool:
    return process.poll() is not None or (folder / mark).exists()
