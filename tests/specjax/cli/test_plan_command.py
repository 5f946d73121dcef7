"""`specjax plan`: a small model's plan end to end, and what is refused."""

import json
import re
import sys
from pathlib import Path

import jax
import pytest

from specjax.cli import plan_command, plan_report
from specjax.cli.main import build_parser, main
from specjax.config.engine import EngineConfig
from specjax.planning import devices, plans, processor_speed
from specjax.planning.step_prior import ProcessorSpeed

DOCS = Path(__file__).parents[3] / "docs"
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


@pytest.fixture(autouse=True)
def speed_of_cpu(monkeypatch):
    """Of a machine that was measured before."""
    speed = ProcessorSpeed(bytes_per_s=2e10, factors=((1, 1.0), (64, 32.0)), launch_s=1e-5)
    monkeypatch.setattr(processor_speed, "processor_speed", lambda: speed)


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
    assert document["weights_bytes"] == document["estimate"]["weights_bytes"] == 4 * weights
    assert document["estimate"]["bytes_per_token"] == document["bytes_per_token"]
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


def test_an_estimate_alone(capsys, monkeypatch):
    monkeypatch.setattr(plans, "make_plan", None)  # nothing is compiled
    pair = ["llama-3.1-8b", "--drafter", "meta-llama/Llama-3.2-1B-Instruct", "--estimate"]
    assert main(["plan", *pair, "--device", "h100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["source"] == "formulas"
    assert document["weights_bytes"] == 2 * (8_030_261_248 + 1_235_814_400)
    assert document["bytes_per_token"] == {"target": 131_072, "drafter": 32_768}
    step = document["steps"][0]
    assert (step["rows"], step["num_speculative_tokens"], step["expected_tokens"]) == (1, 0, 1.0)
    by_hand = (2 * (8_030_261_248 - 128_256 * 4096) + 2048 * 131_072) / 3350e9
    assert step["step_s"] == pytest.approx(by_hand, rel=1e-3)
    assert (
        document["num_pages"] * document["page_size"] * 163_840 < 80e9 - document["weights_bytes"]
    )
    # In text, and with the meaning of every word.
    assert main(["plan", *pair, "--device", "h100", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "on gpu:h100, 1 chip, bfloat16: estimate, from formulas; nothing was compiled" in text
    assert plan_report.explained() in text


def test_what_does_not_fit_by_formulas_is_said_first_and_compiles_nothing(capsys, monkeypatch):
    monkeypatch.setattr(plans, "make_plan", None)
    asked = ["plan", "llama-3.1-8b", "--device", "v5e"]
    for more in ([], ["--estimate"]):
        assert main([*asked, *more]) == 2
        text, error = capsys.readouterr()
        assert error.startswith("specjax: error: it does not fit: weights, state and a step take")
        assert "2 chips would hold it, with --tensor-parallel 2; or take a device of more" in error
        assert error.count("\n") == 1
        assert "on tpu:v5e, 1 chip, bfloat16" in text
        assert "tokens/s" not in text
    assert main([*asked, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is False
    assert document["misfit"] in error


def test_an_estimate_says_that_it_fits(capsys):
    assert main(["plan", "llama-3.1-8b", "--device", "v5e:2x2", "--estimate", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["fits"], document["num_chips"]) == (True, 4)


def test_an_estimate_names_only_chips_that_divide_the_model(capsys):
    cases = {
        ("llama-3.1-70b", "1", "28e9"): "8 chips would hold it, with --tensor-parallel 8; or",
        ("qwen2.5-1.5b", "2", "1e9"): "no split of this model over more chips would",
        ("qwen2.5-7b", "1", "7e9"): "4 chips would hold it, with --tensor-parallel 4; or",
    }
    printed = {}
    for model, chips, memory in cases:
        asked = ["--device", "v5e", "--tensor-parallel", chips, "--memory-bytes", memory]
        assert main(["plan", model, *asked, "--estimate"]) == 2
        printed[model, chips, memory] = "".join(capsys.readouterr())
    assert not {case: printed[case] for case, hint in cases.items() if hint not in printed[case]}
    assert "maybe several times more" in printed["qwen2.5-7b", "1", "7e9"]


def test_the_estimate_comes_first_and_stands_where_nothing_compiles(capsys, monkeypatch):
    def find_device(name, num_chips):
        assert "estimate, from formulas" in capsys.readouterr().out  # already printed
        raise NotImplementedError("no compiler for it is here")

    monkeypatch.setattr(devices, "find_device", find_device)
    with pytest.warns(UserWarning, match="the estimate stands: no compiler for it is here"):
        assert plan_command.run(parse(["llama-3.1-8b", "--device", "v5e:2x2"])) == 0


def test_a_plan_without_a_drafter_has_no_word_of_drafts(capsys):
    assert main(["plan", "llama-3.1-8b", "--device", "h100", "--estimate"]) == 0
    text = capsys.readouterr().out
    assert "llama-3.1-8b without a drafter on gpu:h100" in text
    assert re.findall(r"drafts|speculates|\bK\b", text) == []
    assert text.count("tokens/s") == 1


def test_a_terminal_shows_which_step_compiles(capsys, monkeypatch):
    def make_plan(request, on_progress):
        on_progress("compiling a prefill", 1, 3)
        raise ValueError("not planned")

    monkeypatch.setattr(plans, "make_plan", make_plan)
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_it=is_terminal: is_it, raising=False)
        assert main(["plan", "demo"]) == 2
        assert ("compiling a prefill: 1 of 3 ..." in capsys.readouterr().err) == is_terminal


def parse(arguments):
    parsed = build_parser().parse_args(["plan", *arguments])
    parsed.owns_process = False
    return parsed


def test_k_of_a_cpu_follows_from_its_measured_speed(capsys):
    assert main(["plan", "demo", "--drafter", "demo", "--estimate", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["processor_speed"]["bytes_per_s"] == 2e10
    of_one_row = document["num_speculative_tokens_by_batch_and_context"]["1"]
    assert set(of_one_row.values()) <= {0, 1, 2, 3, 4}
    seconds = [step["step_s"] for step in document["steps"] if step["rows"] == 1]
    assert seconds == sorted(seconds)
    assert document["ridge_flops_per_byte"] is None
    assert main(["plan", "demo", "--drafter", "demo", "--estimate"]) == 0
    text = capsys.readouterr().out
    assert "K by rows and context, by seconds of this processor's measured speed, if 70%" in text
    assert "by seconds of this processor's measured speed, at most:" in text
    assert "roofline" not in text
    assert main(["plan", "demo", "--device", "v5e", "--estimate"]) == 0
    assert "by roofline seconds, at most:" in capsys.readouterr().out


def test_every_word_is_explained_in_one_line_and_on_the_page(capsys):
    page = " ".join((DOCS / "planning.md").read_text(encoding="utf-8").split())
    for word, meaning in plan_report.WORDS.items():
        assert f"| {word} | {meaning} |" in page, word
    pair = ["llama-3.1-8b", "--drafter", "llama-3.2-1b"]
    assert main(["plan", *pair, "--device", "v5e:2x2", "--estimate"]) == 0
    figures, steps = capsys.readouterr().out.split("\n\n")[1:4:2]
    labels = [re.split(r"  +", line)[0] for line in figures.splitlines()]
    labels += steps.splitlines()[0].split()
    assert set(labels) <= set(plan_report.WORDS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no-such-model"], "is no folder with a config.json"),
        (["demo", "--device", "toaster"], "is unknown; expected cpu"),
        (["demo", "--device", "h10"], "did you mean 'h100'"),
        (["demo", "--drafter", "ngram", "--aux-layer-ids", "1,2"], "the drafter is 'ngram'"),
        (["demo", "--drafter", "ngram", "--store-features"], "the drafter is 'ngram'"),
        (["demo", "--store-captured"], "--store-captured is for a head over the target"),
        (["demo", "--row-buckets", "128"], "row_buckets"),
        (["demo", "--batch-safety-margin", "100"], "batch_safety_margin"),
        (["demo", "--page-size", "0"], "page_size=0 must be"),
        (["demo", "--num-pages", "0"], "num_pages=0 must be"),
        (["demo", "--tensor-parallel", "-1"], "cannot be split over -1 chips"),
        (["demo", "--tensor-parallel", "0"], "cannot be split over 0 chips"),
        (["demo", "--num-speculative-tokens", "-1"], "num_speculative_tokens=-1 must"),
        (["llama-3.1-70b", "--device", "v5e:4x4"], "num_kv_heads=8 is not divisible by the mesh's"),
        (["qwen2.5-1.5b", "--device", "v5e", "--tensor-parallel", "8"], "num_heads=12 is not"),
        (["llama-3.1-8b", "--device", "v5e", "--tensor-parallel", "3"], "num_heads=32 is not"),
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
        (["--plot", "k.png"], "pip install matplotlib"),
        (["--device", "gpu:h100", "--plot", "no-such/k.png"], "there is no folder"),
        (["--device", "gpu:h100", "--plot", "k.png"], "pip install matplotlib"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_first(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(plans, "make_plan", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plan", "demo", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--row-buckets", "4,x"], "whole numbers with commas"),
        (["--memory-bytes", "inf"], "--memory-bytes: 'inf' must be a finite"),
        (["--memory-bytes", "nan"], "--memory-bytes: 'nan' must be a finite"),
        (["--memory-bytes=-16e9"], "--memory-bytes: '-16e9' must be"),
        (["--logit-bytes", "inf"], "--logit-bytes: 'inf' must be a finite"),
    ],
)
def test_a_value_that_is_none_is_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "demo", *arguments])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


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
    page = DOCS / "planning.md"
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


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("qwen3-8b --device t4", "; or take a device of more memory or a smaller model."),
        ("qwen3-0.6b --memory-bytes 2e9", "; or use --dtype bfloat16."),
        ("qwen3-0.6b --memory-bytes 3.5e9 --max-rows 512", "lower --max-rows and --max-context or"),
    ],
)
def test_what_is_said_to_change_fits_once_it_is_changed(capsys, command, hint):
    asked = ["plan", *command.split(), "--dtype", "float32", "--estimate"]
    assert main(asked) == 2
    error = capsys.readouterr().err
    assert hint in error
    halved = main([*asked[:-2], "bfloat16", "--estimate"])
    assert (halved == 0) == ("use --dtype bfloat16" in error)
