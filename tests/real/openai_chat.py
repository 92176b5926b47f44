"""A chat through the openai client. Run by its environment's interpreter with the server's address and the chat's text;
prints the answer, whole and streamed, as JSON."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0)
(model,) = client.models.list().data
messages = [{"role": "user", "content": sys.argv[2]}]
whole = client.chat.completions.create(model=model.id, messages=messages, max_tokens=32, temperature=0)
parts = client.chat.completions.create(model=model.id, messages=messages, max_tokens=32, temperature=0, stream=True)
streamed = "".join(part.choices[0].delta.content or "" for part in parts)
print(json.dumps({"model": model.id, "whole": whole.choices[0].message.content, "streamed": streamed}))
