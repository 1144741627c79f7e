"""Processes that share a run: how they are started, and how each of them joins the others."""
