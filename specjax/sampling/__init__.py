"""Sampling: from logits to the sampled distribution, the tokens drawn, and their logprobs.

Plain decoding, drafting and verification share one path: every function takes flat
tokens (nodes), each with its own row and its own prefix.
"""

from specjax.sampling.argmax import first_argmax as first_argmax
from specjax.sampling.choosing import Choice as Choice
from specjax.sampling.choosing import choose_tokens as choose_tokens
from specjax.sampling.choosing import target_probs as target_probs
from specjax.sampling.processing import TreeHistory as TreeHistory
from specjax.sampling.processing import process_logits as process_logits
from specjax.sampling.row_sampling import EVERYTHING as EVERYTHING
from specjax.sampling.row_sampling import RowSampling as RowSampling
from specjax.sampling.row_sampling import Uses as Uses
from specjax.sampling.row_sampling import empty_row_values as empty_row_values
from specjax.sampling.row_sampling import reset_rows as reset_rows
from specjax.sampling.row_sampling import row_values as row_values
from specjax.sampling.row_sampling import uses_of as uses_of
from specjax.sampling.scoring import LogProbs as LogProbs
from specjax.sampling.scoring import choose_and_score as choose_and_score
from specjax.sampling.scoring import token_logprobs as token_logprobs
