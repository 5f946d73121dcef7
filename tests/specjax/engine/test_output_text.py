"""The text of a request's output: prompt as context, special tokens, what ended it."""

import tokenizers
from tokenizers import decoders, models

from specjax.config.sampling import SamplingParams
from specjax.engine.output_text import output_text, text_after
from specjax.engine.request import Request
from specjax.text.tokenization import Tokenizer
from specjax.types import RUNNING, STOPPED

WORDS = ["<s>", "</s>", "[CALL]", "<end>", "\u2581the", "\u2581cat", "\u2581sat", "s"]
BOS, EOS, CALL, END, THE, CAT, SAT, S = range(len(WORDS))


def words() -> Tokenizer:
    """As SentencePiece: the first word of a text loses its space."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>")
    )
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(WORDS[:3])
    backend.add_tokens([WORDS[3]])
    return Tokenizer(backend)


TOKENIZER = words()


def decoded(steps, params, *, prompt=(BOS, THE), finish=RUNNING) -> Request:
    """Returns a request that took steps of tokens, the last with a finish reason."""
    request = Request(
        prompt_index=0,
        sample_index=0,
        prompt_token_ids=prompt,
        params=params,
        seed=0,
        draft_cap=4,
        rule=1,
        max_length=100,
        sampling_values={},
        text=text_after(TOKENIZER, prompt, params),
    )
    for place, ids in enumerate(steps):
        is_last = place == len(steps) - 1
        request.take_step(ids, 0, 0, finish if is_last else RUNNING, [None] * len(ids))
    if not request.is_finished:
        request.end("length")
    return request


def test_texts_of_requests_and_of_finished_outputs_are_the_same():
    keep, include = dict(skip_special_tokens=False), dict(include_stop_str_in_output=True)
    right = {
        "a first word has its space": ([CAT, SAT], {}, " cat sat", None),
        "a call is left out": ([CALL, CAT], {}, " cat", None),
        "a call is kept": ([CALL, CAT], keep, "[CALL] cat", None),
        "a stop token": ([CAT, EOS], {}, " cat", EOS),
        "a stop token beside others": ([CALL, CAT, EOS], keep, "[CALL] cat", EOS),
        "a stop token that is included": ([CAT, EOS], keep | include, " cat</s>", EOS),
        "but special": ([CAT, EOS], include, " cat", EOS),
        "a stop token that is no special one": ([CAT, END], include, " cat<end>", END),
        "its text is cut": ([CAT, END], {}, " cat", END),
        "a stop string": ([CAT, SAT, S], dict(stop=" sat"), " cat", " sat"),
        "a stop string that is included": (
            [CAT, SAT],
            dict(stop=" sa") | include,
            " cat sa",
            " sa",
        ),
        "a special stop string": ([CAT, CALL, SAT], dict(stop="[CALL]"), " cat", "[CALL]"),
        "included, but special": ([CAT, CALL], dict(stop="[CALL]") | include, " cat", "[CALL]"),
        "early": ([CALL, SAT, CAT], dict(stop="[CALL]", min_tokens=1), " sat cat", None),
    }
    for case, (ids, given, text, reason) in right.items():
        params = SamplingParams(**given)
        finish = STOPPED if isinstance(reason, int) else RUNNING
        for steps in ([ids], [[i] for i in ids]):
            request = decoded(steps, params, finish=finish)
            own = request.output_token_ids
            assert "".join(piece.text for piece in request.shown) == text, case
            assert request.stop_reason == reason, case
            assert request.finish_reason == ("length" if reason is None else "stop"), case
            is_stopped = reason is not None
            again = output_text(TOKENIZER, (BOS, THE), params, own, is_stopped=is_stopped)
            assert again == text, case


def test_tokens_of_a_step_after_a_special_stop_string_are_discarded():
    request = decoded([[CAT, CALL, SAT, SAT]], SamplingParams(stop=["[CALL]"]))
    assert request.output_token_ids == [CAT, CALL]
    assert (request.finish_reason, request.stop_reason) == ("stop", "[CALL]")


def test_a_prompt_without_text_is_no_context():
    for prompt in ((), (BOS,), (EOS, BOS, CALL)):
        request = decoded([[CAT, SAT]], SamplingParams(), prompt=prompt)
        assert "".join(piece.text for piece in request.shown) == "cat sat", prompt
    kept = SamplingParams(skip_special_tokens=False)
    request = decoded([[CAT]], kept, prompt=(BOS,))
    assert "".join(piece.text for piece in request.shown) == " cat"
