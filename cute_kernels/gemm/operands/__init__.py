"""What MMAs multiply besides 16-bit numbers: operands, each with what it means and how it is made."""
