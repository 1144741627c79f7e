"""One run, from a recipe to a model on disk."""
