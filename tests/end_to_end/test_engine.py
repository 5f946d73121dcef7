"""specjax.Engine on a tiny model: requests come and go, and every text is its own."""

import asyncio
import dataclasses
import gc
import threading
import weakref

import numpy as np
import pytest
from helpers import ENGINE, FEW_PAGES, assert_engine_is_empty

import specjax
from specjax.api.generation import Stream
from specjax.config.sampling import SamplingParams
from specjax.decode.bucket import Bucket
from specjax.policy.interface import Decision

SAMPLING = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, seed=5)


def prompts(count, longest=90):
    rng = np.random.default_rng(3)
    return [rng.integers(0, 61, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def plain(target):
    """Returns the tokens of prompts sampled one at a time without drafts."""

    def tokens(prompt, sampling=SAMPLING):
        (completion,) = specjax.generate(target, prompt, sampling=sampling, engine=ENGINE)
        return completion.token_ids

    return tokens


@pytest.fixture(scope="module")
def make(target, draft):
    """Returns engines with a draft model; the same compiled steps for the same settings."""

    def make_engine(config=ENGINE, **arguments):
        arguments = {"drafter": draft, "num_speculative_tokens": 3} | arguments
        return specjax.Engine(target, engine=config, **arguments)

    return make_engine


def drain(engine):
    """Steps to the end; returns the completions by request id, in the order of samples."""
    done = {}
    while engine.has_work:
        for chunk in engine.step():
            if chunk.completion is not None:
                done.setdefault(chunk.prompt_index, []).append(chunk.completion)
    for completions in done.values():
        completions.sort(key=lambda completion: completion.sample_index)
    return done


@pytest.mark.slow  # test_engine_load has more of the same
def test_requests_that_come_and_go_and_are_preempted_change_no_text(make, plain):
    with make(FEW_PAGES) as engine:
        waiting, texts, added = prompts(10), {}, []
        for _ in range(4):
            added.append(engine.add(waiting.pop(), SAMPLING))
        while engine.has_work or waiting:
            for chunk in engine.step():
                texts.setdefault(chunk.prompt_index, []).extend(chunk.token_ids)
            if waiting:
                added.append(engine.add(waiting.pop(), SAMPLING))
        num_preempted = engine._loop.num_preemptions
        stats = engine.stats
    assert num_preempted > 0
    for request_id, prompt in zip(added, reversed(prompts(10))):
        assert texts[request_id] == plain(prompt)
    assert stats.num_output_tokens == 10 * 40
    assert stats.mean_acceptance_length > 1.2


@pytest.mark.slow  # rollouts have it in the gate
def test_preemption_changes_no_bit_under_invariant_numerics(make):
    sampling = dataclasses.replace(SAMPLING, logprobs=0)
    config = dataclasses.replace(FEW_PAGES, numerics="invariant")
    with make(config) as engine:
        ids = [engine.add(prompt, sampling) for prompt in prompts(6)]
        together = drain(engine)
        preempted = engine._loop.num_preemptions
        assert preempted > 0
        for request, prompt in zip(ids, prompts(6), strict=True):
            engine._loop.scheduler.pools[0].forget()  # nothing is found again
            again = engine.add(prompt, sampling)
            (alone,) = drain(engine)[again]
            assert together[request][0].token_ids == alone.token_ids
            assert together[request][0].logprobs == alone.logprobs
        assert engine._loop.num_preemptions == preempted


@pytest.mark.full
def test_samples_share_their_prompt(make, target):
    (prompt,) = np.random.default_rng(0).integers(0, 61, (1, 70)).tolist()
    with make() as engine:
        request = engine.add(prompt, dataclasses.replace(SAMPLING, n=4))
        samples = drain(engine)[request]
        # 8 full pages of the prompt's 69 tokens are fed once.
        assert engine._loop.num_prefilled == 69 + 3 * (69 - 8 * 8)
    assert [sample.sample_index for sample in samples] == [0, 1, 2, 3]
    alone = [
        completion.token_ids
        for completion in specjax.generate(
            target, prompt, sampling=dataclasses.replace(SAMPLING, n=4), engine=ENGINE
        )
    ]
    assert [sample.token_ids for sample in samples] == alone


@pytest.mark.full
def test_a_conversation_goes_on_from_its_pages(make, plain):
    (prompt,) = np.random.default_rng(1).integers(0, 61, (1, 60)).tolist()
    with make() as engine:
        request = engine.add(prompt, SAMPLING)
        (first,) = drain(engine)[request]
        follow_up = [*prompt, *first.token_ids, 1, 2, 3]
        fed_before = engine._loop.num_prefilled
        request = engine.add(follow_up, SAMPLING)
        (second,) = drain(engine)[request]
        fed = engine._loop.num_prefilled - fed_before
    assert fed <= 3 + 3 * ENGINE.page_size  # of 102
    assert second.token_ids == plain(follow_up)
    # The drafter found its own keys and values there as well.
    assert second.acceptance.mean_acceptance_length > 1.2


def test_chunks_of_a_stream(make, plain):
    one, other = prompts(2)
    with make() as engine:
        beside = engine.add(other, SAMPLING)
        chunks = list(engine.stream(one, SAMPLING))
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == plain(one) == chunks[-1].completion.token_ids
        assert {chunk.finish_reason for chunk in chunks[:-1]} == {None}
        done = drain(engine)
        assert done[beside][0].token_ids == plain(other)


PLAIN = dataclasses.replace(SAMPLING, num_speculative_tokens=0)


def num_steps_run(engine):
    """Returns the steps of each burst so far, those of prompts left out."""
    return [burst.num_steps for burst in engine.stats.decisions if not burst.prompt_tokens]


def test_whoever_reads_token_by_token_gets_two_at_a_time(make, target, plain):
    """By each kind of stream; batch work keeps bursts of burst_steps, before and after."""
    (prompt,) = prompts(1)

    async def read(engine, **how):
        return [chunk async for chunk in engine.astream(prompt, PLAIN, **how)]

    def batch(engine):
        engine.add(prompt, PLAIN)
        drain(engine)
        return []

    with make() as engine:
        for name, run, most in (
            ("add", batch, 4),
            ("stream", lambda engine: list(engine.stream(prompt, PLAIN)), 2),
            ("astream", lambda engine: asyncio.run(read(engine)), 2),
            ("whole", lambda engine: [*engine.stream(prompt, PLAIN, token_by_token=False)], 4),
            ("awhole", lambda engine: asyncio.run(read(engine, token_by_token=False)), 4),
            ("add again", batch, 4),
        ):
            num_before = len(num_steps_run(engine))
            chunks = run(engine)
            assert num_steps_run(engine)[num_before:] == [most] * (40 // most), name
            if chunks:
                assert [len(chunk.token_ids) for chunk in chunks] == [most] * (40 // most), name
                assert [t for chunk in chunks for t in chunk.token_ids] == plain(prompt), name
    chunks = specjax.stream(target, prompt, sampling=PLAIN, engine=ENGINE)
    assert [len(chunk.token_ids) for chunk in chunks] == [2] * 20


def test_a_stream_that_is_left_saves_what_it_would_have_drawn(make):
    with make() as engine:
        beside = engine.add([5, 6], PLAIN)
        stream = engine.stream([3, 4], PLAIN)
        first = next(stream)
        stream.close()
        done = drain(engine)
        assert len(first.token_ids) == 2
        # Two that were read, two of the burst in flight, and batch work goes on in long bursts.
        steps = num_steps_run(engine)
        assert steps[:2] == [2, 2]
        assert set(steps[2:-1]) == {4}
        assert len(done[beside][0].token_ids) == 40
        assert engine.stats.num_output_tokens <= 40 + 4


@pytest.mark.full
def test_chunks_at_default_settings():
    """64 tokens of the embedded model: 32 chunks, not the 2 of bursts of 32 steps."""
    sampling = SamplingParams(max_tokens=64, ignore_eos=True, num_speculative_tokens=0)
    with specjax.Engine("demo") as engine:
        chunks = list(engine.stream("def fibonacci(n):", sampling))
        assert [len(chunk.token_ids) for chunk in chunks] == [2] * 32
        engine.add("def fibonacci(n):", sampling)
        drain(engine)
        assert num_steps_run(engine)[-2:] == [32, 32]


def test_streams_of_asyncio(make, plain):
    async def text(engine, prompt):
        tokens = []
        async for chunk in engine.astream(prompt, SAMPLING):
            tokens += chunk.token_ids
        return tokens

    async def all_of_them(engine):
        return await asyncio.gather(*[text(engine, prompt) for prompt in prompts(6)])

    with make() as engine:
        texts = asyncio.run(all_of_them(engine))
        assert not engine.has_work
    assert texts == [plain(prompt) for prompt in prompts(6)]


def test_readers_of_asyncio_may_be_slow_and_come_again(make, plain):
    async def text(engine, prompt, pause_s):
        tokens, last = [], None
        async for chunk in engine.astream(prompt, SAMPLING):
            tokens, last = tokens + chunk.token_ids, chunk
            await asyncio.sleep(pause_s)
        assert last.completion.token_ids == tokens
        return tokens

    async def both(engine):
        one, other = prompts(2)
        return await asyncio.gather(text(engine, one, 0.05), text(engine, other, 0))

    with make() as engine:
        for _ in range(2):  # an event loop each
            assert asyncio.run(both(engine)) == [plain(p) for p in prompts(2)]


def test_what_happens_to_a_stream_while_it_is_read(make, plain):
    one, other = prompts(2)
    with make() as engine:
        tokens = []
        for chunk in engine.stream(one, SAMPLING):
            tokens += chunk.token_ids
            for _ in range(50):  # others step, to the end
                assert engine.step() == []
        assert tokens == plain(one) == chunk.completion.token_ids
        stream = engine.stream(other, SAMPLING)
        next(stream)
        assert engine.abort(1)
        *_, last = stream
        assert last.finish_reason == "abort"
        engine._outbox.check_is_empty()


def test_an_exception_ends_the_requests_and_leaves_an_engine(make, plain, monkeypatch):
    one, other = prompts(2)
    with make() as engine:
        first = engine.add(one, SAMPLING)
        while not engine.step():
            pass

        def fail(*arguments, **sizes):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine._loop.decoder, "burst", fail)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        (completion,) = drain(engine)[first]
        assert completion.finish_reason == "error"
        assert "KeyboardInterrupt" in completion.error
        second = engine.add(other, SAMPLING)
        assert drain(engine)[second][0].token_ids == plain(other)


TWINS = dataclasses.replace(SAMPLING, n=2, max_tokens=8, temperature=0)


def end_by_length(engine):
    request = engine.add([1, 2], TWINS)
    return drain(engine)[request]


def end_by_abort(engine):
    request = engine.add([1, 2], TWINS)
    engine.step()
    assert engine.abort(request)
    return drain(engine)[request]


def end_by_deadline(engine):
    request = engine.add([1, 2], TWINS, deadline_s=0.0)
    return drain(engine)[request]


def end_by_leaving(engine):
    stream = engine.stream([1, 2], dataclasses.replace(TWINS, max_tokens=80))
    next(stream)
    stream.close()
    return []


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (end_by_length, "length"),
        (end_by_abort, "abort"),
        (end_by_deadline, "deadline"),
        (end_by_leaving, None),
    ],
)
def test_samples_that_end_in_one_step(make, plain, end, reason):
    """They are over together, and whoever comes after them gets all of its own."""
    with make() as engine:
        beside = engine.stream([3, 4], SAMPLING)
        next(beside)
        before = engine.stats.num_prompts
        completions = end(engine)
        assert [c.finish_reason for c in completions] == [reason] * (2 if reason else 0)
        assert len({tuple(c.token_ids) for c in completions}) <= 1
        *_, last = beside
        assert last.completion.token_ids == plain([3, 4])
        assert engine.stats.num_prompts == before + 2
        assert_engine_is_empty(engine)


def test_closing_ends_samples_and_streams(make):
    engine = make()
    engine.add([1, 2], TWINS)
    stream = engine.stream([3, 4], dataclasses.replace(TWINS, max_tokens=80))
    next(stream)
    loop = weakref.ref(engine._loop)
    engine.close()
    gc.collect()
    assert loop() is None
    assert not engine.has_work
    reasons = [chunk.finish_reason for chunk in stream]
    assert reasons.count("abort") == 2
    engine._outbox.check_is_empty()
    assert engine.stats.num_prompts == 2


def test_an_error_in_a_step_is_raised_and_ends_all_samples(make, plain, monkeypatch):
    with make() as engine:
        twins, other = engine.add([1, 2], TWINS), engine.add([3, 4], SAMPLING)
        engine.step()

        def fail(moved):
            read(moved)  # requests may have ended by then
            raise RuntimeError("as it is")

        read = engine._loop._read
        with monkeypatch.context() as patch:
            patch.setattr(engine._loop, "_read", fail)
            with pytest.raises(RuntimeError, match=r"^as it is$"):
                drain(engine)
        done = drain(engine)
        assert [len(done[twins]), len(done[other])] == [2, 1]
        for completion in (*done[twins], *done[other]):
            assert completion.finish_reason in ("length", "error")
        assert "as it is" in done[other][0].error
        assert_engine_is_empty(engine)
        again = engine.add([3, 4], SAMPLING)
        assert drain(engine)[again][0].token_ids == plain([3, 4])


def test_an_interrupt_before_a_step_began_keeps_nothing(make, monkeypatch):
    """It may come anywhere: in the loop before it could clean up after itself."""
    with make() as engine:
        engine.add([1, 2], TWINS)
        engine.step()

        def interrupt(max_burst_steps):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine._loop, "step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert not engine._loop.has_work
        done = drain(engine)
        assert ["KeyboardInterrupt" in c.error for c in done[0]] == [True, True]
        assert_engine_is_empty(engine)


def test_a_reader_that_raises_ends_its_own_request_alone(make, plain):
    one, other = prompts(2)
    with make() as engine:
        beside = engine.add(other, SAMPLING)
        with pytest.raises(ZeroDivisionError):
            [1 / 0 for _ in engine.stream(one, SAMPLING)]
        assert drain(engine)[beside][0].token_ids == plain(other)
        assert_engine_is_empty(engine)


def test_a_stream_that_is_lost_in_a_step_ends_after_it(make, plain):
    """The garbage collector closes it in the middle of anything."""
    one, other = prompts(2)
    with make() as engine:
        beside = engine.add(other, SAMPLING)
        streams = [engine.stream(one, SAMPLING)]
        next(streams[0])

        def lose(moved):
            streams.clear()
            assert engine._to_end, "it waits for the end of the step"
            assert len(engine._loop.scheduler.occupied) == 2
            read(moved)

        read, engine._loop._read = engine._loop._read, lose
        engine.step()
        engine._loop._read = read
        assert len(engine._loop.scheduler.occupied) == 1
        assert drain(engine)[beside][0].token_ids == plain(other)
        assert_engine_is_empty(engine)


def test_a_progress_function_may_abort_and_may_fail(make, plain):
    (prompt,) = prompts(1)
    told = []

    def progress(what, done, total):
        told.append(what)
        if what == "prefill":
            engine.abort(1)
            engine.step()  # within a step

    with make(progress=progress) as engine:
        first, second = engine.add(prompt, SAMPLING), engine.add(prompt, SAMPLING)
        with pytest.warns(UserWarning, match="from within a step, as by a progress"):
            done = drain(engine)
        assert done[first][0].token_ids == plain(prompt)
        assert done[second][0].finish_reason == "abort"
        assert told.count("prefill") == 1
        assert_engine_is_empty(engine)


@pytest.mark.parametrize(
    "call", [specjax.generate, lambda *a, **named: specjax.stream(*a, **named).result()]
)
def test_a_progress_function_that_fails_ends_no_request(target, plain, call):
    def progress(what, done, total):
        if what != "loading":
            raise OSError("disk full")

    with pytest.warns(UserWarning, match="progress function raised OSError") as caught:
        out = call(target, prompts(3), sampling=SAMPLING, engine=ENGINE, progress=progress)
    assert len(caught) == 1
    assert [each.token_ids for each in out] == list(map(plain, prompts(3)))


def test_an_interrupt_in_a_progress_function_is_one(make):
    def progress(what, done, total):
        if what == "prefill":
            raise KeyboardInterrupt

    with make(progress=progress) as engine:
        request = engine.add(prompts(1)[0], SAMPLING)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert "KeyboardInterrupt" in drain(engine)[request][0].error
        assert_engine_is_empty(engine)


@pytest.mark.full
def test_a_stream_that_waits_for_a_row_holds_no_other_up(make):
    """Chunks come as bursts are over, not once the other has got something."""
    num_bursts = {0: [], 1: []}
    long = dataclasses.replace(SAMPLING, max_tokens=100, speculate=False)

    async def read(engine, name):
        async for _ in engine.astream([1 + name, 2], long):
            num_bursts[name].append(len(engine._loop.records))

    async def both(engine):
        await asyncio.gather(read(engine, 0), read(engine, 1))

    with make(dataclasses.replace(ENGINE, max_rows=1)) as engine:
        asyncio.run(both(engine))
        assert_engine_is_empty(engine)
    # Of 25 bursts; two may come at once where a thread was slow.
    assert all(len(set(own)) > 9 for own in num_bursts.values()), num_bursts


def test_a_task_that_is_cancelled_ends_its_request_alone(make, plain):
    one, other = prompts(2)

    async def read(engine, prompt, has_begun):
        tokens = []
        async for chunk in engine.astream(prompt, SAMPLING):
            has_begun.set()
            tokens += chunk.token_ids
        return tokens

    async def cancel_one(engine):
        has_begun = asyncio.Event()
        task = asyncio.create_task(read(engine, one, has_begun))
        beside = asyncio.create_task(read(engine, other, asyncio.Event()))
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await beside

    with make() as engine:
        assert asyncio.run(cancel_one(engine)) == plain(other)
        while engine.has_work:
            engine.step()
        assert_engine_is_empty(engine)


def test_an_engine_may_close_while_tasks_and_threads_read(make):
    long = dataclasses.replace(SAMPLING, max_tokens=100)
    reasons, has_begun = [], threading.Semaphore(0)

    def read(engine, prompt):
        for chunk in engine.stream(prompt, long):
            has_begun.release()
            reasons.append(chunk.finish_reason)

    async def read_beside(engine, prompt):
        async for chunk in engine.astream(prompt, long):
            has_begun.release()
            reasons.append(chunk.finish_reason)

    engine = make()
    threads = [
        threading.Thread(target=read, args=(engine, [1])),
        threading.Thread(target=lambda: asyncio.run(read_beside(engine, [2]))),
    ]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert has_begun.acquire(timeout=600)
    engine.close()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    ended = [reason for reason in reasons if reason is not None]
    assert len(ended) == 2
    assert set(ended) <= {"abort", "length"}
    engine._outbox.check_is_empty()


def test_figures_stay_what_they_were_when_asked_for(make):
    with make() as engine:
        engine.add([1, 2], TWINS)
        drain(engine)
        stats = engine.stats
        before = dataclasses.asdict(stats.acceptance)
        engine.add([3, 4], TWINS)
        drain(engine)
        assert dataclasses.asdict(stats.acceptance) == before


def test_a_closed_engine_keeps_no_pages(make):
    engine = make()
    engine.add([1, 2, 3], SAMPLING)
    engine.step()
    loop = weakref.ref(engine._loop)
    engine.close()
    gc.collect()
    assert loop() is None
    assert not engine.has_work
    assert engine.stats.num_prompts == 1


def test_a_stream_that_is_closed_aborts_its_request(make):
    with make() as engine:
        stream = engine.stream(prompts(1)[0], SAMPLING)
        next(stream)
        stream.close()
        assert not engine.has_work
        assert engine._loop.scheduler.pools[0].num_held == 0


def test_abort(make, plain):
    one, other = prompts(2)
    with make() as engine:
        first, second = engine.add(one, SAMPLING), engine.add(other, SAMPLING)
        engine.step()
        engine.step()
        assert engine.abort(first)
        assert not engine.abort(first)
        assert not engine.abort(99)
        done = drain(engine)
    assert done[first][0].finish_reason == "abort"
    cut = done[first][0].token_ids
    assert cut == plain(one)[: len(cut)]
    assert done[second][0].token_ids == plain(other)


def test_a_deadline_ends_a_request_with_what_it_has(make, plain):
    prompt = prompts(1)[0]
    with make() as engine:
        late = engine.add(prompt, SAMPLING, deadline_s=0.0)
        in_time = engine.add(prompt, SAMPLING, deadline_s=600.0)
        done = drain(engine)
    assert done[late][0].finish_reason == "deadline"
    assert done[in_time][0].token_ids == plain(prompt)


def test_what_cannot_be_served_says_why_and_touches_nobody(make, plain):
    prompt = prompts(1)[0]
    with make() as engine:
        request = engine.add(prompt, SAMPLING)
        with pytest.raises(ValueError, match=r"^the prompt is empty"):
            engine.add([], SAMPLING)
        with pytest.raises(ValueError, match=r"^token id 61 is outside"):
            engine.add([61], SAMPLING)
        with pytest.raises(ValueError, match="other_verifications=\\['rejection'\\]"):
            engine.add(prompt, dataclasses.replace(SAMPLING, verification="rejection"))
        with pytest.raises(ValueError, match="priority='high' must be a whole number"):
            engine.add(prompt, SAMPLING, priority="high")
        with pytest.raises(ValueError, match="deadline_s=-1 must be seconds"):
            engine.add(prompt, SAMPLING, deadline_s=-1)
        with pytest.raises(ValueError, match="deadline_s='1' must be seconds"):
            engine.add(prompt, SAMPLING, deadline_s="1")
        with pytest.raises(ValueError, match="must be an id that `add` returned"):
            engine.abort([1])
        with pytest.raises(ValueError, match="shorten the prompt"):
            engine.add([1] * ENGINE.max_context, SAMPLING)
        (completion,) = drain(engine)[request]
        assert completion.token_ids == plain(prompt)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.add(prompt, SAMPLING)
    engine.close()


@pytest.mark.full
def test_rules_by_request(make):
    with make(other_verifications=["rejection"]) as engine:
        asked = dataclasses.replace(SAMPLING, verification="rejection")
        first = engine.add(prompts(1)[0], asked)
        second = engine.add(prompts(1)[0], SAMPLING)
        done = drain(engine)
    for request in (first, second):
        assert len(done[request][0].token_ids) == 40
        assert done[request][0].acceptance.num_drafted > 0


@pytest.mark.full
def test_row_buckets_change_no_text(make, plain):
    sampling = [dataclasses.replace(SAMPLING, max_tokens=count) for count in (60, 9, 25, 14)]
    config = dataclasses.replace(ENGINE, row_buckets=(1, 2))
    fixed = {"policy": "fixed"}
    with make(config, drafter="ngram", speculative_config=fixed) as engine:
        ids = list(map(engine.add, prompts(4), sampling))
        done = drain(engine)
        run = {key.bucket for key in engine._loop.decoder.all_traces if key.kind == "burst"}
    assert run == {Bucket(ENGINE.max_rows, 3), Bucket(2, 3), Bucket(1, 3)}
    for request, prompt, asked in zip(ids, prompts(4), sampling, strict=True):
        assert done[request][0].token_ids == plain(prompt, asked)


@pytest.mark.full
def test_k_by_batch_size_changes_no_text(target, draft, plain):
    config = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 1], [3, 9, 0]]}
    sampling = [dataclasses.replace(SAMPLING, max_tokens=n) for n in (60, 5, 30)]
    stream = Stream(
        target,
        prompts(3),
        drafter=draft,
        sampling=sampling,
        speculative_config=config,
        engine=ENGINE,
        policy=None,
    )
    stream._loop.policy.dwell_s = 0.0
    out = stream.result()
    for completion, prompt, asked in zip(out, prompts(3), sampling, strict=True):
        assert completion.token_ids == plain(prompt, asked)
    bursts = [key.bucket for key in stream._loop.decoder.all_traces if key.kind == "burst"]
    assert {bucket.num_speculative_tokens for bucket in bursts} == {0, 1, 3}
    assert out.stats.num_speculative_tokens == 3


@pytest.mark.full
def test_priorities(make):
    with make(dataclasses.replace(ENGINE, max_rows=1)) as engine:
        ids = [engine.add([1, 2], SAMPLING, priority=priority) for priority in (1, 0, 1, 0)]
        order = list(drain(engine))
    assert [ids.index(each) for each in order] == [1, 3, 0, 2]


class PlainFirst:
    """Plain decoding for some bursts, and drafts from then on."""

    max_speculative_tokens = 3
    chooses_rows = False

    def __init__(self, num_plain):
        self.num_left = num_plain
        self.behind = []

    def choose(self, load):
        self.num_left -= 1
        depth = 0 if self.num_left >= 0 else 3
        return Decision(num_speculative_tokens=depth, reason="plain first")

    def observe(self, outcome):
        if outcome.decision.num_speculative_tokens:
            self.behind.append(outcome.num_behind)


@pytest.mark.parametrize(
    "num_plain",
    [
        pytest.param(1, id="one by one", marks=pytest.mark.slow),
        pytest.param(3, id="many at a time", marks=pytest.mark.full),
    ],
)
def test_a_drafter_catches_up_with_what_it_has_not_seen(target, num_plain):
    """The target drafts for itself: it is right, if it has seen all that came before."""
    policy = PlainFirst(num_plain)
    engine = dataclasses.replace(ENGINE, burst_steps=4 if num_plain == 1 else 16)
    out = specjax.generate(
        target,
        prompts(3, longest=20),
        drafter=target,
        num_speculative_tokens=3,
        sampling=dataclasses.replace(SAMPLING, max_tokens=90, temperature=0),
        engine=engine,
        policy=policy,
    )
    assert out.stats.acceptance.num_drafted > 50
    assert out.stats.acceptance_rate > 0.98  # the last tokens are cut
    assert max(policy.behind) == (num_plain * engine.burst_steps + 1)


@pytest.mark.full
@pytest.mark.goodput
def test_a_queue_that_never_ends_teaches_what_drafts_cost(target, draft):
    """Every burst follows an admission; the policy learns all the same."""
    with specjax.Engine(target, drafter=draft, num_speculative_tokens=2, engine=ENGINE) as engine:
        policy = engine._loop.policy
        for _ in range(200):  # while it compiles beside them bursts teach nothing
            for prompt in prompts(12, longest=12):
                engine.add(prompt, dataclasses.replace(SAMPLING, max_tokens=12))
            drain(engine)
            if len(policy.costs.measured) > 1:
                break
    measured = policy.costs.measured
    assert measured
    assert all(policy.costs.seconds(bucket, 50) > 0 for bucket in measured)
    assert policy.ledger.lived_s > 0


def test_a_bad_number_of_steps_ends_no_request(make):
    with make() as engine:
        engine.add([1, 2, 3], SamplingParams(max_tokens=4, temperature=0))
        for steps in ("3", 2.5, [1], float("nan"), 0, -1, True):
            with pytest.raises(ValueError, match=r"max_burst_steps=.* must be a whole number"):
                engine.step(max_burst_steps=steps)
        chunks = []
        while engine.has_work:
            chunks += engine.step()
        assert chunks[-1].completion.finish_reason == "length"


@pytest.mark.full
def test_a_request_that_forbids_every_token_turns_no_drafter_off():
    """It ends by an error; its drafts have no probabilities, as those of weights that are NaN."""
    target, drafter = specjax.testing.tiny_model(1), specjax.testing.tiny_model(2)
    sizes = specjax.EngineConfig(
        max_rows=2, max_context=128, page_size=1, num_pages=340, burst_steps=4
    )
    speculation = {"max_drafts_per_step": 3, "policy": "fixed"}
    with specjax.Engine(target, drafter=drafter, engine=sizes, speculative_config=speculation) as e:
        e.add([5, 6, 7], {"max_tokens": 30, "seed": 1})
        e.add([1, 2], {"bad_token_ids": list(range(target.config.vocab_size))})
        while e.has_work:
            e.step()
