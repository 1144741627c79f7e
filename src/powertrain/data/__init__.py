"""From text to examples: reading, tokenizers, the token store, blocks and their order."""
