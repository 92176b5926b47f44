"""openai-agents, over chat completions and over responses: its own loop, with and without an output type, and with the
conversation on the server."""

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


async def run(agent: Agent[Any], stream: bool, **options: Any) -> Any:
    """Return the result of a run of at most three turns."""
    if not stream:
        return await Runner.run(agent, QUESTION, max_turns=3, **options)
    result = Runner.run_streamed(agent, QUESTION, max_turns=3, **options)
    async for _ in result.stream_events():
        pass
    return result


async def stored_turns(client: AsyncOpenAI, response_id: str) -> int:
    """Return the number of responses in a stored conversation."""
    turns, last = 0, response_id
    while last:
        turns, last = turns + 1, (await client.responses.retrieve(last)).previous_response_id
    return turns


async def main() -> None:
    """Run tools alone, also with stored responses, an output type alone, and both together."""
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    models: list[Model] = [OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client)]
    for model in models:
        for stream in (False, True):
            settings = ModelSettings(max_tokens=LIMIT, temperature=0.0, tool_choice="required")
            tools = [function_tool(weather)]
            shared = {"name": "forecaster", "instructions": INSTRUCTIONS, "model": model}
            agent = Agent(**shared, tools=tools, model_settings=settings)
            text = (await run(agent, stream)).final_output
            assert isinstance(text, str)
            called(1)
            if isinstance(model, OpenAIResponsesModel):
                # each turn sends its own items and the id of the last response: the same text
                result = await run(agent, stream, auto_previous_response_id=True)
                assert result.final_output == text
                assert await stored_turns(client, result.last_response_id) == len(result.raw_responses) >= 2
                called(1)
            result = await run(
                Agent(**shared, output_type=Answer, model_settings=ModelSettings(max_tokens=LIMIT, temperature=0.0)),
                stream,
            )
            assert isinstance(result.final_output, Answer)
            result = await run(Agent(**shared, tools=tools, output_type=Answer, model_settings=settings), stream)
            assert isinstance(result.final_output, Answer)
            called(1)


asyncio.run(main())
print("ok")
