"""Settled before the first request: a device with less memory than was thought."""

import jax
import pytest

from specjax.config import EngineConfig
from specjax.decode.decoder import Decoder
from specjax.setup import FEWER_PAGES, Setup

NUM_PAGES = 100


@pytest.fixture
def setup():
    return Setup.of("demo", engine=EngineConfig(num_pages=NUM_PAGES, max_context=64))


def loop_of(setup, monkeypatch, *, most_pages, message="RESOURCE_EXHAUSTED: 9 GB."):
    """Returns a loop on a device that has room for most_pages."""
    init = Decoder.init

    def init_if_there_is_room(decoder, **options):
        if decoder.sizes.num_pages > most_pages:
            raise jax.errors.JaxRuntimeError(message)
        return init(decoder, **options)

    monkeypatch.setattr(Decoder, "init", init_if_there_is_room)
    return setup.loop(
        setup.standing_sizes(), [], None, on_progress=lambda *report: None
    )


def test_pages_that_do_not_fit_become_fewer(setup, monkeypatch):
    with pytest.warns(UserWarning, match="pages do not fit") as warned:
        loop = loop_of(setup, monkeypatch, most_pages=60)
    first = int(FEWER_PAGES * NUM_PAGES)
    assert [str(warning.message).split()[0] for warning in warned] == ["100", "75"]
    assert loop.scheduler.pools[0].num_pages == int(FEWER_PAGES * first) == 56
    loop.scheduler.check()


def test_too_few_for_one_request_are_not_tried(setup, monkeypatch):
    needed = setup.standing_sizes().pages_per_row
    with (
        pytest.warns(UserWarning, match="pages do not fit"),
        pytest.raises(jax.errors.JaxRuntimeError, match="9 GB"),
    ):
        loop_of(setup, monkeypatch, most_pages=needed - 1)


def test_another_error_is_not_taken_for_memory(setup, monkeypatch):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        loop_of(setup, monkeypatch, most_pages=0, message="INTERNAL: other")
