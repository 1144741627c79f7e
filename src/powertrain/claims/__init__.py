"""The claims of the five source documents: each with its experiment and a verdict measured on this machine."""
