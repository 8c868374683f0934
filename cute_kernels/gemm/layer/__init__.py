"""The products of a layer between two attentions in one launch, for one row of x: :mod:`.call`."""
