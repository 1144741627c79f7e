"""What holds a training run back (diagnose), and what a script or config of any trainer does that it should not (audit)."""
