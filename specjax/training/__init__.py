"""Training drafters for a target: heads over its hidden states, and draft models."""

from __future__ import annotations

from specjax.training.adapter import AdapterState as AdapterState
from specjax.training.adapter import AdapterStats as AdapterStats
from specjax.training.adapter import DrafterAdapter as DrafterAdapter
from specjax.training.adapter import draft_loss as draft_loss
from specjax.training.data import TrainingText as TrainingText
from specjax.training.data import from_files as from_files
from specjax.training.data import from_token_ids as from_token_ids
from specjax.training.figures import Figures as Figures
from specjax.training.figures import figures_of as figures_of
from specjax.training.figures import table as table
from specjax.training.objective import Objective as Objective
from specjax.training.objective import Sums as Sums
from specjax.training.own_text import prompts_of as prompts_of
from specjax.training.own_text import text_of_target as text_of_target
from specjax.training.report import draw as draw
from specjax.training.run_store import Look as Look
from specjax.training.trainer import Trained as Trained
from specjax.training.trainer import TrainingConfig as TrainingConfig
from specjax.training.trainer import train as train

__all__ = [
    "AdapterState",
    "AdapterStats",
    "DrafterAdapter",
    "Figures",
    "Look",
    "Objective",
    "Sums",
    "Trained",
    "TrainingConfig",
    "TrainingText",
    "draft_loss",
    "draw",
    "figures_of",
    "from_files",
    "from_token_ids",
    "prompts_of",
    "table",
    "text_of_target",
    "train",
]
