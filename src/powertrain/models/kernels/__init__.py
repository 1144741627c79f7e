"""Kernels: attention, hand-written blocks, and products with quantised weights."""
