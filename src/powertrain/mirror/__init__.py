"""A copy of a run in a store elsewhere: checkpoints are uploaded beside the training, and come back from there. No torch."""
