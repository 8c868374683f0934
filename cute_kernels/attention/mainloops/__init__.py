"""The mainloops: warps with few rows of queries, warpgroups with tiles of many, and keys as rows of MMAs."""
