"""Trackers: a run's events.jsonl, sent to TensorBoard, W&B, MLflow or trackio by processes beside the training. No torch."""
