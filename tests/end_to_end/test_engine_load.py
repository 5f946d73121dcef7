"""An engine under load: many requests, of which most meet with something on their way.

Whatever happens to some, every request ends and says how, nothing is kept of it, and what
it wrote is a beginning of what it writes when all is quiet.
"""

import asyncio
import collections
import contextlib
import dataclasses
import faulthandler
import gc
import random
import sys
import threading
import time
import warnings

import pytest
from helpers import assert_engine_is_empty

import specjax
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams

pytestmark = pytest.mark.full

# Pages for two rows of four: requests are preempted.
FEW_PAGES = EngineConfig(page_size=8, max_rows=4, burst_steps=4, max_context=160, num_pages=24)
NUM_TEXTS = 40  # prompts with parameters, of which each request takes one
MOST_OPEN = 24  # requests of one kind of caller at a time
REFUSED = (
    ([], {}),
    ([61], {}),
    ([1] * 200, {}),
    ([1], {"priority": "high"}),
    ([1], {"deadline_s": -1.0}),
)
FINISH_REASONS = {"length", "stop", "abort", "deadline", "error"}
WHOLE = {"length", "stop"}


class ConsumerError(Exception):
    """Raised by those who read."""


class BrokenStep(Exception):
    """Raised in a step, as by a device that fails."""


def make_texts(rng):
    """Returns prompts with sampling parameters; some samples of one prompt end together."""
    texts = []
    for seed in range(NUM_TEXTS):
        prompt = [rng.randrange(61) for _ in range(rng.randrange(1, 90))]
        sampling = SamplingParams(
            n=rng.choice((1, 1, 2, 3, 4)),
            temperature=rng.choice((0.0, 0.8)),
            max_tokens=rng.choice((1, 4, 8, 20, 40)),
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=rng.sample(range(61), 3) if rng.random() < 0.3 else (),
            speculate=rng.random() < 0.8,
            seed=seed,
        )
        texts.append((prompt, sampling))
    return texts


class Load:
    """Callers of one engine, in threads and in tasks of asyncio.

    Args:
      quiet: token ids by text and sample, of nobody disturbed.
    """

    def __init__(self, engine, texts, quiet, num_requests, seed, *, breaks=False):
        self.engine, self.texts, self.quiet = engine, texts, quiet
        self.seed, self.breaks = seed, breaks
        self.counts = collections.Counter()
        self.failures = []
        self._num_callers = 4  # who step, who read in threads, and the tasks
        self._each = num_requests // self._num_callers
        self._is_over = False

    def run(self):
        """Runs all callers to the end; raises what any of them did not expect."""
        others = [
            threading.Thread(target=self._guarded, args=(work, number), daemon=True)
            for number, work in enumerate(
                (self._read_streams, self._read_streams, self._run_tasks, self._abort)
            )
        ]
        for thread in others:
            thread.start()
        self._guarded(self._step, len(others))
        for thread in others[:-1]:
            thread.join()
        while self.engine.has_work:
            self._stepped()
        self._is_over = True
        others[-1].join()
        if self.failures:
            raise self.failures[0]

    def _guarded(self, work, number):
        try:
            work(random.Random(f"{self.seed} {number}"))
        except BaseException as error:
            self.failures.append(error)

    # What requests ask for, and whether they got it.

    def _asked(self, rng):
        """Returns the number of a text and the arguments of `add`."""
        number = rng.randrange(len(self.texts))
        arguments = {"priority": rng.choice((0, 0, 0, -1, 1))}
        if rng.random() < 0.15:
            arguments["deadline_s"] = rng.choice((0.0, 0.01, 0.1, 600.0))
        return number, arguments

    def _refuse(self, rng, add):
        """Asks for something that cannot be served."""
        prompt, arguments = rng.choice(REFUSED)
        with pytest.raises(ValueError):
            add(prompt, SamplingParams(max_tokens=4), **arguments)
        self.counts["refused"] += 1

    def _check(self, number, chunks, *, is_whole):
        """Asserts that chunks tell what the text says, each sample's to its end if it is whole."""
        _, sampling = self.texts[number]
        by_sample = collections.defaultdict(list)
        for chunk in chunks:
            by_sample[chunk.sample_index].append(chunk)
        for sample, own in by_sample.items():
            tokens = [token for chunk in own for token in chunk.token_ids]
            last, expected = own[-1], self.quiet[number][sample]
            assert tokens == expected[: len(tokens)]
            assert not any(chunk.finish_reason for chunk in own[:-1])
            if last.finish_reason is not None:
                assert last.finish_reason in FINISH_REASONS
                assert last.completion.token_ids == tokens
                assert (last.error is not None) == (last.finish_reason == "error")
                assert self.breaks or last.error is None
                assert last.finish_reason not in WHOLE or tokens == expected
                self.counts[last.finish_reason] += 1
        if is_whole:
            assert set(by_sample) == set(range(sampling.n))
            assert all(own[-1].finish_reason for own in by_sample.values())

    # Who calls.

    def _stepped(self):
        try:
            return self.engine.step()
        except BrokenStep:
            self.counts["steps that broke"] += 1
            return []

    def _step(self, rng):
        """Adds requests and steps, to the end of its own."""
        left, numbers, chunks = self._each, {}, collections.defaultdict(list)
        num_ended = collections.Counter()
        while left or numbers:
            while left and len(numbers) < MOST_OPEN and rng.random() < 0.7:
                left -= 1
                if rng.random() < 0.05:
                    self._refuse(rng, self.engine.add)
                    continue
                number, arguments = self._asked(rng)
                request = self.engine.add(*self.texts[number], **arguments)
                numbers[request] = number
                if rng.random() < 0.1:
                    self.engine.abort(request)
            for chunk in self._stepped():
                request = chunk.prompt_index
                chunks[request].append(chunk)
                num_ended[request] += chunk.finish_reason is not None
                if num_ended[request] == self.texts[numbers[request]][1].n:
                    number = numbers.pop(request)
                    self._check(number, chunks.pop(request), is_whole=True)
        self.counts["stepped"] += self._each

    def _read_streams(self, rng):
        """Reads streams one after the other, some of them not to the end."""
        stream = lambda *arguments, **named: next(self.engine.stream(*arguments, **named))
        for _ in range(self._each):
            if rng.random() < 0.05:
                self._refuse(rng, stream)
                continue
            number, arguments = self._asked(rng)
            kind = rng.choice(("read", "read", "slow", "closed", "lost", "raises"))
            self.counts[kind] += 1
            with contextlib.suppress(ConsumerError):
                self._read_stream(number, arguments, kind, rng.randrange(4))

    def _read_stream(self, number, arguments, kind, most):
        chunks, is_whole = [], False
        stream = self.engine.stream(*self.texts[number], **arguments)
        try:
            for chunk in stream:
                chunks.append(chunk)
                if kind == "slow":
                    time.sleep(0.002)
                elif kind != "read" and len(chunks) > most:
                    break
            else:
                is_whole = True
        except BrokenStep:
            self.counts["steps that broke"] += 1
        self._check(number, chunks, is_whole=is_whole)
        if kind == "closed":
            stream.close()
        elif kind == "lost":
            # Left to the garbage collector, whenever it comes, in whichever thread.
            cycle = [stream]
            cycle.append(cycle)
        elif kind == "raises":
            raise ConsumerError

    def _run_tasks(self, rng):
        """Reads streams in tasks, some of which are cancelled."""
        asyncio.run(self._tasks(rng))

    async def _tasks(self, rng):
        room = asyncio.Semaphore(MOST_OPEN)
        tasks = []
        for _ in range(self._each):
            await room.acquire()
            task = asyncio.create_task(self._task(rng))
            task.add_done_callback(lambda _: room.release())
            if rng.random() < 0.2:
                pause_s = rng.choice((0.0, 0.001, 0.02))
                asyncio.get_running_loop().call_later(pause_s, task.cancel)
            tasks.append(task)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, asyncio.CancelledError):
                self.counts["cancelled"] += 1
            elif isinstance(result, BaseException):
                raise result

    async def _task(self, rng):
        if rng.random() < 0.05:
            with pytest.raises(ValueError):
                async for _ in self.engine.astream([], SamplingParams()):
                    pass
            self.counts["refused"] += 1
            return
        number, arguments = self._asked(rng)
        kind, most = rng.choice(("read", "read", "slow", "left", "raises")), 2
        self.counts[f"task {kind}"] += 1
        chunks, is_whole = [], False
        try:
            async for chunk in self.engine.astream(*self.texts[number], **arguments):
                chunks.append(chunk)
                if kind == "slow":
                    await asyncio.sleep(0.002)
                elif kind == "raises":
                    raise ConsumerError
                elif kind == "left" and len(chunks) == most:
                    break
            else:
                is_whole = True
        except ConsumerError:
            pass
        except BrokenStep:
            self.counts["steps that broke"] += 1
        self._check(number, chunks, is_whole=is_whole)

    def _abort(self, rng):
        """Aborts requests of anybody, and ids that nobody has."""
        while not self._is_over:
            request = self.engine._num_added - rng.randrange(-2, 30)
            self.counts["aborts"] += self.engine.abort(request)
            time.sleep(rng.choice((0.002, 0.01)))


def within(seconds, work):
    """Runs work in a thread, and fails with all stacks where it takes longer."""
    errors = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        faulthandler.dump_traceback(file=sys.__stderr__)
        pytest.fail(f"still running after {seconds} s")
    if errors:
        raise errors[0]


@pytest.fixture(scope="module")
def texts():
    return make_texts(random.Random(7))


@pytest.fixture(scope="module")
def quiet(target, texts):
    """Returns the token ids of each text's samples, without drafts, pages enough for all."""
    prompts, sampling = zip(*texts)
    config = dataclasses.replace(FEW_PAGES, num_pages=None)
    out = specjax.generate(target, prompts, sampling=list(sampling), engine=config)
    tokens = collections.defaultdict(dict)
    for completion in out:
        tokens[completion.prompt_index][completion.sample_index] = completion.token_ids
    return tokens


def break_steps(loop, rng, share):
    """Has a share of the bursts that are read back fail, once they have ended requests."""
    read = loop._read

    def read_and_break(moved):
        read(moved)
        if rng.random() < share:
            raise BrokenStep

    loop._read = read_and_break


def run_load(target, draft, texts, quiet, num_requests, seed, policy, *, broken_share):
    """Runs a load on an engine of its own; returns what was counted."""
    rng = random.Random(seed)
    num_reports = 0

    def progress(what, done, total):
        """Calls the engine back, and fails in the end."""
        nonlocal num_reports
        num_reports += 1
        engine.abort(rng.randrange(num_requests))
        if num_reports > 30:
            raise OSError("no room for a log")

    engine = specjax.Engine(
        target,
        drafter=draft,
        num_speculative_tokens=3,
        speculative_config={"policy": policy},
        engine=FEW_PAGES,
    )
    engine._progress._report = progress
    break_steps(engine._loop, rng, broken_share)
    load = Load(engine, texts, quiet, num_requests, seed, breaks=broken_share > 0)
    begun_at = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load.run()
        gc.collect()  # streams that were lost
        while engine.has_work:
            engine.step()
    seconds = time.perf_counter() - begun_at
    assert [str(w.message) for w in caught if "progress" in str(w.message)] == [
        "the progress function raised OSError('no room for a log'): no more progress is "
        "reported, and all else goes on."
    ]
    del engine._loop._read  # from here on no step fails
    assert_engine_is_empty(engine)
    stats = engine.stats
    assert stats.num_prompts == engine._num_added
    # Of few requests, deadlines may end those that would have been preempted.
    assert stats.num_preemptions > 0 or num_requests < 1000
    engine.close()
    assert engine._loop is None
    engine._outbox.check_is_empty()
    return load.counts | collections.Counter(
        requests=stats.num_prompts,
        tokens=stats.num_output_tokens,
        preemptions=stats.num_preemptions,
        seconds=round(seconds),
    )


@pytest.mark.parametrize("broken_share", [0.0, 0.02])
def test_a_load(target, draft, texts, quiet, broken_share):
    arguments = target, draft, texts, quiet, 120, 1, "fixed"
    within(120, lambda: run_load(*arguments, broken_share=broken_share))


@pytest.mark.slow
@pytest.mark.parametrize("broken_share", [0.0, 0.002])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_load_of_2000_requests(target, draft, texts, quiet, seed, broken_share, say):
    arguments = target, draft, texts, quiet, 2000, seed, "goodput"
    counts = {}
    within(500, lambda: counts.update(run_load(*arguments, broken_share=broken_share)))
    say(", ".join(f"{value} {name}" for name, value in sorted(counts.items())))
