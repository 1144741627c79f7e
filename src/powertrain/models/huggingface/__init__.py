"""Hugging Face formats: folders, families, weights, shards, the hub, and who computes a model."""
