#!/usr/bin/env bash
# mlx-lm 0.32.2, mlx 0.32.4 on a Linux CPU. Probabilities 0.7, 0.2, 0.1.
#
# Guess: temperature=2 flattens them to 0.52, 0.28, 0.20 before top_p=0.6 counts, so that two tokens
# are drawn: vLLM and transformers do so.
# Seen: top_p counts first, at temperature 1. Only token 0 is ever drawn, at any temperature.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install -q "mlx[cpu]==0.32.4" mlx-lm==0.32.2
"$work/venv/bin/python" - <<'PYTHON'
import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

mx.random.seed(0)
logprobs = mx.log(mx.array([[0.7, 0.2, 0.1]]))
drawn = lambda **settings: sorted({int(make_sampler(**settings)(logprobs)[0]) for _ in range(300)})
found = [drawn(temp=temperature, top_p=0.6) for temperature in (1.0, 2.0, 50.0)]
print(found, "and without top_p", drawn(temp=2.0))
assert found == [[0]] * 3 and drawn(temp=2.0) == [0, 1, 2]
PYTHON
