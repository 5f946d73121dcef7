"""Tests for third-party code that extends specjax."""

from specjax.testing.drafter_checks import check_drafter

__all__ = ["check_drafter"]
