"""Adapters: their kinds, how they are attached to a decoder, and their PEFT files."""
