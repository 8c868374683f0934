"""The products of a layer, from one attention to the next, in one launch, for one row of x: :mod:`.call`."""
