"""Arithmetic on facts, without torch: work in FLOPs and bytes, peak memory, and the floor they set."""
