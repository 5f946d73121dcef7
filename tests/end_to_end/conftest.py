"""The models of most tests that run generate()."""

import pytest
from helpers import first_layer, tiny_llama


@pytest.fixture(scope="session")
def target():
    return tiny_llama(0)


@pytest.fixture(scope="session")
def draft(target):
    """A draft model that is right often, not always."""
    return first_layer(target)
