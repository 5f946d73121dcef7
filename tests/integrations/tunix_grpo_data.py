"""The data and the reward of a configuration of tunix's command, which names them by paths."""

import grain
from tunix_scripts import QUESTIONS

NUM_BATCHES = 2


def create_dataset(tokenizer=None, apply_chat_template_to_dataset=False, **options):
    """Returns questions with their answers, as tunix loads them from a module."""
    rows = [{"prompts": text, "answer": "5"} for text in QUESTIONS * NUM_BATCHES]
    return grain.MapDataset.source(rows)


def share_of_digits(prompts, completions, answer, **others):
    return [sum(map(str.isdigit, text)) / 12 for text in completions]
