"""The HTTP server: OpenAI's API, under vLLM's names, around an `AsyncLLM`. Decides nothing about tokens."""
