"""Longest earlier occurrences of the last tokens of many rows."""

from pallas_kernels.ngram_match.api import NgramMatches as NgramMatches
from pallas_kernels.ngram_match.api import ngram_match as ngram_match
