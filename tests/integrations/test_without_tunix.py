"""What is said where the `tunix` extra is not installed."""

import importlib
import sys

import pytest


def test_what_to_install(monkeypatch):
    for name in ("specjax.integrations.tunix", "specjax.integrations.tunix_weights"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tunix", None)
    with pytest.raises(ImportError, match=r"pip install google-tunix"):
        importlib.import_module("specjax.integrations.tunix")
