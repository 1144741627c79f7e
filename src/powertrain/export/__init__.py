"""A trained model as files that others open: a PEFT adapter, a merged Hugging Face folder, a GGUF file; none unchecked."""
