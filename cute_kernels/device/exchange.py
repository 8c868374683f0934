"""How a CTA sees that another has published a partial result: its words are no longer `EMPTY_WORD`.

No GPU types here: the host fills workspaces with it.
"""

# Of a workspace where nothing is: a NaN that no arithmetic yields, since the hardware's own is 0x7fffffff.
EMPTY_WORD = 0xFFFFFFFF
