"""The engine: its loop of plan, execute and settle, and its requests with their text. No tensors and no scheduling
decisions."""
