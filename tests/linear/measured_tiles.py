"""Times of products of 96 to 256 rows of shapes that no table has: `tests/facts/linear_tiles.json`."""

from tests import facts

TILES, RANGES = (facts.table("linear_tiles", name) for name in ("TILES", "RANGES"))
