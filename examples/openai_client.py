"""The openai client against `specrs serve`: one answer, and one that is streamed.

pip install openai
specrs serve &
python examples/openai_client.py [URL]
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=url, api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "def fibonacci(n):"}]

answer = client.chat.completions.create(model=model, messages=messages, max_tokens=48, temperature=0)
print(answer.choices[0].message.content)

print("\nstreamed:")
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=48, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
