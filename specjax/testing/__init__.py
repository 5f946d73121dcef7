"""Tests for code that others write against specjax."""

from specjax.testing.drafter_checks import check_drafter

__all__ = ["check_drafter"]
