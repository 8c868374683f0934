"""Loads rows of caches into a CTA: raw (bulk copies, words or tensor maps), decoded, or unpacked by an earlier
kernel."""
