"""The text of a request's output: what its tokens add to the text of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.config.sampling import SamplingParams
from specjax.text.detokenize import IncrementalText
from specjax.text.tokenization import Tokenizer


def text_after(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> IncrementalText:
    """Returns the text, empty as yet, of an output that follows a prompt."""
    return IncrementalText(
        tokenizer,
        params.stop_strings,
        prompt_token_ids=prompt_token_ids,
        include_stop_str=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )


def output_text(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    token_ids: Sequence[int],
    *,
    is_stopped: bool,
) -> str:
    """Returns the text of an output that has ended, by a stop string or token if `is_stopped`."""
    text, least = text_after(tokenizer, prompt_token_ids, params), params.min_tokens
    shown = text.feed(token_ids[:least], may_stop=False).text
    shown += text.feed(token_ids[least:]).text + text.finish()
    is_by_token = is_stopped and text.stopped_by is None
    if is_by_token and not params.include_stop_str_in_output:
        spoken = token_ids[:-1]
        return output_text(tokenizer, prompt_token_ids, params, spoken, is_stopped=False)
    return shown
