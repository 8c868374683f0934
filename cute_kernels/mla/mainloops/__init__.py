"""What consumer warpgroups do with a tile of tokens: scores, softmax, weights times values."""
