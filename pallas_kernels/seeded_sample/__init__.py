"""Token ids drawn from logits with noise that belongs to keys, and their log-probabilities."""

from pallas_kernels.seeded_sample.api import seeded_sample as seeded_sample
from pallas_kernels.seeded_sample.reference import Sample as Sample
