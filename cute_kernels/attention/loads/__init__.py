"""Rows of caches on their way to a CTA: raw, by words, by tensor maps, decoded, or unpacked by a kernel before."""
