"""generate() and stream() on tiny random models: what users may pass, and what they get."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked_for import quick
from helpers import (
    ENGINE,
    ScriptedDrafter,
    scripted_drafter,
    tiny_gpt2,
    tiny_llama,
    uncached_logits,
)
from scipy.stats import chisquare
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

import specjax
from specjax.api.generation import Stream
from specjax.config.engine import EngineConfig
from specjax.config.sampling import SamplingParams
from specjax.decode.bucket import ADMIT, BURST, MIXED, PREFILL, Bucket, StepKey
from specjax.decode.decoder import shared_decoder
from specjax.decode.sizes import PromptShape
from specjax.heads.loading import LoadedDrafter
from specjax.sampling import EVERYTHING, Uses
from specjax.text.tokenization import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 61, size).tolist() for size in (1, 2, 7, 8, 9, 70, 16, 3, 30)]


def ids(generation):
    return [completion.token_ids for completion in generation]


def generate(target, prompts, **arguments):
    arguments.setdefault("engine", ENGINE)
    arguments.setdefault("sampling", GREEDY)
    return specjax.generate(target, prompts, **arguments)


@pytest.fixture(scope="module")
def plain(target, prompts):
    return generate(target, prompts)


def test_more_prompts_than_rows_are_queued(target, prompts, plain):
    alone = [generate(target, prompt)[0].token_ids for prompt in prompts]
    assert ids(plain) == alone
    assert [len(completion.token_ids) for completion in plain] == [20] * len(prompts)
    assert {completion.finish_reason for completion in plain} == {"length"}


@pytest.mark.parametrize(
    "num_right",
    [
        pytest.param((0,), marks=pytest.mark.slow),
        pytest.param((4,), marks=pytest.mark.slow),
        (0, 4, 1, 3, 2),
    ],
    ids=str,
)
def test_scripted_drafts_change_nothing(target, prompts, plain, num_right):
    """All rejected, all accepted, and every place of the first rejection."""
    texts = [(*prompt, *completion.token_ids) for prompt, completion in zip(prompts, plain)]
    drafter = scripted_drafter(texts, num_right=num_right, vocab_size=61)
    out = generate(target, prompts, drafter=drafter, num_speculative_tokens=4)
    assert ids(out) == ids(plain)
    counts = out.stats.acceptance
    if num_right == (0,):
        assert counts.num_accepted == 0 < counts.num_drafted
        assert out.stats.mean_acceptance_length == 1
    if num_right == (4,):
        assert counts.num_accepted == counts.num_drafted
        assert counts.num_steps == len(prompts) * 4  # 20 tokens, 5 a step


@pytest.mark.full
def test_stop_token_inside_a_draft(target, prompts, plain):
    texts = [(*prompt, *completion.token_ids) for prompt, completion in zip(prompts, plain)]
    stop = plain[3].token_ids[6]
    first = plain[3].token_ids.index(stop)
    sampling = [GREEDY] * len(prompts)
    sampling[3] = dataclasses.replace(GREEDY, stop_token_ids=[stop])
    drafter = scripted_drafter(texts, num_right=(4,), vocab_size=61)
    out = generate(target, prompts, drafter=drafter, num_speculative_tokens=4, sampling=sampling)
    assert out[3].token_ids == plain[3].token_ids[: first + 1]
    assert out[3].finish_reason == "stop"
    assert out[3].stop_reason == stop
    assert ids(out)[:3] + ids(out)[4:] == ids(plain)[:3] + ids(plain)[4:]


def characters() -> Tokenizer:
    """One printable character of ASCII per token."""
    vocabulary = {chr(ord("!") + index): index for index in range(61)}
    backend = Backend(WordLevel(vocabulary, unk_token="!"))
    backend.decoder = Fuse()
    return Tokenizer(backend)


@pytest.mark.full
def test_stop_string_inside_a_draft(target, prompts, plain):
    """Of output tokens 5 to 8, drafted and accepted together, the third completes it."""
    speaking = dataclasses.replace(target, tokenizer=characters())
    texts = [(*prompt, *completion.token_ids) for prompt, completion in zip(prompts, plain)]
    drafter = scripted_drafter(texts, num_right=(4,), vocab_size=61)
    arguments = {"drafter": drafter, "num_speculative_tokens": 4}
    whole = generate(speaking, prompts, **arguments)[5]
    assert [piece.is_draft for piece in whole.pieces[:10]] == [*[True] * 4, False] * 2
    stop = whole.text[6:8]
    assert whole.text.find(stop) == 6

    sampling = [GREEDY] * len(prompts)
    sampling[5] = dataclasses.replace(GREEDY, stop=stop)
    drafted = generate(speaking, prompts, sampling=sampling, **arguments)
    undrafted = generate(speaking, prompts, sampling=sampling)
    for out in (drafted, undrafted):
        assert out[5].text == whole.text[:6]
        assert out[5].token_ids == whole.token_ids[:8]
        assert out[5].finish_reason == "stop"
        assert out[5].stop_reason == stop
        assert ids(out)[:5] + ids(out)[6:] == ids(plain)[:5] + ids(plain)[6:]
    counts = drafted[5].acceptance
    assert (counts.num_steps, counts.num_drafted, counts.num_accepted) == (2, 8, 4 + 3)
    assert counts.accepted_at == [2, 2, 2, 1]
    assert undrafted[5].acceptance.num_steps == 8


@pytest.mark.full
def test_own_number_of_speculative_tokens(target, draft, prompts, plain):
    off = dataclasses.replace(GREEDY, num_speculative_tokens=0)
    one = dataclasses.replace(GREEDY, num_speculative_tokens=1)
    sampling = [off, one, GREEDY] * 3
    out = generate(target, prompts, drafter=draft, num_speculative_tokens=3, sampling=sampling)
    assert ids(out) == ids(plain)
    assert out[0].acceptance.num_drafted == 0
    assert len(out[1].acceptance.drafted_at) == 1
    assert len(out[2].acceptance.drafted_at) == 3


@pytest.mark.full
def test_a_request_that_does_not_speculate_beside_others_that_do(target, draft, prompts, plain):
    # Whatever its own K says, of which it is not told that it is too large.
    off = dataclasses.replace(GREEDY, speculate=False, num_speculative_tokens=99)
    sampling = [off, GREEDY, GREEDY] * 3
    out = generate(target, prompts, drafter=draft, num_speculative_tokens=3, sampling=sampling)
    assert ids(out) == ids(plain)
    drafted = [completion.acceptance.num_drafted > 0 for completion in out]
    assert drafted == [False, True, True] * 3
    steps = [completion.acceptance.num_steps for completion in out]
    assert steps[0] == 20 > min(steps)


@pytest.mark.slow
def test_rejection_keeps_the_law_at_temperature_zero(target, draft, prompts, plain):
    out = generate(
        target,
        prompts,
        drafter=draft,
        num_speculative_tokens=3,
        verification="rejection",
    )
    assert ids(out) == ids(plain)


@pytest.mark.slow
def test_rejection_samples_the_targets_law():
    """The joint frequencies of three tokens: accepted, recovered and bonus ones."""
    size, num_samples = 5, 8000
    target = tiny_llama(3, vocab_size=size, num_layers=1)
    draft = tiny_llama(4, vocab_size=size, num_layers=1)
    out = specjax.generate(
        target,
        [3],
        drafter=draft,
        num_speculative_tokens=2,
        verification="rejection",
        sampling=SamplingParams(temperature=2, max_tokens=3, n=num_samples, seed=0),
        engine=EngineConfig(page_size=8, max_rows=512, burst_steps=4),
    )
    assert 0.3 < out.stats.acceptance_rate < 0.7
    counts = np.zeros((size, size, size))
    np.add.at(counts, tuple(np.array(ids(out)).T), 1)

    token_ids = np.indices(counts.shape).reshape(3, -1).T
    texts = np.pad(token_ids[:, :-1], ((0, 0), (1, 0)), constant_values=3)
    logits = uncached_logits(target.params, target.config, jnp.asarray(texts))
    each = np.take_along_axis(
        np.asarray(jax.nn.softmax(logits / 2), np.float64),
        token_ids[:, :, None],
        axis=2,
    )
    expected = num_samples * np.prod(each, axis=(1, 2))
    expected *= num_samples / expected.sum()  # from float32
    assert expected.min() > 5
    assert chisquare(counts.reshape(-1), expected).pvalue > 1e-4


def test_a_bad_request_fails_alone(target, prompts, plain):
    bad = {
        1: [],
        2: [1, 61],
        4: list(range(60)) * 20,
        5: "text without a tokenizer",
    }
    mixed = [bad.get(index, prompt) for index, prompt in enumerate(prompts)]
    sampling = [GREEDY] * len(prompts)
    sampling[7] = SamplingParams(stop_token_ids=[61])
    sampling[8] = dataclasses.replace(GREEDY, stop="x")
    out = generate(target, mixed, sampling=sampling)
    for index, completion in enumerate(out):
        if index in bad or index in (7, 8):
            assert completion.finish_reason == "error"
            assert completion.error.startswith(f"prompt {index}: ")
        else:
            assert completion.token_ids == plain[index].token_ids
    assert "outside the vocabulary; expected 0 to 60" in out[2].error
    assert "shorten the prompt" in out[4].error
    assert "stop_token_ids holds 61" in out[7].error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"verification": "exact"}, "expected one of greedy, seeded"),
        (
            {"verification": "greedy", "sampling": SamplingParams()},
            "needs temperature 0",
        ),
        (
            {"sampling": [GREEDY, GREEDY]},
            "2 sampling parameters were given for 1 prompts",
        ),
        ({"drafter": tiny_llama(1, vocab_size=67)}, "67"),
        ({"speculative_config": '{"method": "qwen3_next_mtp"}'}, "'qwen3_next_mtp' is not avail"),
        ({"speculative_config": '{"method": "mtp"}'}, "was loaded from none; name the folder"),
        ({"engine": EngineConfig(page_size=8, num_pages=1)}, "num_pages"),
    ],
)
def test_a_bad_call_raises_before_any_compile(target, arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        generate(target, [[1, 2, 3]], **arguments)


@pytest.mark.parametrize("prompts", [[], [[]], ""])
def test_no_prompt(target, prompts):
    with pytest.raises(ValueError, match=r"no prompts|empty|no tokenizer"):
        generate(target, prompts)


def test_nan_weights_end_a_row_with_an_error(target):
    """A NaN in one token's embedding poisons the rows that meet it and no other."""
    params = {
        **target.params,
        "embed_tokens": target.params["embed_tokens"].at[5].set(jnp.nan),
    }
    poisoned = dataclasses.replace(target, params=params)
    healthy = [[1, 2], [3, 4, 6]]
    banned = dataclasses.replace(GREEDY, bad_token_ids=[5])
    out = generate(poisoned, [healthy[0], [7, 5, 1], healthy[1]], sampling=banned)
    assert out[1].finish_reason == "error"
    assert "NaN" in out[1].error
    without = generate(target, [*healthy, [7, 8, 1]], sampling=banned)
    assert [out[0].token_ids, out[2].token_ids] == ids(without)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("other", [{}, {"num_kv_heads": 1}])
def test_gpt2(prompts, other):
    target = tiny_gpt2(0, **other)
    plain = generate(target, prompts)
    drafted = generate(target, prompts, drafter="ngram", num_speculative_tokens=3)
    assert ids(plain) == ids(drafted)


@pytest.mark.full
def test_prompt_up_to_the_last_position():
    """Output ends where the model's positions do, also with drafts in reach of the end."""
    target = tiny_llama(2, max_position_embeddings=32)
    prompts, engine = [[1] * 30, [2] * 31], dataclasses.replace(ENGINE, max_context=None)
    plain = generate(target, prompts, engine=engine)
    assert [len(c.token_ids) for c in plain] == [2, 1]
    assert {c.finish_reason for c in plain} == {"length"}
    drafted = generate(target, prompts, engine=engine, drafter="ngram", num_speculative_tokens=7)
    assert ids(plain) == ids(drafted)


@pytest.mark.full
def test_logprobs_do_not_depend_on_speculation(target, draft, prompts):
    sampling = SamplingParams(temperature=0.9, top_k=8, max_tokens=10, seed=4, logprobs=2)
    plain = generate(target, prompts, sampling=sampling)
    drafted = generate(target, prompts, drafter=draft, num_speculative_tokens=3, sampling=sampling)
    for ours, theirs in zip(drafted, plain):
        assert [x.token_id for x in ours.logprobs] == theirs.token_ids
        for a, b in zip(ours.logprobs, theirs.logprobs):
            np.testing.assert_allclose((a.raw, a.processed), (b.raw, b.processed), atol=1e-4)
            assert a.processed >= a.raw - 20
            assert len(a.top_raw) == len(a.top_processed) == 2


def test_stream_yields_everything_once(target, draft, prompts, plain):
    stream = specjax.stream(
        target,
        prompts,
        sampling=GREEDY,
        engine=ENGINE,
        drafter=draft,
        num_speculative_tokens=3,
    )
    gathered = {}
    ended = set()
    for chunk in stream:
        gathered.setdefault(chunk.prompt_index, []).extend(chunk.token_ids)
        if chunk.finish_reason:
            ended.add(chunk.prompt_index)
    assert [gathered[index] for index in range(len(prompts))] == ids(plain)
    assert ended == set(range(len(prompts)))
    assert ids(stream.result()) == ids(plain)


PROMPT = "class Point:\n    def __init__(self, x, y):\n"
SPOKEN = SamplingParams(temperature=0.8, max_tokens=40, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def demo():
    return specjax.load_model("demo")


def chunks_and_result(demo, sampling):
    """Streams one prompt's text from the embedded pair; generate() gives the same."""
    arguments = {"drafter": "demo", "sampling": sampling}
    stream = specjax.stream(demo, PROMPT, **arguments)
    chunks = list(stream)
    result, generated = stream.result()[0], specjax.generate(demo, PROMPT, **arguments)
    assert "".join(chunk.text for chunk in chunks) == result.text == generated[0].text
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    assert pieces == result.pieces == generated[0].pieces
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == result.finish_reason
    return chunks, result


def is_held_back(demo, chunk):
    """Whether a chunk shows less, or more, than its own tokens say."""
    return chunk.text != demo.tokenizer.decode(chunk.token_ids)


@pytest.mark.full
def test_stream_of_text(demo):
    chunks, result = chunks_and_result(demo, SPOKEN)
    assert len(chunks) > 2
    assert result.text == demo.tokenizer.decode(result.token_ids)
    assert not any(is_held_back(demo, chunk) for chunk in chunks)


@pytest.mark.full
def test_stream_holds_back_incomplete_characters(demo):
    """Output of the three bytes of one character, in any order."""
    sampling = SamplingParams(
        temperature=10,
        allowed_token_ids=demo.tokenizer.encode("\u4f60"),
        max_tokens=60,
        seed=0,
    )
    assert len(sampling.allowed_token_ids) == 3
    chunks, result = chunks_and_result(demo, sampling)
    assert result.text == demo.tokenizer.decode(result.token_ids)
    assert "\u4f60" in result.text
    assert any(is_held_back(demo, chunk) for chunk in chunks)


@pytest.mark.full
def test_stream_holds_back_beginnings_of_stop_strings(demo):
    """One that the next chunk completes, and one that it shows to be none."""
    plain_chunks, plain = chunks_and_result(demo, SPOKEN)
    shown = plain_chunks[0].text[:-2]
    rest = plain.text[len(shown) :]
    assert plain.text.find(rest[:4]) == len(shown)
    for stop, expected in ((rest[:4], shown), (rest[:2] + "?", plain.text)):
        sampling = dataclasses.replace(SPOKEN, stop=stop)
        chunks, result = chunks_and_result(demo, sampling)
        assert chunks[0].text == shown
        assert is_held_back(demo, chunks[0])
        assert result.text == expected
        assert result.finish_reason == ("stop" if expected == shown else "length")


def test_samples_do_not_depend_on_the_batch(target, prompts):
    sampling = SamplingParams(temperature=1, max_tokens=12, seed=3, n=4)
    together = generate(target, prompts[:3], sampling=sampling)
    one_row = dataclasses.replace(ENGINE, max_rows=1)
    alone = generate(target, prompts[1], sampling=sampling, engine=one_row)
    assert ids(together)[4:8] == ids(alone)
    assert len({tuple(token_ids) for token_ids in ids(alone)}) > 1


def test_unseeded_requests_report_their_seed(target):
    first = generate(target, [[1, 2]], sampling=SamplingParams(max_tokens=12))[0]
    again = generate(target, [[1, 2]], sampling=SamplingParams(max_tokens=12, seed=first.seed))[0]
    assert first.token_ids == again.token_ids


def test_loaded_drafter_is_passed_through(target):
    spec = ScriptedDrafter(sequences=((1, 2, 3),), num_right=(1,), vocab_size=61)
    loaded = LoadedDrafter("script", spec)
    assert specjax.load_drafter(loaded, target) is loaded


@pytest.mark.slow
def test_a_drafter_of_shorter_context_changes_nothing(target, prompts, plain):
    """It proposes nothing past its positions; the text goes on to the target's."""
    short = tiny_llama(0, max_position_embeddings=16, num_layers=1)
    out = generate(target, prompts, drafter=short, num_speculative_tokens=3)
    assert ids(out) == ids(plain)
    assert out[5].acceptance.num_drafted == 0  # 70 tokens of prompt
    assert out[0].acceptance.num_drafted > 0


@pytest.mark.full
def test_weights_of_another_dtype_are_compiled_anew(target, prompts):
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params)
    mixed = {**halved, "embed_tokens": target.params["embed_tokens"]}
    for params in (target.params, mixed, target.params):
        model = dataclasses.replace(target, params=params)
        assert len(generate(model, prompts[:3])) == 3


def generate_once(target):
    specjax.generate(target, [[1, 2, 3]], sampling=GREEDY, engine=ENGINE)


def run_an_engine(target):
    """Runs one request, and drops the engine without closing it."""
    engine = specjax.Engine(target, drafter="ngram", engine=ENGINE)
    engine.add([1, 2, 3], GREEDY)
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    "run", quick([generate_once, run_an_engine], generate_once), ids=["generate", "engine"]
)
def test_weights_are_freed_with_the_model(run):
    target = tiny_llama(3)
    weight = weakref.ref(jax.tree.leaves(target.params)[0])
    run(target)
    del target
    gc.collect()
    assert weight() is None


@pytest.mark.full
@pytest.mark.parametrize("convert", [np.array, jnp.array, tuple], ids=["numpy", "jax", "tuple"])
def test_prompts_of_any_sequence(target, prompts, plain, convert):
    out = generate(target, [convert(prompts[2]), convert(prompts[3])])
    assert ids(out) == ids(plain)[2:4]
    assert ids(generate(target, convert(prompts[2]))) == ids(plain)[2:3]


def test_failed_prompts_have_all_their_samples(target):
    sampling = SamplingParams(temperature=0, max_tokens=3, n=3, seed=5)
    out = generate(target, [[1, 2], []], sampling=sampling)
    assert [(c.prompt_index, c.sample_index) for c in out] == [
        (prompt, sample) for prompt in (0, 1) for sample in range(3)
    ]
    assert {c.seed for c in out} == {5}


def test_a_larger_number_of_speculative_tokens_warns(target, draft):
    wants = dataclasses.replace(GREEDY, num_speculative_tokens=9)
    with pytest.warns(UserWarning, match="num_speculative_tokens=9"):
        generate(
            target,
            [[1, 2], [3], [4]],
            drafter=draft,
            num_speculative_tokens=3,
            sampling=wants,
        )


def test_a_stream_goes_on_where_it_was_left(target, prompts, plain):
    stream = specjax.stream(target, [prompts[2], []], sampling=GREEDY, engine=ENGINE)
    chunks = iter(stream)
    failed = next(chunks)
    assert failed.finish_reason == "error"
    assert "empty" in failed.error
    first = next(chunks)
    rest = [token for chunk in stream for token in chunk.token_ids]
    assert [*first.token_ids, *rest] == plain[2].token_ids


@pytest.mark.full
def test_memory_of_a_burst_does_not_grow_with_the_pool(target):
    """Pages are written in place: temporaries are the same for 16 times the pages."""
    temporary = []
    for num_pages in (64, 1024):
        engine = dataclasses.replace(ENGINE, num_pages=num_pages)
        stream = Stream(target, [[1, 2, 3]], sampling=GREEDY, engine=engine)
        stream.result()
        analysis = stream._loop.decoder.compiled_burst(0).memory_analysis()
        temporary.append(analysis.temp_size_in_bytes)
    assert temporary[0] == temporary[1]


def test_what_is_no_model_is_named(target):
    with pytest.raises(TypeError, match="got dict"):
        generate({}, [[1]])
    with pytest.raises(ValueError, match="SamplingParams or a mapping"):
        generate(target, [[1]], sampling=8)


# From here on the compiled functions of the tests above are forgotten.
# Between them every feature of SamplingParams that the device knows.
EVERY_FEATURE = [
    GREEDY,
    SamplingParams(temperature=1, max_tokens=9, seed=1, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=5, min_p=0.01, max_tokens=11, logprobs=3),
    SamplingParams(top_p=0.5, repetition_penalty=1.2, max_tokens=8, seed=2**63),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, max_tokens=7),
    SamplingParams(logit_bias={3: 1.0}, bad_token_ids=[4, 5], max_tokens=3),
    SamplingParams(allowed_token_ids=[1, 2, 3], min_tokens=2, stop_token_ids=[2], max_tokens=5),
    SamplingParams(num_speculative_tokens=1, max_tokens=4),
    SamplingParams(num_speculative_tokens=0, max_tokens=4),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_prompts", "longest"),
    [
        pytest.param((1,), 300, marks=pytest.mark.slow),
        pytest.param((2,), 200, marks=pytest.mark.slow),
        ((3, 4, 7), 200),
    ],
)
def test_one_trace_per_executable(target, draft, num_prompts, longest):
    """In each bucket, over batches, lengths, features, seeds and weights."""
    shared_decoder.cache_clear()
    rng = np.random.default_rng(2)
    other = jax.tree.map(lambda leaf: leaf * 1.01, target.params)
    other = dataclasses.replace(target, params=other)
    for index, sampling in enumerate(EVERY_FEATURE):
        number = num_prompts[index % len(num_prompts)]
        # The long prompt is left alone with over 128 tokens, or with fewer.
        sizes = [longest, *[(40, 90)[index % 2]] * (number - 1)]
        for model in (target, other):
            stream = Stream(
                model,
                [rng.integers(0, 61, size).tolist() for size in sizes],
                drafter=draft,
                sampling=sampling,
                num_speculative_tokens=3,
                engine=ENGINE,
            )
            assert {c.error for c in stream.result()} == {None}
            # With the drafter, and what runs K = 0.
            assert shared_decoder.cache_info().currsize == 2
    rows = min(max(num_prompts), ENGINE.max_rows)
    decoder = stream._loop.decoder
    plain, drafting = (StepKey(BURST, Bucket(decoder.sizes.rows, k)) for k in (0, 3))
    # For what the first call asks for, and for everything.
    assert {key.uses for key in decoder.all_traces} == {Uses(*[False] * 4), EVERYTHING}
    whole = lambda keys: {key._replace(uses=EVERYTHING) for key in keys}
    assert whole(decoder.plain.traces) <= {plain}
    once = {plain, drafting, *(StepKey(ADMIT, count=count) for count in (1, rows))}
    of_prompts = whole(key for key in decoder.traces if key.kind in (PREFILL, MIXED))
    assert whole(decoder.all_traces) == once | of_prompts
    assert {*decoder.all_traces.values()} == {1}
    # One executable per token bucket of prompts, beside K as without.
    prompts = {key.prompts.num_tokens for key in of_prompts if key.kind == PREFILL}
    assert prompts <= set(decoder.prompt_sizes.buckets)
    beside = {(key.bucket, key.prompts) for key in of_prompts if key.kind == MIXED}
    shapes = [PromptShape(rows, each) for each in decoder.prompt_sizes.buckets]
    assert beside <= {(drafting.bucket, shape) for shape in shapes}


@pytest.mark.full
def test_progress_is_told(target):
    shared_decoder.cache_clear()
    reports = []
    generate(
        target,
        [list(range(30)) * 5],
        progress=lambda *report: reports.append(report),
    )
    assert ("loading", 0, 0) in reports
    assert {"compiling the prefill", "compiling the burst"} <= {what for what, _, _ in reports}
    prefill = [report[1:] for report in reports if report[0] == "prefill"]
    assert (prefill[0], prefill[-1]) == ((0, 149), (149, 149))
    assert reports[-1] == ("tokens", 20, 20)
