"""HTTP server with OpenAI's API, under vLLM's names, for an `AsyncLLM`. Has no influence on tokens."""
