"""Real text that every machine has: the documentation inside its installed Python packages.

Docstrings, READMEs, package descriptions and licences, cleaned, each paragraph once. What a machine has installed
decides what is found, but the choice among it is fixed: files come in the order of a hash of their name, and the same
hash sets some aside for validation, so that no file is in both parts.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.environment import ROOT

VALIDATION_SHARE = 16  # one file in so many
_SUFFIXES = (".py", ".md", ".rst")
_NAMES = re.compile(r"(METADATA|LICEN[CS]E|COPYING|README|NOTICE)(\.txt)?", re.IGNORECASE)
# Tests are no prose; other interpreters' packages below the standard library are not this machine's choice.
_SKIPPED_FOLDERS = {"__pycache__", "tests", "test", "site-packages", "dist-packages"}
_DOCSTRING = re.compile(r'^[ \t]*[rRuU]?("""|\'\'\')(?P<text>.*?)\1', re.MULTILINE | re.DOTALL)
_MAX_FILE_BYTES = 1 << 20
_LEAST_PARAGRAPH, _LEAST_PROSE = 60, 0.8


@dataclass(frozen=True)
class Corpus:
    """Text as bytes. train, validation: uint8 [bytes]. about: JSON-able, what it was made of."""

    train: torch.Tensor
    validation: torch.Tensor
    about: dict[str, object]


def collect(max_bytes: int, folders: Iterable[Path] | None = None) -> Corpus:
    """At most about ``max_bytes`` of text from below the folders, by default wherever Python packages lie.

    Raises ValueError if there is not enough text to hold some back for validation.
    """
    seen: set[str] = set()
    parts: dict[str, list[str]] = {"train": [], "validation": []}
    packages: Counter[str] = Counter()
    total = files = 0
    for key, package, path in sorted(_files(package_folders() if folders is None else folders)):
        if total >= max_bytes:
            break
        text = clean(_read(path), seen)
        if text:
            parts["validation" if int(key[:8], 16) % VALIDATION_SHARE == 0 else "train"].append(text)
            packages[package] += len(text)
            total += len(text)
            files += 1
    data = {name: "\n\n".join(texts).encode() for name, texts in parts.items()}
    if not all(data.values()):
        raise ValueError(f"folders: got {files} files with text, want enough for training and validation")
    about = {
        "files": files,
        "train_bytes": len(data["train"]),
        "validation_bytes": len(data["validation"]),
        "sha256": hashlib.sha256(data["train"] + data["validation"]).hexdigest(),
        "packages": dict(packages.most_common(12)),
    }
    train, validation = (torch.frombuffer(bytearray(data[name]), dtype=torch.uint8) for name in parts)
    return Corpus(train, validation, about)


def package_folders() -> list[Path]:
    """Where Python finds its packages, this repository excepted."""
    places = [sysconfig.get_path("stdlib"), *(place for place in sys.path if place)]
    found = dict.fromkeys(Path(place).resolve() for place in places)
    return [path for path in found if path.is_dir() and path != ROOT and ROOT not in path.parents]


def clean(text: str, seen: set[str]) -> str:
    """The paragraphs of a text that are prose and not in ``seen``, to which they are added."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        paragraph = re.sub(r"[ \t]+$", "", paragraph.strip("\n"), flags=re.MULTILINE)
        if len(paragraph) < _LEAST_PARAGRAPH or paragraph in seen:
            continue
        prose = sum(char.isalpha() or char in " ,.\n" for char in paragraph)
        if prose >= _LEAST_PROSE * len(paragraph):
            seen.add(paragraph)
            kept.append(paragraph)
    return "\n\n".join(kept)


def _files(folders: Iterable[Path]) -> Iterator[tuple[str, str, Path]]:
    """(hash of the name, package, path) of every file that may hold text; a file below two folders comes once."""
    found = set()
    for folder in folders:
        for parent, names, files in os.walk(folder):
            names[:] = [name for name in names if name not in _SKIPPED_FOLDERS]
            for file in files:
                path = Path(parent, file)
                if (path.suffix in _SUFFIXES or _NAMES.fullmatch(file)) and path not in found:
                    found.add(path)
                    relative = path.relative_to(folder).as_posix()
                    yield hashlib.sha1(relative.encode()).hexdigest(), re.split("[/-]", relative)[0], path


def _read(path: Path) -> str:
    """A file's text; of Python files the docstrings, of package descriptions what follows the headers."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return ""
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    if path.suffix == ".py":
        return "\n\n".join(inspect.cleandoc(match["text"]) for match in _DOCSTRING.finditer(text))
    return text.partition("\n\n")[2] if path.name == "METADATA" else text
