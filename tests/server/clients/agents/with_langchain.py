"""langchain-openai: bound tools, structured output, and both bound at once."""

from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from scenario import INSTRUCTIONS, KEY, LIMIT, MODEL, QUESTION, URL, Answer, called, weather

lookup = tool(weather)


def ask(model: Runnable[Any, Any], history: list[BaseMessage], stream: bool) -> AIMessage:
    """Return the model's next message. Chunks of a stream are joined by LangChain's own `+`."""
    if not stream:
        return model.invoke(history)
    whole = None
    for piece in model.stream(history):
        whole = piece if whole is None else whole + piece
    return whole


for responses in (False, True):
    chat = ChatOpenAI(
        model=MODEL,
        base_url=URL,
        api_key=KEY,
        max_tokens=LIMIT,
        temperature=0.0,
        max_retries=0,
        use_responses_api=responses,
    )
    for stream in (False, True):
        for bound in ({}, {"response_format": Answer, "strict": True}):
            history = [SystemMessage(INSTRUCTIONS), HumanMessage(QUESTION)]
            message = ask(chat.bind_tools([lookup], tool_choice="required", **bound), history, stream)
            history.append(message)
            results = [(call["id"], lookup.invoke(call["args"])) for call in message.tool_calls]
            history += [ToolMessage(result, tool_call_id=call_id) for call_id, result in results]
            called(1)
            message = ask(chat.bind_tools([lookup], **bound), history, stream)
            assert message.tool_calls or message.text
            if bound and not message.tool_calls:
                Answer.model_validate_json(message.text)
    for method in ("json_schema", "function_calling"):
        answer = chat.with_structured_output(Answer, method=method).invoke(QUESTION)
        assert isinstance(answer, Answer), answer
print("ok")
