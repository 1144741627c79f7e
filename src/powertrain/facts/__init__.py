"""Facts about machine, software, model and data, each with its source. Unknown is absent, never guessed."""
