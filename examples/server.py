"""A server that OpenAI's clients understand, on this machine alone.

    pip install starlette uvicorn
    python examples/server.py --model path/to/model --drafter ngram
    curl localhost:8000/v1/completions -d '{"prompt": "def main():", "stream": true}'

It has /v1/chat/completions and /v1/completions, streamed or whole, /v1/models and /metrics.
Requests share the engine's steps, and a client that leaves aborts its request. An answer has 128
tokens at most unless the client says another number. There are no passwords and no TLS, so it
listens on the loopback interface.
"""

import argparse
import asyncio
import json
import logging
import time
from contextlib import aclosing, suppress

import uvicorn
from chat import prompt_of
from prometheus import metrics_text
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

import specjax

SAMPLING = {"temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "n"}
SAMPLING |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"}
SAMPLING |= {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
OTHERS = {"model", "prompt", "messages", "stream", "stream_options", "user"}
MOST_BYTES = 10_000_000  # of a request's body
LOOK_EVERY_S = 0.5  # whether the client is still there
LOG = logging.getLogger("uvicorn.error")
WRONG = ValueError, TypeError, LookupError, RecursionError  # what a request's values raise


def app_of(engine, target):
    """Returns the server of one engine, an ASGI application."""

    async def complete(request):
        body, is_chat = json.loads(await read(request)), "chat" in request.url.path
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object.")
        body = {name: value for name, value in body.items() if value is not None}
        if "max_completion_tokens" in body:  # the newer name
            body["max_tokens"] = body.pop("max_completion_tokens")
        if unknown := set(body) - SAMPLING - OTHERS:
            raise ValueError(f"{', '.join(sorted(unknown))}: not supported here; leave it out.")
        if is_chat and not isinstance(body.get("messages"), list):
            raise ValueError("messages must be a list of objects with role and content.")
        is_streamed, options = body.get("stream") or False, body.get("stream_options") or {}
        if not isinstance(is_streamed, bool) or not isinstance(options, dict):
            raise ValueError("stream must be true or false, and stream_options an object.")
        wanted = {name: body[name] for name in SAMPLING & set(body)}
        prompt = prompt_of(target, body["messages"]) if is_chat else body.get("prompt")
        sampling = specjax.SamplingParams(**wanted)
        chunks = engine.astream(prompt, sampling, token_by_token=is_streamed)
        kind = "chat.completion" if is_chat else "text_completion"
        shell = {"id": f"specjax-{time.time_ns()}", "created": int(time.time()), "object": kind}
        shell |= {"model": target.name, "choices": []}
        if not is_streamed:
            return await unless_left(request, whole(chunks, shell, is_chat))
        named = shell | {"object": kind + ".chunk" * is_chat}
        # What is refused is refused at the first chunk, before there is a status.
        first = await unless_left(request, anext(chunks))
        events = events_of(first, chunks, named, is_chat, options.get("include_usage"))
        return StreamingResponse(events, media_type="text/event-stream")

    async def models(_):
        return JSONResponse({"object": "list", "data": [{"id": target.name, "object": "model"}]})

    async def metrics(_):
        return PlainTextResponse(metrics_text(engine.stats, target.name))

    paths = "/v1/completions", "/v1/chat/completions"
    routes = [Route(path, complete, methods=["POST"]) for path in paths]
    routes += [Route("/v1/models", models), Route("/metrics", metrics)]
    said = dict.fromkeys(WRONG, failure(400)) | {Exception: failure(500)}
    said |= {HTTPException: failure()}
    return Starlette(routes=routes, exception_handlers=said)


async def read(request):
    """Returns the body; raises ValueError for one that is too long."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise ValueError(f"the body has more than {MOST_BYTES} bytes.")
    except ClientDisconnect:
        raise HTTPException(499) from None
    return body


async def unless_left(request, work):
    """Returns what `work` returns; a client that leaves cancels it, and so aborts its request."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait({task}, timeout=LOOK_EVERY_S)
        if not task.done() and await request.is_disconnected():
            task.cancel()
            raise HTTPException(499)
    return task.result()


async def whole(chunks, shell, is_chat):
    """Returns all completions in one answer."""
    async with aclosing(chunks):
        done = [chunk.completion async for chunk in chunks if chunk.completion]
    choices = [choice_of(each, is_chat, "message") for each in done]
    return JSONResponse(shell | {"choices": choices, "usage": usage_of(done)})


async def events_of(chunk, chunks, shell, is_chat, has_usage):
    """Yields the chunks as server-sent events."""
    event = lambda content: f"data: {json.dumps(content)}\n\n"
    async with aclosing(chunks):  # also where the client leaves: that aborts the request
        done = []
        try:
            while chunk is not None:
                done += [chunk.completion] if chunk.completion else []
                yield event(shell | {"choices": [choice_of(chunk, is_chat, "delta")]})
                chunk = await anext(chunks, None)
        except Exception as error:  # the engine's; the status is sent already
            LOG.exception("an answer ended in an error")
            yield event(error_of(error))
            return
        if has_usage:
            yield event(shell | {"usage": usage_of(done)})
        yield "data: [DONE]\n\n"


def choice_of(part, is_chat, key):
    """Returns a chunk or a completion as clients read it; `error` is ours."""
    text = {key: {"role": "assistant", "content": part.text}} if is_chat else {"text": part.text}
    error = {"error": part.error} if part.error else {}
    return {"index": part.sample_index, "finish_reason": part.finish_reason, **text, **error}


def usage_of(done):
    counts = {"prompt_tokens": len(done[0].prompt_token_ids) if done else 0}
    counts["completion_tokens"] = sum(len(each.token_ids) for each in done)
    return counts | {"total_tokens": sum(counts.values())}


def error_of(error):
    return {"error": {"message": f"{type(error).__name__}: {error}"}}


def failure(status=None):
    """Returns what answers a request that ended in an error, by default with the error's status."""

    async def answer(request, error):
        return JSONResponse(error_of(error), status or error.status_code)

    return answer


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="a folder, or a name on the Hub")
    parser.add_argument("--drafter", help="a folder, ngram, ...; by default demo, or ngram")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    drafter = args.drafter or ("demo" if args.model == "demo" else "ngram")
    target = specjax.load_model(args.model)
    with specjax.Engine(target, drafter=drafter) as engine:
        app = app_of(engine, target)
        with suppress(KeyboardInterrupt):
            uvicorn.run(app, port=args.port, lifespan="off", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
