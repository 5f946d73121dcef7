"""The embedded pair's first layers, as a folder of weights: quicker to compile than all eight."""

import json
import shutil
from pathlib import Path

import specjax
from specjax import demo
from specjax.testing import save_model

NUM_LAYERS = {"target": 2, "draft": 1}


def save_first_layers(weights: Path) -> Path:
    """Writes a folder like that of the embedded weights, `loading._DEMO_WEIGHTS`."""
    for name, num_layers in NUM_LAYERS.items():
        whole, folder = demo.WEIGHTS_FOLDER / name, weights / name
        model = specjax.load_model(whole)
        config = model.config.first_layers(num_layers)
        params = model.params | {"layers": model.params["layers"][:num_layers]}
        raw = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": num_layers}
        shutil.copytree(whole, folder)
        save_model(folder, specjax.Model(config, params), raw)
    return weights
