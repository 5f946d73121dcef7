"""The version, for whoever writes it down."""

from __future__ import annotations

__version__ = "0.1.0"
