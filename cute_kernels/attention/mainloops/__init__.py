"""What multiplies: warps with few rows of queries, warpgroups with tiles of many, keys as rows of products."""
