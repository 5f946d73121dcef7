"""Training runs the models as they are, with numpy's broadcasting."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _numpy_broadcasting():
    with jax.numpy_rank_promotion("allow"):
        yield
