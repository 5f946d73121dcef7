"""The programs of examples/ run, over the first layers of the embedded pair."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import http.client
import json
import threading
import time
from pathlib import Path

import batch_file
import chat
import one_page
import prometheus
import pytest
import rollout_logging
import server
import uvicorn
from demo_layers import save_first_layers

import specjax
from specjax.api.results import Chunk, GenerationStats
from specjax.engine.request import AcceptanceCounts
from specjax.models import loading

HERE = Path(__file__).parent
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return save_first_layers(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def few_layers(weights, monkeypatch):
    monkeypatch.setattr(loading, "_DEMO_WEIGHTS", weights)


def test_counters_have_the_names_and_values_that_dashboards_read():
    counts = AcceptanceCounts()
    for num_drafted, num_accepted in ((3, 3), (3, 1), (0, 0), (2, 0)):
        counts.add(num_drafted, num_accepted)
    stats = GenerationStats(2, 7, 9, counts, 1.0, 0.0, 0.1, 3, "ngram", "seeded", num_preemptions=5)
    text = prometheus.metrics_text(stats, 'a"b')
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = 'engine="0",model_name="a\\"b"'
    per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert values == {
        f"vllm:prompt_tokens_total{{{label}}}": "7",
        f"vllm:generation_tokens_total{{{label}}}": "9",
        f"vllm:num_preemptions_total{{{label}}}": "5",
        f"vllm:spec_decode_num_drafts_total{{{label}}}": "3",
        f"vllm:spec_decode_num_draft_tokens_total{{{label}}}": "8",
        f"vllm:spec_decode_num_accepted_tokens_total{{{label}}}": "4",
        f'{per_pos}{{{label},position="0"}}': "2",
        f'{per_pos}{{{label},position="1"}}': "1",
        f'{per_pos}{{{label},position="2"}}': "1",
    }
    assert text.count("# TYPE") == 7


def test_every_example_is_run_here_and_listed():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    tests = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    assert names == {name for name in names if f"\nimport {name.removesuffix('.py')}" in tests}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in page for name in names)


@pytest.mark.full
def test_one_page_is_lossless(capsys):
    one_page.main()  # asserts that it is
    assert "greedy: the same 30 tokens in " in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("accepts_all", "fails"),
    [
        (True, "greedy tokens are those of plain decoding"),
        (False, "first tokens are distributed as the target's"),
    ],
)
def test_one_page_sees_a_wrong_rule(accepts_all, fails, monkeypatch):
    """One that accepts all drafts, and one that recovers from the target in place of the rest."""
    right = one_page.accept

    def accept(key, draft_token_ids, draft_probs, target_probs):
        num_accepted, _ = right(key, draft_token_ids, draft_probs, target_probs)
        if accepts_all:
            num_accepted = len(draft_token_ids)
        return num_accepted, one_page.sample(key, target_probs[num_accepted])

    monkeypatch.setattr(one_page, "accept", accept)
    one_page.step.clear_cache()
    with pytest.raises(AssertionError, match=fails):
        one_page.main()
    one_page.step.clear_cache()


@pytest.mark.full
def test_prometheus_counts_a_run(few_layers, capsys):
    prometheus.main()
    assert (
        'vllm:generation_tokens_total{engine="0",model_name="demo"} 128' in capsys.readouterr().out
    )


def test_a_line_of_a_batch_ends_at_its_newline_alone(tmp_path, monkeypatch, capsys):
    class Engine(contextlib.nullcontext):
        """Refuses every prompt, and shows it."""

        has_work, stats = False, None

        def __init__(self, *_, **__):
            super().__init__(self)

        def add(self, prompt, sampling):
            raise ValueError(prompt)

    monkeypatch.setattr(specjax, "Engine", Engine)
    paths = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    lines = ["a\u2028b", "c\x85d\x0ce", "", "f"]
    for text in ("".join(f"{line}\n" for line in lines), "\n".join(lines)):
        paths[0].write_text(text, encoding="utf-8")
        for rest in (b"", b'{"line": 9, "text": "\xe2\x80'):  # what failed is tried again
            with paths[1].open("ab") as file:
                file.write(rest)
            batch_file.main([*map(str, paths)])
            assert "4 of 4 lines are to be answered" in capsys.readouterr().out
        written = paths[1].read_text(encoding="utf-8").removesuffix("\n").split("\n")
        assert [json.loads(line)["error"] for line in written] == lines
        paths[1].unlink()
    paths[0].write_text("")
    batch_file.main([*map(str, paths)])
    assert "0 of 0 lines" in capsys.readouterr().out


@pytest.mark.full
def test_a_chat_sends_the_whole_conversation(few_layers, monkeypatch, capsys):
    lines = iter(["class Queue:", "    def put(self):"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines, ""))
    chat.main(["--max-tokens", "8", "--temperature", "0"])
    printed = capsys.readouterr().out.partition("GenerationStats")[0]
    sampling = specjax.SamplingParams(temperature=0, max_tokens=8)
    answer = lambda text: specjax.generate("demo", text, sampling=sampling)[0].text
    first = answer("class Queue:")
    second = answer(f"class Queue:\n{first}\n    def put(self):")
    assert printed == f"{first}\n{second}\n"


def test_a_template_gets_messages():
    class Tokenizer:
        chat_template = "{{ messages }}"

    class Target:
        tokenizer = Tokenizer

    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat.prompt_of(Target, messages) is messages
    Tokenizer.chat_template = None
    assert chat.prompt_of(Target, messages) == "a\nb"
    for wrong in ([{"role": "user"}], [1], [{"content": None}], [{"content": ["a"]}]):
        with pytest.raises(ValueError, match="whose content is text"):
            chat.prompt_of(Target, wrong)


@pytest.mark.full
def test_a_file_is_answered_and_a_stopped_run_goes_on(few_layers, tmp_path, capsys):
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("def main():\nclass Queue:\n\nimport os\n", encoding="utf-8")
    arguments = [str(prompts), str(answers), "--max-tokens", "4"]
    batch_file.main(arguments)
    whole = sorted(answers.read_text(encoding="utf-8").splitlines(), key=line_of)
    assert [line_of(each) for each in whole] == [1, 2, 3, 4]
    assert "the prompt is empty" in json.loads(whole[2])["error"]
    answers.write_text(f"{whole[1]}\n{whole[2]}\n{whole[0][:9]}", encoding="utf-8")
    batch_file.main(arguments)
    assert "3 of 4 lines are to be answered" in capsys.readouterr().out
    again = sorted(answers.read_text(encoding="utf-8").splitlines(), key=line_of)
    assert again == whole  # what failed is tried again


def line_of(answer):
    return json.loads(answer)["line"]


@pytest.mark.full
def test_rollouts_are_logged_by_step(few_layers, monkeypatch):
    logged = {}

    class Logger:
        def log(self, numbers, step):
            logged[step] = numbers

    monkeypatch.setattr(rollout_logging, "logger_named", lambda name: Logger())
    rollout_logging.main(["--steps", "2", "--max-tokens", "8"])
    assert sorted(logged) == [0, 1]
    assert all(type(value) is float for numbers in logged.values() for value in numbers.values())
    assert logged[1]["rollout/params_version"] > logged[0]["rollout/params_version"]
    rollout_logging.Terminal().log(logged[0], 0)  # has what it shows


@contextlib.contextmanager
def listening(engine, target):
    """Context of a server's port."""
    config = uvicorn.Config(server.app_of(engine, target), port=0, log_level="critical")
    serving = uvicorn.Server(config)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        wait_until(lambda: serving.started)
        yield serving.servers[0].sockets[0].getsockname()[1]
    finally:
        serving.should_exit = True
        thread.join()


@pytest.fixture
def served(few_layers):
    """Returns a server's port and its engine."""
    target = specjax.load_model("demo")
    with specjax.Engine(target, drafter="demo") as engine, listening(engine, target) as port:
        yield port, engine


def asked(port, path, body=None):
    """Returns the status and the text of a reply."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET" if body is None else "POST", path, body)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def wait_until(is_so, at_most_s=60):
    end = time.monotonic() + at_most_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


GREEDY = {"temperature": 0, "max_tokens": 24}
MESSAGES = {"messages": [{"role": "user", "content": "def main():"}]}


def events_of(text):
    *events, end = [line.removeprefix("data: ") for line in text.split("\n\n")[:-1]]
    assert end == "[DONE]"
    return [json.loads(each) for each in events]


@pytest.mark.full
def test_a_server_streams_or_answers_whole(served):
    text = specjax.generate("demo", "def main():", sampling=specjax.SamplingParams(**GREEDY))[
        0
    ].text

    port, engine = served
    prompt = {"prompt": "def main():"}
    status, whole = asked(port, "/v1/completions", json.dumps(GREEDY | prompt))
    assert status == 200
    assert json.loads(whole)["choices"] == [{"index": 0, "finish_reason": "length", "text": text}]
    assert json.loads(whole)["usage"]["completion_tokens"] == 24
    assert max(each.num_steps for each in engine.stats.decisions) > 2  # not token by token
    newer = {"temperature": 0, "max_completion_tokens": 24, "max_tokens": None, "echo": None}
    _, whole = asked(port, "/v1/chat/completions", json.dumps(newer | MESSAGES))
    assert json.loads(whole)["choices"][0]["message"]["content"] == text
    ask = GREEDY | MESSAGES | {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    status, streamed = asked(port, "/v1/chat/completions", json.dumps(ask))
    *events, usage = events_of(streamed)
    for index in (0, 1):
        parts = [each["choices"][0] for each in events]
        parts = [part for part in parts if part["index"] == index]
        assert "".join(part["delta"]["content"] for part in parts) == text
        assert parts[-1]["finish_reason"] == "length"
    assert usage["usage"]["completion_tokens"] == 48
    assert json.loads(asked(port, "/v1/models")[1])["data"][0]["id"] == "demo"
    assert "vllm:generation_tokens_total" in asked(port, "/metrics")[1]


@pytest.mark.full
def test_a_server_refuses_and_goes_on(served):
    wrong = {
        "not json": 400,
        "[]": 400,
        "{}": 400,
        '{"prompt": "a", "tools": []}': 400,
        '{"prompt": "a", "stream": "false"}': 400,
        '{"prompt": "a", "temperature": -1}': 400,
        '{"prompt": "a", "stream": true, "max_tokens": "x"}': 400,
    }

    port, engine = served
    got = {body: asked(port, "/v1/completions", body)[0] for body in wrong}
    assert got == wrong
    for body in ("{}", '{"messages": [{"role": "user"}]}'):
        assert asked(port, "/v1/chat/completions", body)[0] == 400
    status, text = asked(port, "/nowhere")
    assert (status, json.loads(text)["error"]["message"]) == (404, "HTTPException: 404: Not Found")
    assert not engine.has_work


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_error_of_the_engine_is_an_answer(is_streamed):
    class Engine:
        async def astream(self, *_, **__):
            yield Chunk(0, 0, "a", [1], [], None)
            raise RuntimeError("the device is gone")

    body = json.dumps({"prompt": "a", "stream": is_streamed})
    with listening(Engine(), specjax.load_model("demo")) as port:
        status, text = asked(port, "/v1/completions", body)
    assert status == (200 if is_streamed else 500)
    said = {"error": {"message": "RuntimeError: the device is gone"}}
    assert json.loads(text.rstrip().rpartition("data: ")[2]) == said


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_before_the_first_token_aborts_its_request(is_streamed):
    begun, ended = threading.Event(), threading.Event()

    class Engine:
        async def astream(self, *_, **__):
            try:
                begun.set()
                await asyncio.sleep(60)
                yield
            finally:
                ended.set()

    with listening(Engine(), specjax.load_model("demo")) as port:
        leaves = http.client.HTTPConnection("127.0.0.1", port)
        leaves.request(
            "POST", "/v1/completions", f'{{"prompt": "a", "stream": {is_streamed}}}'.lower()
        )
        assert begun.wait(30)
        leaves.close()
        assert ended.wait(30)


def test_a_body_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(server, "MOST_BYTES", 10)
    with listening(None, specjax.load_model("demo")) as port:
        status, text = asked(port, "/v1/completions", '{"prompt": "abc"}')
    assert status == 400
    assert "more than 10 bytes" in text


@pytest.mark.full
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_aborts_its_request_alone(served, is_streamed):
    long = {"prompt": "def main():", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}

    port, engine = served
    leaves = http.client.HTTPConnection("127.0.0.1", port)
    leaves.request("POST", "/v1/completions", json.dumps(long | {"stream": is_streamed}))
    wait_until(lambda: engine.has_work)
    status, stays = asked(port, "/v1/completions", json.dumps(GREEDY | {"prompt": "import os"}))
    leaves.close()
    wait_until(lambda: not engine.has_work)
    assert status == 200
    assert json.loads(stays)["usage"]["completion_tokens"] == 24
    assert engine.stats.num_output_tokens < 1500
