"""Loads rows of caches into a CTA's shared memory. Rows come raw (by bulk copies, words or tensor maps), decoded by
producer warps, or unpacked by an earlier kernel."""
