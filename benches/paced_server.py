"""A server that only keeps time: after `--first` ms it sends three tokens every `--gap` ms. It has no model.

What a client measures against it is the client: nothing here competes for the processor.
"""

import argparse
import asyncio
import json
import time

from aiohttp import web

TOKENS = 3


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    first, gap = request.app["first"], request.app["gap"]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    named = {"id": "cmpl-0", "object": "text_completion", "created": int(time.time()), "model": body["model"]}
    due, left = time.perf_counter() + first, body["max_tokens"]
    while left:
        tokens = min(TOKENS, left)
        left -= tokens
        await asyncio.sleep(due - time.perf_counter())
        choice = {"index": 0, "text": "x " * tokens, "finish_reason": None if left else "length"}
        await response.write(b"data: " + json.dumps({**named, "choices": [choice]}).encode() + b"\n\n")
        due += gap
    usage = {"prompt_tokens": 8, "completion_tokens": body["max_tokens"], "total_tokens": 8 + body["max_tokens"]}
    await response.write(
        b"data: " + json.dumps({**named, "choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    )
    return response


async def health(_: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--first", type=float, default=100.0)
    parser.add_argument("--gap", type=float, default=30.0)
    args = parser.parse_args()
    app = web.Application()
    app["first"], app["gap"] = args.first / 1e3, args.gap / 1e3
    app.router.add_get("/health", health)
    app.router.add_post("/v1/completions", complete)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None)


if __name__ == "__main__":
    main()
