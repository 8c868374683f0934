"""The report of `quantize_model`: the layers that it swapped, those that it left, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

_SHOWN_NAMES = 3  # of the layers that are left for one reason


@dataclass(frozen=True)
class ReportedLayer:
    """A layer in the report of `quantize_model`.

    Args:
        name: the layer's qualified name; its first name if the model uses the layer several times.
        kind: the name of the layer's class, before it was swapped.
        nbytes: the number of bytes of the layer's weights before quantisation.
        packed_nbytes: the number of bytes of its packed weights; 0 if it was not swapped.
        reason: why the layer was not swapped; "" if it was.
        counts: whether the report lists the layer as missed if it was not swapped. It does for layers that multiply
            with their weights, if `skip` does not name them.
        note: the layer's format, the kind of its products, and who chose them, such as "MXFP4, FP8 products as asked".
    """

    name: str
    kind: str
    nbytes: int
    packed_nbytes: int = 0
    reason: str = ""
    counts: bool = True
    note: str = ""


@dataclass(frozen=True)
class QuantizationReport:
    """The result of `quantize_model`; printing it gives a table.

    Args:
        quantized: the layers that are quantised now.
        left: the layers with weights of two or more dimensions that were not changed, each with its reason.
    """

    quantized: tuple[ReportedLayer, ...]
    left: tuple[ReportedLayer, ...]

    @property
    def summary(self) -> str:
        """The numbers and bytes of the layers that were quantised and of those that were not, in one line."""
        before, after = (sum(getattr(x, name) for x in self.quantized) for name in ("nbytes", "packed_nbytes"))
        left = sum(layer.nbytes for layer in self.left)
        return (
            f"quantised {len(self.quantized)} layers, {_size(before)} to {_size(after)}; "
            f"left {len(self.left)}, {_size(left)}"
        )

    @property
    def warning(self) -> str | None:
        """A warning for the user if no layer was quantised, or if more bytes were missed than quantised; else None. The
        missed layers are those with ``counts`` that were not quantised."""
        missed = [layer for layer in self.left if layer.counts]
        done, open_ = (sum(layer.nbytes for layer in layers) for layers in (self.quantized, missed))
        if self.quantized and done >= open_:
            return None
        reasons = "; ".join(_reasons(missed or self.left)) or "it has no layers with weights"
        if not self.quantized:
            return f"nothing is quantised: {reasons}"
        return f"most of the weights, {_size(open_)} of {_size(done + open_)}, stay as they are: {reasons}"

    def __str__(self) -> str:
        kinds = Counter((layer.kind, layer.note) for layer in self.quantized)
        done = [f"  {count} {kind}{': ' if note else ''}{note}" for (kind, note), count in sorted(kinds.items())]
        return "\n".join([self.summary, *done, *(f"  left: {line}" for line in _reasons(self.left))])


def _reasons(layers: tuple[ReportedLayer, ...] | list[ReportedLayer]) -> list[str]:
    """Returns a line for each reason and class, those with the most bytes first."""
    groups: dict[tuple[str, str], list[ReportedLayer]] = {}
    for layer in layers:
        groups.setdefault((layer.kind, layer.reason), []).append(layer)
    ordered = sorted(groups.items(), key=lambda item: -sum(layer.nbytes for layer in item[1]))
    lines = []
    for (kind, reason), members in ordered:
        names = ", ".join(layer.name for layer in members[:_SHOWN_NAMES])
        more = f" and {len(members) - _SHOWN_NAMES} more" if len(members) > _SHOWN_NAMES else ""
        lines.append(f"{kind} {names}{more} ({_size(sum(layer.nbytes for layer in members))}): {reason}")
    return lines


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
