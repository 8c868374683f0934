"""How each weight format stores a tile of 64 output features: the conversion of its codes, and the positions of its
scales.

Codes of all formats are stored as in `layouts.weights.hopper`, since every conversion of these formats needs the
elements in the order of the default conversion. Scales of a tile are [groups, 64]: a row for each group of inputs, with
a scale for each feature. Scales of a second level, one fp32 number for each feature, are stored after these rows as if
they were more groups. A thread of the warpgroup multiplies two features, whose indices differ by 8, and loads the scale
of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from layouts.banks import report
from layouts.decode import CONVERSIONS
from layouts.fragments import wgmma_a
from layouts.patterns import Access
from layouts.proofs import Proof, prove
from layouts.weights import hopper

WARPS, LANES = 4, 32  # of a warpgroup
DRAWN_K = 128  # inputs of a tile that is proved and drawn


@dataclass(frozen=True)
class WeightTile:
    """A tile of a weight format.

    Args:
        name: the format's key.
        bits: bits of a code.
        conversion: the name of the codes' conversion in `layouts.decode.CONVERSIONS`.
        group_size: number of inputs that share a scale.
        scale_bytes: bytes of a stored scale.
        second_bytes: bytes of a feature's scale of the second level; 0 without a second level.
    """

    name: str
    bits: int
    conversion: str
    group_size: int
    scale_bytes: int
    second_bytes: int = 0

    @property
    def groups(self) -> int:
        """Groups of `DRAWN_K` inputs."""
        return DRAWN_K // self.group_size

    @property
    def rows(self) -> int:
        """The number of rows of 64 stored scales, of groups and of the second level."""
        return self.groups + self.second_bytes // self.scale_bytes

    @property
    def scale_tile_bytes(self) -> int:
        """Bytes of a tile's scales."""
        return self.rows * hopper.TILE_N * self.scale_bytes

    def scale_place(self, feature: int, group: int) -> int:
        """Returns the position of the scale of a feature and a group, in bytes from the tile's first scale. Groups from
        `groups` on are parts of the scales of the second level.
        """
        return (group * hopper.TILE_N + feature) * self.scale_bytes

    def features_of(self, warp: int, lane: int) -> tuple[int, int]:
        """Returns the indices, within the tile, of a thread's two features."""
        first = 16 * warp + lane // 4
        return first, first + 8

    def load(self, warp: int = 0, half: int = 0, group: int = 0) -> Access:
        """Returns the access with which a warp loads the scales of its lanes' first (``half`` 0) or second features."""
        places = [self.scale_place(self.features_of(warp, lane)[half], group) for lane in range(LANES)]
        note = f"scales of a warp's {('first', 'second')[half]} features in a group"
        return Access(f"{self.name}_scales", note, self.scale_bytes, "ld", tuple(places))

    def describe(self) -> str:
        """Describes the tile in a line: its codes and its scales."""
        second = f", {self.second_bytes} B for each feature" if self.second_bytes else ""
        scales = f"{self.scale_bytes} B of scale per {self.group_size} inputs{second}"
        return f"{self.bits}-bit codes by {self.conversion}, {scales}"

    # -- proofs --------------------------------------------------------------------------------------------------------

    def verify(self) -> tuple[Proof, ...]:
        """Proves the positions of codes and scales, and how many wavefronts their loads need; raises `ProofError` if a
        claim is not true.
        """
        return (
            hopper.prove_thread_load(self.bits, self.conversion),
            self._prove_order(),
            self._prove_bijection(),
            self._prove_features(),
            self._prove_banks(),
        )

    def _prove_order(self) -> Proof:
        default = CONVERSIONS[hopper.DEFAULT_CONVERSION[self.bits]].stored_order()
        same = CONVERSIONS[self.conversion].stored_order() == default
        return prove(same, "codes lie in the order of every format of as many bits", "matrix", len(default))

    def _prove_bijection(self) -> Proof:
        places = [
            self.scale_place(feature, row) + byte
            for row in range(self.rows)
            for feature in range(hopper.TILE_N)
            for byte in range(self.scale_bytes)
        ]
        whole = sorted(places) == list(range(self.scale_tile_bytes))
        return prove(whole, "features and groups are the bytes of the scales, each once", "exhaustive", len(places))

    def _prove_features(self) -> Proof:
        """Proves, by comparing with the A fragment of wgmma, which features a thread has."""
        threads = wgmma_a(16).coordinates()
        same = all(
            {int(m) for m, _ in threads[LANES * warp + lane]} == set(self.features_of(warp, lane))
            for warp in range(WARPS)
            for lane in range(LANES)
        )
        claim = "a lane loads the scales of the two features of its A fragment"
        return prove(same, claim, "exhaustive", WARPS * LANES)

    def _prove_banks(self) -> Proof:
        loads = [self.load(warp, half, row) for warp in range(WARPS) for half in (0, 1) for row in range(self.groups)]
        found = [report(load.addresses, load.width, load.kind).wavefronts for load in loads]
        return prove(
            set(found) == {1}, "each load of scales is one wavefront, without conflicts", "exhaustive", len(found)
        )


WEIGHT_TILES: tuple[WeightTile, ...] = (
    WeightTile("w4_g128", 4, "u4_bf16", 128, 2),
    WeightTile("w4_g16", 4, "u4_bf16", 16, 2),
    WeightTile("w8_g128", 8, "u8_bf16", 128, 2),
    WeightTile("w4f_g64", 4, "u4_bf16_centred", 64, 4),
    WeightTile("w8f_g64", 8, "u8_bf16_centred", 64, 4),
    WeightTile("e2m1_g32e8m0", 4, "e2m1_bf16", 32, 1),
    WeightTile("e2m1_g16e4m3", 4, "e2m1_bf16", 16, 1, second_bytes=4),
    WeightTile("e4m3_g128f32", 8, "e4m3_bf16", 128, 4),
    WeightTile("e4m3_g128e8m0", 8, "e4m3_bf16", 128, 1),
    WeightTile("e4m3_g32e8m0", 8, "e4m3_bf16", 32, 1),
)
"""One tile of each kind of weight format with groups. Scales of whole rows are stored as [N], without tiles."""
