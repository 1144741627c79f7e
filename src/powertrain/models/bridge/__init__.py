"""Models that the native decoder does not have, computed by transformers with peft, behind the same Model and Batch."""
