"""A server that OpenAI's clients understand, on this machine alone.

    python examples/server.py --model path/to/model --drafter ngram
    curl localhost:8000/v1/completions -d '{"prompt": "def main():", "stream": true}'

It has /v1/chat/completions and /v1/completions, streamed or whole, /v1/models and /metrics.
Requests share the engine's steps, and a client that leaves aborts its request. An answer has 128
tokens at most unless the client says another number. There are no passwords and no TLS, so it
listens on the loopback interface. The standard library is enough.
"""

import argparse
import asyncio
import http
import json
import time
from contextlib import aclosing, suppress

from chat import prompt_of
from prometheus import metrics_text

import specjax

MOST_BYTES = 10_000_000  # of a request's body
# What a request that is wrong raises: its values, or a head that is too long.
WRONG = ValueError, TypeError, LookupError, RecursionError, asyncio.LimitOverrunError
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "n"}
SAMPLING |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"}
SAMPLING |= {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
OTHERS = {"model", "prompt", "messages", "stream", "stream_options", "user"}


class Server:
    """Answers connections, one request each, by one engine."""

    def __init__(self, engine, target):
        self.engine, self.target = engine, target

    async def connected(self, reader, writer):
        """Ends when the request is answered, or its client has left."""
        reply = Reply(writer)
        try:
            request, body = await read_request(reader)
            answering = asyncio.create_task(self.answer(request, body, reply))
            leaving = asyncio.create_task(is_left(reader))
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            answering.cancel()  # nothing where it is done; otherwise the engine's stream ends
            await asyncio.gather(leaving, return_exceptions=True)
            with suppress(asyncio.CancelledError):
                await answering
        except WRONG as error:
            reply.fail(400, f"{type(error).__name__}: {error}")
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left first
        except Exception as error:  # the engine's: the client is told, asyncio logs it
            reply.fail(500, f"{type(error).__name__}: {error}")
            raise
        finally:
            writer.close()

    async def answer(self, request, body, reply):
        if request in ("POST /v1/completions", "POST /v1/chat/completions"):
            if not isinstance(body := json.loads(body), dict):
                raise ValueError("the body must be a JSON object.")
            await self.complete(body, "chat" in request, reply)
        elif request == "GET /v1/models":
            models = [{"id": self.target.name, "object": "model"}]
            reply.whole(200, {"object": "list", "data": models})
        elif request == "GET /metrics":
            reply.whole(200, metrics_text(self.engine.stats, self.target.name))
        else:
            reply.fail(404, f"{request} is not served here")

    async def complete(self, body, is_chat, reply):
        """Sends text, chunk by chunk where `stream` asks for it, else in one piece."""
        body.setdefault("max_tokens", body.pop("max_completion_tokens", None))  # its newer name
        if unknown := set(body) - SAMPLING - OTHERS:
            raise ValueError(f"{', '.join(sorted(unknown))}: not supported here; leave it out.")
        if is_chat and not isinstance(body.get("messages"), list):
            raise ValueError("messages must be a list of objects with role and content.")
        wanted = {name: body[name] for name in SAMPLING & set(body) if body[name] is not None}
        prompt = prompt_of(self.target, body.get("messages")) if is_chat else body.get("prompt")
        kind = "chat.completion" if is_chat else "text_completion"
        shell = {"id": f"specjax-{time.time_ns()}", "created": int(time.time()), "object": kind}
        shell["model"] = self.target.name
        is_streamed, done = body.get("stream") or False, []
        if not isinstance(is_streamed, bool):
            raise ValueError(f"stream={is_streamed!r} must be true or false.")
        options = body.get("stream_options") or {}
        if not isinstance(options, dict):
            raise ValueError(f"stream_options={options!r} must be an object.")
        sampling = specjax.SamplingParams(**wanted)
        stream = self.engine.astream(prompt, sampling, token_by_token=is_streamed)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                done += [chunk.completion] if chunk.completion else []
                if is_streamed:
                    choices = [choice_of(chunk, is_chat, "delta")]
                    named = shell | {"object": kind + ".chunk" * is_chat}
                    await reply.event(named | {"choices": choices})
        num_tokens = len(done[0].prompt_token_ids), sum(len(each.token_ids) for each in done)
        usage = dict(zip(("prompt_tokens", "completion_tokens"), num_tokens))
        usage["total_tokens"] = sum(num_tokens)
        if not is_streamed:
            choices = [choice_of(each, is_chat, "message") for each in done]
            reply.whole(200, shell | {"choices": choices, "usage": usage})
            return
        if options.get("include_usage"):
            await reply.event(shell | {"choices": [], "usage": usage})
        await reply.event("[DONE]")


class Reply:
    """Writes one answer: whole, or as server-sent events; its body ends with the connection."""

    def __init__(self, writer):
        self.writer, self.is_begun = writer, False

    def whole(self, status, content):
        """Sends text as it is, anything else as JSON."""
        is_text = isinstance(content, str)
        self._begin(status, "text/plain" if is_text else "application/json")
        self.writer.write((content if is_text else json.dumps(content)).encode())

    async def event(self, content):
        if not self.is_begun:  # what is refused was refused before the first chunk
            self._begin(200, "text/event-stream")
        text = content if isinstance(content, str) else json.dumps(content)
        self.writer.write(f"data: {text}\n\n".encode())
        await self.writer.drain()

    def fail(self, status, message):
        """Sends an error: as an event where events were sent, since a status stands at the top."""
        error = {"error": {"message": message}}
        if self.is_begun:
            self.writer.write(f"data: {json.dumps(error)}\n\n".encode())
        else:
            self.whole(status, error)

    def _begin(self, status, kind):
        self.is_begun = True
        line = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"
        head = f"{line}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"
        self.writer.write(head.encode())


def choice_of(part, is_chat, key):
    """Returns a chunk or a completion as clients read it; `error` is ours."""
    text = {key: {"role": "assistant", "content": part.text}} if is_chat else {"text": part.text}
    error = {"error": part.error} if part.error else {}
    return {"index": part.sample_index, "finish_reason": part.finish_reason, **text, **error}


async def is_left(reader):
    """Returns when the client closes; what it sends meanwhile is not read as a request."""
    while await reader.read(65_536):
        pass


async def read_request(reader):
    """Returns a request, as in "GET /v1/models", and its body."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(":") for line in lines)}
    num_bytes = int(headers.get("content-length", 0))
    if not 0 <= num_bytes <= MOST_BYTES:
        raise ValueError(f"the body has {num_bytes} bytes; expected at most {MOST_BYTES}.")
    return first.rpartition(" ")[0], await reader.readexactly(num_bytes)


async def serve(server, port):
    async with await asyncio.start_server(server.connected, "127.0.0.1", port) as listening:
        print(
            "listening at http://{}:{}/v1".format(*listening.sockets[0].getsockname()), flush=True
        )
        await listening.serve_forever()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="a folder, or a name on the Hub")
    parser.add_argument("--drafter", help="a folder, ngram, ...; by default demo, or ngram")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    drafter = args.drafter or ("demo" if args.model == "demo" else "ngram")
    target = specjax.load_model(args.model)
    with specjax.Engine(target, drafter=drafter) as engine, suppress(KeyboardInterrupt):
        asyncio.run(serve(Server(engine, target), args.port))


if __name__ == "__main__":
    main()
