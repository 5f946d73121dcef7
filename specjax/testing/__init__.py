"""Tests for third-party code that extends specjax."""

from specjax.testing.drafter_checks import check_drafter
from specjax.testing.family_checks import check_family, save_model
from specjax.testing.tiny_models import tiny_model

__all__ = ["check_drafter", "check_family", "save_model", "tiny_model"]
