"""Times of products of 96 to 256 rows of shapes that no table has: `tests/facts/linear_tiles.json`."""

from tests import facts

TILES = facts.table("linear_tiles", "TILES")
