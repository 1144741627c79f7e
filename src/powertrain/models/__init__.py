"""The decoder, the families it expresses, and the Hugging Face folders it reads and writes."""
