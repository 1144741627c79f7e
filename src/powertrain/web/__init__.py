"""The page: `powertrain ui`. It starts commands, reads what they wrote, and computes nothing: no torch is loaded here.

A run never depends on the page. What the page knows is in files: runs/, jobs/, and a cache that may be deleted.
"""
