"""Offline preprocessing of quantised weights. Each layout is a composition of named steps with an exact inverse."""
