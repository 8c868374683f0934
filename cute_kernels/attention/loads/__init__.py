"""Loads rows of caches into a CTA's shared memory. Raw rows come by bulk copies, words or tensor maps. Other rows are
decoded by producer warps, or were unpacked by an earlier kernel.
"""
