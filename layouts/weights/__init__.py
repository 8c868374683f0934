"""Offline preprocessing of quantised weights: each layout a composition of named steps with an exact inverse."""
