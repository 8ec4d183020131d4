"""The model: parameters, the one `forward`, attention, caches, Hugging Face files and tokenizer."""
