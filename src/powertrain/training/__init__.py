"""One plain training loop and what it needs; it knows no technique by name."""
