"""pydantic-ai: its own loop, with text, with the output as a tool, and with the output as a response format."""

import asyncio
from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from scenario import INSTRUCTIONS, KEY, LIMIT, MODEL, QUESTION, URL, Answer, calls, weather


async def run(agent: Agent[None, Any], stream: bool) -> Any:
    """Run the agent once on QUESTION, streamed or not, and return its output."""
    if not stream:
        return (await agent.run(QUESTION)).output
    async with agent.run_stream(QUESTION) as result:
        return await result.get_output()


async def main() -> None:
    """Run each kind of output, with and without a tool."""
    provider = OpenAIProvider(base_url=URL, api_key=KEY)
    for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
        for stream in (False, True):
            for output, kind in ((str, str), (NativeOutput(Answer), Answer), (ToolOutput(Answer), Answer)):
                for tools in ([], [weather]):
                    agent = Agent(
                        model,
                        instructions=INSTRUCTIONS,
                        output_type=output,
                        tools=tools,
                        model_settings={"max_tokens": LIMIT, "temperature": 0.0},
                        retries=2,
                    )
                    answer = await run(agent, stream)
                    assert isinstance(answer, kind), answer
                    assert set(calls) <= {"Rome", "Oslo"}


asyncio.run(main())
print("ok")
