"""Many requests at once in one event loop. Each is streamed, and each ends alone.

python examples/async_requests.py [MODEL]
"""

import asyncio
import sys

from specrs import AsyncLLM, SamplingParams

PROMPTS = ["def add(a, b):", "class Stack:", "import os\n\n", "for i in range("]


async def complete(llm: AsyncLLM, prompt: str) -> str:
    """Read one stream to its end, and return the text."""
    text = ""
    async for output in llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=48)):
        text = output.outputs[0].text
    return text


async def main() -> None:
    """Answer all prompts together."""
    model = sys.argv[1] if len(sys.argv) > 1 else None
    drafts = {} if model is None else {"method": "suffix"}
    llm = AsyncLLM(model=model, speculative_config=drafts)
    try:
        texts = await asyncio.gather(*(complete(llm, prompt) for prompt in PROMPTS))
    finally:
        llm.shutdown()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"> {prompt!r}\n{text}\n")


asyncio.run(main())
