"""What requests gained waits for whoever asks for it, and for nobody longer than that."""

from specjax.api.outbox import Outbox
from specjax.config.sampling import SamplingParams
from specjax.engine.request import Request


def open_request(box, request_id, n=1, *, is_streamed=False):
    """Returns the samples of a new request."""
    samples = [
        Request(
            prompt_index=request_id,
            sample_index=index,
            prompt_token_ids=[1],
            params=SamplingParams(n=n),
            seed=0,
            draft_cap=0,
            rule=1,
            max_length=9,
            sampling_values={},
        )
        for index in range(n)
    ]
    box.open(request_id, samples, is_streamed=is_streamed)
    return samples


def test_samples_that_end_in_one_step_are_handed_out_one_by_one():
    box = Outbox()
    samples = open_request(box, 0, n=3)
    for request in samples:
        request.end("length")
    assert box.hand_out(samples[:1]) == []
    assert box.has_work
    assert box.hand_out(samples[1:]) == [samples]
    chunks = box.take_unclaimed()
    assert [chunk.sample_index for chunk in chunks] == [0, 1, 2]
    assert [chunk.finish_reason for chunk in chunks] == ["length"] * 3
    box.check_is_empty()


def test_a_last_chunk_comes_once():
    box = Outbox()
    one, other = open_request(box, 0, n=2)
    one.output_token_ids += [5, 6]
    one.end("length")
    assert box.hand_out([one, one, other]) == []
    box.hand_out([one])
    tokens = [chunk.token_ids for chunk in box.take_unclaimed()]
    assert tokens == [[5, 6], []]
    other.end("abort")
    assert box.hand_out([other, other]) == [[one, other]]
    assert len(box.take_unclaimed()) == 1
    box.check_is_empty()


def test_the_mail_of_a_stream():
    box = Outbox()
    (request,) = open_request(box, 0, is_streamed=True)
    assert not box.has_news(0)
    request.output_token_ids.append(4)
    box.hand_out([request])
    assert box.has_news(0)
    assert box.take_unclaimed() == []
    chunks, is_over = box.take_mail(0)
    assert [chunk.token_ids for chunk in chunks] == [[4]]
    assert not is_over
    assert not box.has_news(0)
    request.end("stop")
    box.hand_out([request])
    chunks, is_over = box.take_mail(0)
    assert [chunk.finish_reason for chunk in chunks] == ["stop"]
    assert is_over
    assert box.has_news(0), "nobody may wait for what is over"
    box.leave(0)
    box.check_is_empty()


def test_nobody_gets_the_mail_of_a_stream_that_was_left():
    box = Outbox()
    samples = open_request(box, 0, n=2, is_streamed=True)
    box.hand_out(samples)
    box.leave(0)
    assert box.has_work, "it is not over"
    assert box.has_news(0) is False
    for request in samples:
        request.end("abort")
        box.hand_out([request])
    assert box.take_unclaimed() == []
    box.check_is_empty()
