"""`python -m powertrain`."""

from powertrain.cli import main

main()
