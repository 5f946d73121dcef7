"""Writes weights.bin beside this file with torch.save; run once, with torch 2.

Its content is that of `tests/specjax/models/test_torch_files.py`.
"""

from pathlib import Path

import torch


def main() -> None:
    numbers = torch.arange(12, dtype=torch.float32)
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6).reshape(2, 3) / 4)
        layer.bias.copy_(torch.tensor([-1.0, 2.0]))
    weights = layer.state_dict()  # an OrderedDict with attributes
    weights["half"] = torch.arange(4).to(torch.bfloat16) / 8
    weights["turned"] = numbers.reshape(3, 4).T
    weights["part"] = numbers[5:7]
    weights["parameter"] = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    weights["ids"] = torch.tensor([3, 1], dtype=torch.int64)
    weights["flags"] = torch.tensor([True, False])
    weights["number"] = torch.tensor(7.0, dtype=torch.float64)
    torch.save(weights, Path(__file__).with_name("weights.bin"))


if __name__ == "__main__":
    main()
