"""LangChain against `specrs serve`: a chain, streamed, and an answer of a given structure.

pip install langchain-openai
specrs serve &
python examples/langchain_client.py [URL]
"""

import sys
from typing import Literal

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
model = OpenAI(base_url=url, api_key="none").models.list().data[0].id
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=256)

chain = ChatPromptTemplate.from_messages([("user", "def {name}(a, b):")]) | chat.bind(stop=["\n\n"])
for chunk in chain.stream({"name": "multiply"}):
    print(chunk.content, end="", flush=True)
print()


class Verdict(BaseModel):
    """The kind of code that the model recognises in a text."""

    language: Literal["Python", "Rust"]
    complete: bool


verdict = chat.with_structured_output(Verdict, method="json_schema").invoke("def add(a, b): return a + b")
print(repr(verdict))
