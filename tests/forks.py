"""Programs that tests run in forks of one process that has imported PyTorch, which takes longer than most of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARENT = """
import gc, os, signal, sys
import torch
gc.freeze()
for line in sys.stdin:
    folder, program, arguments, environment, path = eval(line)
    if not (child := os.fork()):
        for number, ending in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, ending), os.O_WRONLY | os.O_CREAT), number)
        signal.alarm(600)
        sys.argv[:], sys.path[1:1] = ["-c", *arguments], path
        os.environ.update(environment)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
del child, ending, number, folder, arguments, environment, path, line
exec(compile(program, "<string>", "exec"))
"""
"""The collector leaves alone what the parent has, so memory stays shared.

A fork leaves the loop and ends as programs of `python -c` do: with all that is printed and run at their end."""


class Programs:
    """Runs each in a process of its own, where nothing of this project's, nor of the compiler's, is imported yet."""

    def __init__(self, parent: subprocess.Popen[str], scratch: Path) -> None:
        self.parent, self.scratch = parent, scratch

    def run(self, program: str, *arguments: str, path: Path | None = None, **environment: str) -> str:
        """Returns what a program prints that finds `path`'s modules; fails with its stderr if it does not end well."""
        assert self.parent.stdin is not None and self.parent.stdout is not None
        folder = tempfile.mkdtemp(dir=self.scratch)
        given = folder, program, arguments, {**os.environ, **environment}, [str(path)] if path else []
        print(repr(given), file=self.parent.stdin, flush=True)
        code = self.parent.stdout.readline().strip()
        assert code == "0", f"{code or 'the parent ended'}: {(Path(folder) / 'err').read_text()}"
        return (Path(folder) / "out").read_text().strip()


@contextmanager
def of_one_process(root: Path) -> Iterator[Programs]:
    """Programs run in `root`, whose modules they find, until the block ends."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", PARENT]
        parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment
        )
        with parent:
            yield Programs(parent, Path(scratch))
            parent.communicate()
