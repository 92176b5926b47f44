"""Models as one GGUF file: weights, configuration and tokenizer."""
