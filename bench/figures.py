"""What all figures share: colours of peers, and how a figure becomes a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Record = dict[str, Any]

PEER_COLOURS = ("#b5651d", "#c94c4c", "#8e6c8a", "#7f7f7f", "#c0a000", "#4c9fc9")


def save(figure: Any, record: Record, path: Path) -> Path:
    """Writes a figure with a note of where its record was measured, and closes it; returns ``path``."""
    import matplotlib.pyplot as plt

    environment = record["environment"]
    note = f"{environment['gpu'] or 'CPU'}, commit {str(environment['commit'])[:10]}, {str(environment['date'])[:10]}"
    figure.text(0.995, 0.005, note, ha="right", va="bottom", fontsize=6, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")  # long labels are not cut off
    plt.close(figure)
    return path
