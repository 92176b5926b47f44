"""openai-agents, over chat completions and over responses: its own loop, with and without an output type."""

import asyncio
from typing import Any

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from scenario import INSTRUCTIONS, KEY, LIMIT, MODEL, QUESTION, URL, Answer, called, weather

set_tracing_disabled(True)


async def run(agent: Agent[Any], stream: bool) -> Any:
    """The final output of a run of at most three turns."""
    if not stream:
        return (await Runner.run(agent, QUESTION, max_turns=3)).final_output
    result = Runner.run_streamed(agent, QUESTION, max_turns=3)
    async for _ in result.stream_events():
        pass
    return result.final_output


async def main() -> None:
    """Tools alone, an output type alone, both together."""
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    models: list[Model] = [OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)]
    for model in models:
        for stream in (False, True):
            settings = ModelSettings(max_tokens=LIMIT, temperature=0.0, tool_choice="required")
            tools = [function_tool(weather)]
            shared = {"name": "forecaster", "instructions": INSTRUCTIONS, "model": model}
            text = await run(Agent(**shared, tools=tools, model_settings=settings), stream)
            assert isinstance(text, str)
            called(1)
            answer = await run(
                Agent(**shared, output_type=Answer, model_settings=ModelSettings(max_tokens=LIMIT, temperature=0.0)),
                stream,
            )
            assert isinstance(answer, Answer)
            answer = await run(Agent(**shared, tools=tools, output_type=Answer, model_settings=settings), stream)
            assert isinstance(answer, Answer)
            called(1)


asyncio.run(main())
print("ok")
