"""From what a user passes to requests: what is no prompt is said."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_llama

import specjax
from specjax.api.assemble import Setup
from specjax.api.requests import as_list, token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, r"prompts are 5 \(int\); expected one prompt or a list"),
        (5.0, r"prompts are 5.0 \(float\)"),
        (None, "prompts are None"),
        (b"text", "prompts are b'text'"),
        (np.array(5), "prompts are array"),
        ({"role": "user", "content": "x"}, "prompts are {'role'"),
        ([], "no prompts were given"),
        ([5.0], r"prompt 0: a prompt is 5.0 \(float\)"),
        ([None], "prompt 0: a prompt is None; expected text"),
        ([True], "prompt 0: a prompt is True"),
        ([b"text"], "prompt 0: a prompt is b'text'"),
        ([[1, 2.5]], r"prompt 0: a prompt holds 2.5 \(float\)"),
        ([["text"]], "prompt 0: a prompt holds 'text'"),
        ([[]], "prompt 0: the prompt is empty"),
    ],
)
def test_what_is_no_prompt(prompts, message):
    with pytest.raises(ValueError, match=message):
        specjax.generate(tiny_llama(0), prompts)


def test_one_prompt_that_is_none_fails_alone():
    setup = Setup.of(tiny_llama(0))
    requests, refused = setup.requests([[1], 5.0, [2]], None)
    assert [request.prompt_index for request in requests] == [0, 2]
    assert [each.prompt_index for each in refused] == [1]


@pytest.mark.parametrize("prompt", [(1, 2), np.array([1, 2]), jnp.array([1, 2])])
def test_token_ids_of_any_kind(prompt):
    assert token_ids(tiny_llama(0), prompt) == [1, 2]
    assert len(as_list(prompt)) == 1


def test_an_engine_takes_no_number_for_a_prompt():
    with (
        specjax.Engine(tiny_llama(0), engine={"num_pages": 4}) as engine,
        pytest.raises(ValueError, match="a prompt is 5"),
    ):
        engine.add(5)
