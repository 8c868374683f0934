"""Peers of linear layers that were timed by another process: libraries that do not load, or do not fit, side by side.

What a row takes over from such a run is a peer's time, and our own and the floor's from beside it: a peer is compared
with what was timed in turn with it, never with another process's clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
SAME = ("gpu", "gpu_uuid", "driver", "cuda", "commit", "dirty")  # of the environment


def check(earlier: Record, record: Record) -> None:
    """ValueError unless a run was one of linear layers, on this GPU, of this commit, by this protocol."""
    pairs = {
        "kind": (earlier.get("kind"), record.get("kind")),
        "samples": (earlier.get("samples"), record.get("samples")),
    }
    pairs |= {name: (earlier["environment"].get(name), record["environment"].get(name)) for name in SAME}
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise ValueError(f"peers_from: got a run with {name} {found}, want {wanted}, as of this run")


def about(earlier: Record) -> dict[str, Any]:
    """What a record says of a run that its peers come from."""
    return {name: earlier.get(name) for name in ("environment", "command", "seconds", "failures")}


def with_peers(row: dict[str, Any], earlier: Record) -> dict[str, Any]:
    """``row`` with the times of peers that it lacks and the same row of another run has."""
    for other in earlier["linear"]:
        if (other["format"], other["shape"]) == (row["format"], row["shape"]):
            taken = {
                name: {"us": peer["us"], "beside": {"us": other["us"]["median_us"], "floor_us": other["floor"]["us"]}}
                for name, peer in other["peers"].items()
                if peer["us"] is not None and row["peers"].get(name, {"us": None})["us"] is None
            }
            unknown = {name: peer for name, peer in other["peers"].items() if name not in row["peers"]}
            return row | {"peers": row["peers"] | unknown | taken}
    return row
