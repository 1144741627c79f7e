"""A trained model as files for other programs: a PEFT adapter, a merged Hugging Face folder, a GGUF file; each is checked."""
