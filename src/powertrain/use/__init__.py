"""Working with a finished model: opening it, conversation, questions and answers, metrics, held-out loss, generation."""
