"""What INT4 caches cost in perplexity, by the records of `bench accuracy`: no table shows their speed without it.

A record's rows are found by columns that share a scale, since head_dim differs: 32 of them are int4_g4 at head_dim 128
and int4_g2 at 64.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import RESULTS, load
from cute_kernels.formats.kv import FORMATS

HEAD_DIM = 128  # of the models in tables of speed
WITH_INT4 = "|".join(name for name in FORMATS if not name.startswith("int4"))
INT4 = re.compile(rf"(?:\b({WITH_INT4}) ?[,+] ?)?\bint4_g([1248])\b")


@dataclass(frozen=True, order=True)
class Cache:
    """K's format and V's INT4 groups; ``k_format`` is None where K is as V is."""

    k_format: str | None
    groups: int

    @property
    def name(self) -> str:
        return f"{self.k_format + ',' if self.k_format else ''}int4_g{self.groups}"

    @property
    def columns(self) -> int:
        """That share a scale, in tables of speed."""
        return HEAD_DIM // self.groups

    def at(self, head_dim: int) -> Cache | None:
        """What has as many columns to a scale at another head_dim; None if nothing does."""
        groups, rest = divmod(self.groups * head_dim, HEAD_DIM)
        return None if rest or not groups else Cache(self.k_format, groups)


def caches_in(texts: Iterable[str]) -> list[Cache]:
    """The INT4 caches that texts name, each once."""
    found = {Cache(match[1], int(match[2])) for text in texts for match in INT4.finditer(text)}
    return sorted(found, key=lambda cache: (cache.k_format or "", cache.groups))


@dataclass(frozen=True)
class Model:
    """A model whose perplexity is recorded: what it is called, its head_dim, and the increase in per cent by cache."""

    name: str
    head_dim: int
    increases: dict[Cache, float]

    def measured_as(self, cache: Cache) -> Cache | None:
        """The recorded cache that stands for one: with as many columns to a scale, else the next finer one."""
        same = cache.at(self.head_dim)
        least = 0 if same is None else same.groups
        finer = [Cache(cache.k_format, groups) for groups in (1, 2, 4, 8) if groups > least]
        return next((each for each in (same, *finer) if each in self.increases), None)

    def cost(self, cache: Cache) -> str | None:
        """In per cent, beside 16-bit caches; None if nothing is recorded. Fewer columns to a scale cost less: where as
        many were not measured, "more than" says so."""
        measured = self.measured_as(cache)
        if measured is None:
            return None
        more = "" if measured == cache.at(self.head_dim) else "more than "
        return f"{more}{self.increases[measured]:+.2f} %"

    def said(self, cache: Cache) -> str | None:
        """The cost with the format that was measured, by its own name; None if nothing is recorded."""
        cost, measured = self.cost(cache), self.measured_as(cache)
        return None if measured is None else f"{cost} ({measured.name}, head_dim {self.head_dim}, {self.name})"


def model_of(record: dict[str, Any], name: str) -> Model:
    """A model from a record of `bench accuracy`; rows that are smoothed, centred or calibrated are left out, and those
    of weights and of grids that no cache has."""
    increases = {}
    for row in record["rows"]:
        if row.get("k_format") not in FORMATS:
            continue
        if row["name"] in (row["k_format"], f"{row['k_format']} + {row['v_format']}"):
            for cache in caches_in([row["name"]]):
                increases[cache] = row["increase_percent"]
    return Model(name, record["model"]["head_dim"], increases)


@functools.cache
def models(results: Path = RESULTS) -> tuple[Model, ...]:
    """Those whose records are kept."""
    named = (("accuracy", "a small trained model"), ("model_accuracy", "SmolLM2-135M"))
    return tuple(model_of(load(results / f"{file}.json"), name) for file, name in named)


def beside(record: dict[str, Any]) -> str:
    """A sentence with the cost of every INT4 cache that a record's rows name; "" if they name none."""
    texts = [value for row in record.get("rows", []) for value in row.values() if isinstance(value, str)]
    return sentence(caches_in(texts), models())


def sentence(caches: Iterable[Cache], measured: Iterable[Model]) -> str:
    """What caches cost in the perplexity of models, in words; "" for none."""
    said = []
    for cache in caches:
        known = [text for text in (model.said(cache) for model in measured) if text is not None]
        said.append(f"a scale per {cache.columns} columns ({cache.name} here): {' and '.join(known) or 'not measured'}")
    return f"Perplexity against 16-bit caches, with {'; with '.join(said)}." if said else ""
