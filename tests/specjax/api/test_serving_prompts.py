"""Prompts become token ids outside the engine's lock and off the event loop."""

import asyncio
import dataclasses
import threading

import pytest
from helpers import ENGINE, tiny_llama

import specjax
from specjax.config.sampling import SamplingParams

CHAT = [{"role": "user", "content": "hi"}]
TWO = SamplingParams(max_tokens=2, temperature=0)


class _SlowTemplate:
    """A tokenizer whose chat template waits until the engine has answered another thread."""

    def __init__(self):
        self.engine: specjax.Engine | None = None
        self.threads: list[threading.Thread] = []

    def encode_chat(self, messages):
        self.threads.append(threading.current_thread())
        asked = threading.Thread(target=lambda: self.engine.has_work, daemon=True)
        asked.start()
        asked.join(timeout=60)
        assert not asked.is_alive(), "the engine's lock is held"
        return [1, 2, 3]

    def decode(self, ids, skip_special_tokens=True):
        return "a" * len(ids)

    def __getattr__(self, name):
        raise AttributeError(name)


@pytest.fixture(scope="module")
def template():
    return _SlowTemplate()


@pytest.fixture(scope="module")
def engine(template):
    target = dataclasses.replace(tiny_llama(0), tokenizer=template)
    # Only ids go in and out: the text of a reply is none of this test's business.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specjax.engine.output_text.IncrementalText", lambda *_, **__: None)
        with specjax.Engine(target, engine=ENGINE) as engine:
            template.engine = engine
            yield engine


@pytest.mark.full
def test_add_and_stream_hold_no_lock(engine):
    request = engine.add(CHAT, TWO)
    engine.abort(request)
    chunks = [*engine.stream(CHAT, TWO)]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 2


@pytest.mark.full
def test_a_stream_of_asyncio_leaves_the_loop_to_others(engine, template):
    template.threads.clear()

    async def read():
        return [chunk async for chunk in engine.astream(CHAT, TWO)]

    chunks = asyncio.run(read())
    assert sum(len(chunk.token_ids) for chunk in chunks) == 2
    assert template.threads
    assert threading.main_thread() not in template.threads


def test_a_prompt_that_is_none_is_refused(engine):
    with pytest.raises(ValueError, match="a prompt is None"):
        engine.add(None, TWO)
