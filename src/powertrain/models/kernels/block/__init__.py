"""A small block's pass as one call."""
