"""Reading other people's training scripts and configs without running them, and saying what to change."""
