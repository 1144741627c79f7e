"""Records into text. Imports no torch."""
