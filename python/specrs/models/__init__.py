"""Models: checkpoints, configurations, the decoder forward pass. No scheduling, no sampling, no tokenizer."""
