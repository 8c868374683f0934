"""Loads rows of caches into a CTA: raw, by words, by tensor maps, decoded, or unpacked by a kernel before."""
