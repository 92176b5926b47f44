"""Anthropic's Messages API, served as chats."""
