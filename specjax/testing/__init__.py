"""Tests for third-party code that extends specjax."""

from specjax.testing.drafter_checks import check_drafter
from specjax.testing.tiny_models import tiny_model

__all__ = ["check_drafter", "tiny_model"]
