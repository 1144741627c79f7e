"""The tables of the pages, each a function of the studies that are stored. `python benchmarks/table.py` writes them."""
