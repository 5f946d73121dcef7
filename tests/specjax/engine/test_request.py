"""One request on the host: what steps bring, where it ends, what is counted."""

import math
import string

import pytest
import tokenizers
from tokenizers import decoders, models

from specjax.config.sampling import SamplingParams
from specjax.engine.request import (
    FINISH_REASONS,
    AcceptanceCounts,
    Request,
    SelfCheck,
    TextPiece,
    TokenLogProbs,
)
from specjax.text.detokenize import IncrementalText
from specjax.text.tokenization import Tokenizer
from specjax.types import INVALID_LOGITS as ERROR
from specjax.types import OUT_OF_LENGTH as LENGTH
from specjax.types import RUNNING, STOPPED

EOS = 26


def letters() -> Tokenizer:
    """One token per letter, and an end-of-sequence token."""
    vocab = {letter: index for index, letter in enumerate(string.ascii_lowercase)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


TOKENIZER = letters()


def ids(text: str) -> list[int]:
    return [string.ascii_lowercase.index(letter) for letter in text]


def new_request(stop=(), *, has_text=True, logprobs=None, min_tokens=0) -> Request:
    params = SamplingParams(stop=stop, logprobs=logprobs, min_tokens=min_tokens)
    text = IncrementalText(TOKENIZER, params.stop_strings) if has_text else None
    return Request(
        prompt_index=0,
        sample_index=0,
        prompt_token_ids=[1, 2],
        params=params,
        seed=0,
        draft_cap=4,
        rule=1,
        max_length=100,
        sampling_values={},
        text=text,
    )


def text_of(request: Request) -> str:
    return "".join(piece.text for piece in request.shown)


def step(request, text, accepted=0, drafted=0, finish=RUNNING, extra=(), logprobs=()):
    request.take_step([*ids(text), *extra], accepted, drafted, finish, logprobs)


def test_what_ended_it_is_said():
    by_string = new_request(["xy", "y"])
    step(by_string, "axyb")
    assert (by_string.finish_reason, by_string.stop_reason) == ("stop", "xy")
    by_token = new_request(["q"])
    step(by_token, "ab", extra=[EOS], finish=STOPPED)
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", EOS)
    # The string completes before the token that the device stopped at.
    both = new_request(["b"])
    step(both, "ab", extra=[EOS], finish=STOPPED)
    assert (both.finish_reason, both.stop_reason) == ("stop", "b")
    by_length = new_request()
    step(by_length, "ab", finish=LENGTH)
    assert (by_length.finish_reason, by_length.stop_reason) == ("length", None)
    untold = new_request(has_text=False)
    step(untold, "ab", extra=[EOS], finish=STOPPED)
    assert untold.stop_reason == EOS


def test_steps_add_up():
    request = new_request()
    step(request, "abc", accepted=2, drafted=4)
    step(request, "d", accepted=0, drafted=4)
    step(request, "ef", accepted=1, drafted=1)
    assert request.output_token_ids == ids("abcdef")
    assert request.is_draft == [True, True, False, False, True, False]
    assert text_of(request) == "abcdef"
    assert [piece.is_draft for piece in request.shown] == request.is_draft
    assert not request.is_finished
    counts = request.counts
    assert (counts.num_steps, counts.num_drafted, counts.num_accepted) == (3, 9, 3)
    assert counts.drafted_at == [3, 2, 2, 2]
    assert counts.accepted_at == [2, 1, 0, 0]


def test_stop_string_inside_a_step_discards_and_does_not_count_what_is_beyond():
    request = new_request(stop="cd", logprobs=0)
    step(request, "ab", accepted=1, drafted=4, logprobs=list("ab"))
    step(request, "cdefg", accepted=4, drafted=4, logprobs=list("cdefg"))
    assert request.is_finished
    assert request.finish_reason == "stop"
    assert text_of(request) == "ab"
    # The tokens end with the one that completed the stop string.
    assert request.output_token_ids == ids("abcd")
    assert request.logprobs == list("abcd")
    assert request.is_draft == [True, False, True, True]
    assert request.counts.num_accepted == 1 + 2
    assert request.counts.accepted_at == [2, 1, 0, 0]


def test_stop_string_over_two_steps_is_held_back():
    request = new_request(stop="bcd")
    step(request, "abc", accepted=2, drafted=2)
    assert text_of(request) == "a"
    assert request.output_token_ids == ids("abc")
    step(request, "de", accepted=1, drafted=2)
    assert request.output_token_ids == ids("abcd")
    assert text_of(request) == "a"
    assert request.counts.accepted_at == [2, 1]


def test_what_was_held_back_is_shown_when_it_was_no_stop_string():
    request = new_request(stop="bcd")
    step(request, "abc")
    step(request, "x")
    assert text_of(request) == "abcx"
    request = new_request(stop="bcd")
    step(request, "abc", finish=LENGTH)
    assert text_of(request) == "abc"
    assert request.finish_reason == "length"


def test_stop_string_completed_by_the_targets_own_token():
    request = new_request(stop="c")
    step(request, "abc", accepted=2, drafted=4)
    assert request.is_draft == [True, True, False]
    assert request.counts.num_accepted == 2
    assert text_of(request) == "ab"


@pytest.mark.parametrize("min_tokens", range(8))
@pytest.mark.parametrize("size", [1, 2, 7])
def test_min_tokens_complete_no_stop_string(min_tokens, size):
    """`cd` is completed by tokens 3 and 6, in whatever steps they come."""
    request = new_request(stop="cd", min_tokens=min_tokens)
    for begin in range(0, 7, size):
        step(request, "abcdcda"[begin : begin + size])
    # The token that completes it is past the first min_tokens.
    num_used = 4 if min_tokens <= 3 else 6 if min_tokens <= 5 else 7
    assert request.output_token_ids == ids("abcdcda")[:num_used]
    assert text_of(request) == {4: "ab", 6: "abcd", 7: "abcdcda"}[num_used]
    assert request.is_finished == (num_used < 7)


def test_why_a_row_ended_has_a_name():
    assert FINISH_REASONS == {STOPPED: "stop", LENGTH: "length", ERROR: "error"}


def test_an_accepted_stop_token_counts_as_a_draft():
    request = new_request()
    step(request, "ab", accepted=2, drafted=3, finish=STOPPED)
    assert request.is_draft == [True, True]
    assert request.counts.num_accepted == 2
    assert request.counts.mean_acceptance_length == 3


def test_nothing_is_taken_after_the_end():
    request = new_request(stop="b")
    step(request, "ab", accepted=1, drafted=1)
    before = (list(request.output_token_ids), list(request.shown))
    counted = request.counts.num_steps
    step(request, "cd", accepted=1, drafted=1, finish=ERROR)
    assert (request.output_token_ids, request.shown) == before
    assert request.counts.num_steps == counted
    assert request.error is None


def test_a_stop_token_ends_the_text_and_has_none():
    request = new_request()
    step(request, "ab", accepted=2, drafted=3, finish=STOPPED, extra=[EOS])
    assert request.output_token_ids == [*ids("ab"), EOS]
    assert text_of(request) == "ab"
    assert request.finish_reason == "stop"
    assert request.counts.num_accepted == 2


def test_a_stop_token_that_is_an_ordinary_letter_has_no_text_either():
    request = new_request()
    step(request, "abz", accepted=3, drafted=3, finish=STOPPED)
    assert text_of(request) == "ab"
    assert request.output_token_ids == ids("abz")


def test_a_letter_at_the_end_of_its_length_has_text():
    request = new_request()
    step(request, "abz", finish=LENGTH)
    assert text_of(request) == "abz"


def test_a_stop_string_before_the_stop_token_wins():
    request = new_request(stop="b")
    step(request, "abc", accepted=3, drafted=3, finish=STOPPED, extra=[EOS])
    assert request.output_token_ids == ids("ab")
    assert text_of(request) == "a"
    assert request.finish_reason == "stop"


def test_a_stop_token_cannot_complete_a_stop_string():
    request = new_request(stop="az")
    step(request, "az", accepted=1, drafted=1, finish=STOPPED)
    assert text_of(request) == "a"
    assert request.output_token_ids == ids("az")


@pytest.mark.parametrize("has_text", [True, False])
def test_invalid_logits_end_the_request_with_an_error(has_text):
    request = new_request(has_text=has_text)
    step(request, "abc", accepted=2, drafted=4, finish=ERROR)
    assert request.finish_reason == "error"
    assert "output position 3" in request.error
    assert "NaN" in request.error
    assert request.output_token_ids == ids("abc")


def test_invalid_logits_at_once_count_no_step():
    request = new_request()
    step(request, "", accepted=0, drafted=4, finish=ERROR)
    assert request.is_finished
    assert "output position 0" in request.error
    assert request.counts == AcceptanceCounts()
    assert request.first_token_at is None


def test_without_a_tokenizer_there_is_no_text():
    request = new_request(has_text=False)
    step(request, "ab", accepted=1, drafted=2, finish=STOPPED)
    assert request.output_token_ids == ids("ab")
    assert request.shown == []
    assert request.finish_reason == "stop"


def test_the_first_token_is_timed_once():
    request = new_request()
    step(request, "a")
    first = request.first_token_at
    assert first is not None
    step(request, "b")
    assert request.first_token_at == first


def test_counts_by_position():
    counts = AcceptanceCounts()
    assert (counts.acceptance_rate, counts.mean_acceptance_length) == (0.0, 0.0)
    assert counts.acceptance_by_position == []
    for drafted, accepted in [(4, 4), (4, 1), (2, 2), (0, 0)]:
        counts.add(drafted, accepted)
    assert counts.drafted_at == [3, 3, 2, 2]
    assert counts.accepted_at == [3, 2, 1, 1]
    assert counts.acceptance_by_position == [1.0, 2 / 3, 0.5, 0.5]
    assert counts.acceptance_rate == 0.7
    # The target's own token is counted, in steps without drafts too.
    assert counts.mean_acceptance_length == 1 + 7 / 4


def test_counts_merge_whichever_is_longer():
    short, long = AcceptanceCounts(), AcceptanceCounts()
    short.add(1, 1)
    long.add(3, 2)
    for first, second in [(short, long), (long, short)]:
        total = AcceptanceCounts()
        total.merge(first)
        total.merge(second)
        assert total == AcceptanceCounts(2, 4, 3, [2, 1, 1], [2, 1, 0])
    assert short.drafted_at == [1], "merging changes only the receiver"


def test_small_records():
    assert TextPiece("a", True).is_draft
    assert TokenLogProbs(token_id=1, processed=-0.5, raw=-1.0).top_raw == ()


def test_self_check_counts_what_belongs_to_the_output():
    request = new_request(stop="cd")
    pairs = [(0.5, 1.0), (-0.2, 2.0), (0.1, 0.5), (9.0, 9.0)]
    request.take_step(ids("abcd"), 3, 4, RUNNING, (), None, pairs)
    check = request.self_check
    assert check.num_tokens == len(request.output_token_ids)
    expected = pairs[: check.num_tokens]
    assert check.surplus == pytest.approx(sum(surplus for surplus, _ in expected))
    assert check.variance == pytest.approx(sum(variance for _, variance in expected))


def test_self_check_of_all_takes_one_seed_for_one_draw():
    ones = [SelfCheck(num_tokens=10, surplus=2.0, variance=4.0) for _ in range(100)]
    assert ones[0].z_score == 1
    # A hundred times the same text says no more than once.
    assert SelfCheck.of_all(ones, ["same"] * 100).z_score == pytest.approx(1)
    assert SelfCheck.of_all(ones, range(100)).z_score == pytest.approx(10)


def test_self_check_of_what_is_certain_or_impossible():
    assert SelfCheck(num_tokens=3).z_score is None
    assert SelfCheck(num_tokens=3, surplus=-math.inf).z_score == -math.inf
