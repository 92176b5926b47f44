"""instructor: each of its modes for OpenAI's API, whole and in parts."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel
from scenario import KEY, LIMIT, MESSAGES, MODEL, URL, Answer, called, weather


class Weather(BaseModel):
    """Current weather of a city."""

    city: Literal["Rome", "Oslo"]


MODES = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.RESPONSES_TOOLS,
)
for mode in MODES:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)
    limit = {"max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens": LIMIT}
    shared = {"model": MODEL, "max_retries": 1, **limit}
    call = client.create(response_model=Weather, messages=MESSAGES, **shared)
    history = [*MESSAGES, {"role": "assistant", "content": call.model_dump_json()}]
    history.append({"role": "user", "content": weather(call.city)})
    called(1)
    answer = client.create(response_model=Answer, messages=history, **shared)
    assert isinstance(answer, Answer)
    if mode is not instructor.Mode.RESPONSES_TOOLS:
        parts = list(client.create_partial(response_model=Answer, messages=history, **shared))
        Answer.model_validate(parts[-1].model_dump())
print("ok")
