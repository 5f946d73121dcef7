"""`specjax plan`: a small model's plan end to end, and what is refused."""

import json
import re
import sys
from pathlib import Path

import jax
import pytest

from specjax.cli import plan_command
from specjax.cli.main import build_parser, main
from specjax.config.engine import EngineConfig
from specjax.planning import plans

LAYERS, HEADS, HEAD_DIM, PAGE = 2, 4, 8, 16
SHAPE = dict(
    model_type="llama",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(SHAPE))
    return path


@pytest.mark.full
def test_a_plan_from_compiled_steps(folder, capsys):
    arguments = [
        "--drafter",
        "ngram",
        "--num-speculative-tokens",
        "1",
        "--max-rows",
        "1",
    ]
    memory = ["--memory-bytes", "2e6", "--json"]
    assert main(["plan", str(folder), *arguments, *memory]) == 0
    document = json.loads(capsys.readouterr().out)
    own = 2 * LAYERS * HEADS * HEAD_DIM * 4
    assert document["bytes_per_token"] == {"target": own, "drafter": 0}
    weights = 2 * 96 * 32 + LAYERS * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert document["weights_bytes"] == 4 * weights
    assert document["num_pages"] == 64 // PAGE  # one row can hold no more
    assert document["weight_limit"] < 2e6 * 0.8
    assert document["coefficients"]["next_token"] > own
    assert document["measured"] is False
    assert {b["kind"] for b in document["buckets"]} == {"burst", "prefill", "mixed"}
    assert all(b["workspace_bytes"] > 0 for b in document["buckets"])
    assert document["compiled"]["layers_compiled"] == [LAYERS]


@pytest.fixture
def any_platform():
    """As in a program that has named no platforms."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", before)


@pytest.fixture
def devices_of_plans(monkeypatch):
    """The default devices under which plans are made; none is compiled."""
    seen = []

    def make_plan(request, on_progress):
        seen.append(jax.config.jax_default_device)
        raise ValueError("not planned")

    monkeypatch.setattr(plans, "make_plan", make_plan)
    return seen


def test_a_program_that_plans_keeps_its_devices(any_platform, devices_of_plans):
    jax.config.update("jax_default_device", accelerator := jax.devices()[-1])
    try:
        assert main(["plan", "demo"]) == 2
        assert jax.config.jax_default_device == accelerator
    finally:
        jax.config.update("jax_default_device", None)
    assert jax.config.jax_platforms is None
    assert devices_of_plans == [jax.local_devices(backend="cpu")[0]]


def test_the_command_leaves_accelerators_alone(any_platform, devices_of_plans, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["specjax", "plan", "demo"])
    assert main() == 2
    assert jax.config.jax_platforms == "cpu"


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "float32"), ("gpu:t4", "float32"), ("gpu:l4", "bfloat16"), ("gpu:h100", "bfloat16")],
)
def test_weights_are_bfloat16_where_the_device_has_it(device, dtype, monkeypatch):
    planned = []

    def make_plan(request, on_progress):
        planned.append(request.dtype)
        raise ValueError("not planned")

    monkeypatch.setattr(plans, "make_plan", make_plan)
    assert main(["plan", "demo", "--device", device]) == 2
    assert planned == [dtype]


def test_a_head_stores_one_or_the_other(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "demo", "--store-captured", "--no-store-features"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "stored"),
    [
        ([], None),
        (["--store-features"], True),
        (["--store-captured"], "captured"),
        (["--no-store-features"], False),
    ],
)
def test_a_plan_of_a_head_that_stores_features(arguments, stored, monkeypatch):
    planned = []

    def make_plan(request, on_progress):
        planned.append(getattr(request.drafter, "store_features", None))
        raise ValueError("not planned")

    monkeypatch.setattr(plans, "make_plan", make_plan)
    assert main(["plan", *arguments, "demo", "--drafter", "demo-dspark"]) == 2
    assert planned == [stored]
    # False asks for nothing of a drafter that stores nothing.
    if not stored:
        assert main(["plan", *arguments, "demo", "--drafter", "ngram"]) == 2
        assert len(planned) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no-such-model"], "is no folder with a config.json"),
        (["demo", "--device", "toaster"], "is unknown; expected cpu"),
        (["demo", "--drafter", "ngram", "--aux-layer-ids", "1,2"], "the drafter is 'ngram'"),
        (["demo", "--drafter", "ngram", "--store-features"], "the drafter is 'ngram'"),
        (["demo", "--store-captured"], "--store-captured is for a head over the target"),
        (["demo", "--row-buckets", "4,x"], "whole numbers with commas"),
        (["demo", "--row-buckets", "128"], "row_buckets"),
        (["demo", "--batch-safety-margin", "100"], "batch_safety_margin"),
        (["demo", "--memory-bytes", "inf"], "--memory-bytes inf must be a finite"),
        (["demo", "--memory-bytes", "nan"], "--memory-bytes nan must be a finite"),
        (["demo", "--memory-bytes=-16e9"], "--memory-bytes -1.6e+10 must be"),
        (["demo", "--logit-bytes", "inf"], "--logit-bytes inf must be a finite"),
        (["demo", "--page-size", "0"], "page_size=0 must be"),
        (["demo", "--num-pages", "0"], "num_pages=0 must be"),
        (["demo", "--tensor-parallel", "-1"], "cannot be split over -1 chips"),
        (["demo", "--tensor-parallel", "0"], "cannot be split over 0 chips"),
        (["demo", "--num-speculative-tokens", "-1"], "num_speculative_tokens=-1 must"),
        (["demo", "--device", "tpu:v5e:2y2"], "has the topology '2y2'"),
        (["demo", "--device", "gpu:v5e"], "device='gpu:v5e' is unknown"),
        (["demo", "--device", "tpu:h100:2x2"], "device='tpu:h100:2x2' is unknown"),
    ],
)
def test_what_is_refused_in_one_line_before_compiling(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(plans, "make_plan", None)
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--plot", "k.png"], "cpu has no figures to draw seconds from"),
        (["--device", "gpu:h100", "--plot", "no-such/k.png"], "there is no folder"),
        (["--device", "gpu:h100", "--plot", "k.png"], "pip install matplotlib"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_first(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(plans, "make_plan", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "demo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_row_buckets_by_default():
    parse = lambda *more: build_parser().parse_args(["plan", "demo", *more])
    engine = plan_command.engine_config(parse())
    assert engine.max_rows == 64
    assert engine.row_buckets == (1, 4, 16)
    engine = plan_command.engine_config(parse("--row-buckets", ""))
    assert engine.row_buckets == ()
    engine = plan_command.engine_config(parse("--memory-bytes", "16e9"))
    assert engine.memory_bytes == 16 * 10**9


def test_every_size_of_the_engine_can_be_given():
    parse = lambda *more: build_parser().parse_args(["plan", "demo", *more])
    engine = plan_command.engine_config(parse())
    for name in ("page_size", "num_pages", "logit_bytes", "gate", "kv_cache_dtype"):
        assert getattr(engine, name) == getattr(EngineConfig(), name)
    sizes = ["--page-size", "32", "--num-pages", "500", "--logit-bytes", "1e8"]
    sizes += ["--kv-cache-dtype", "fp8"]
    engine = plan_command.engine_config(parse(*sizes, "--gate", "worst_case"))
    assert engine.kv_cache_dtype == "fp8"
    assert (engine.page_size, engine.num_pages) == (32, 500)
    assert (engine.logit_bytes, engine.gate) == (10**8, "worst_case")


def test_the_page_has_every_option():
    page = Path(__file__).parents[3] / "docs" / "planning.md"
    table = page.read_text(encoding="utf-8").partition("## Options")[2].partition("\n## ")[0]
    listed = [
        option
        for line in table.splitlines()
        if line.startswith("| `")
        for option in re.findall(r"`(--[\w-]+)", line.split("|")[1])
    ]
    parser = build_parser().parse_args(["plan", "demo"]).command_parser
    options = {name for name in parser._option_string_actions if name.startswith("--")}
    assert set(listed) == options - {"--help"}
    assert len(listed) == len(set(listed))
