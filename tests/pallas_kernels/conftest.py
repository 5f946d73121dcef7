"""What tests of the TPU kernels share."""

import pytest


@pytest.fixture
def has_races():
    """Returns whether the kernels that ran since had races."""
    interpreter = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    interpreter.races = None
    return lambda: interpreter.races is not None and interpreter.races.races_found
