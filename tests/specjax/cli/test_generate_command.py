"""specjax generate from arguments to output, on a tiny random model."""

import io
import json
import re
import shlex
import sys
import warnings

import pytest

from specjax.cli import comparison
from specjax.cli import main as cli
from specjax.cli.main import main
from specjax.text import template_process

QUICK = shlex.split("--max-tokens 6 --temperature 0 --ignore-eos --burst-steps 4")


@pytest.fixture
def run(model_folder, capsys, monkeypatch, tmp_path):
    """Runs `specjax generate --model TINY ...`; returns exit code, stdout and stderr."""
    monkeypatch.setenv("SPECJAX_CACHE_DIR", "off")

    def run_command(*argv, model=model_folder):
        code = main(["generate", "--model", str(model), *QUICK, *argv])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_command


@pytest.mark.full
def test_text_of_one_prompt_streams(run):
    code, out, err = run("w5 w6")
    assert code == 0
    assert len(out.split()) == 6
    assert all(word.startswith("w") for word in out.split())
    assert "6 tokens in" in err
    assert "no speculation" in err


@pytest.mark.full
def test_speculation_does_not_change_the_text(run, model_folder):
    _, plain, _ = run("w5 w6 w5 w6 w5")
    _, drafted, err = run("w5 w6 w5 w6 w5", "--drafter", str(model_folder))
    assert plain == drafted
    assert "tokens per target step, 100 % of drafts accepted" in err


@pytest.mark.full
def test_compare_decodes_again_with_and_without_drafts(run, model_folder):
    drafter = ("--drafter", str(model_folder))
    code, _, err = run("w5 w6", *drafter, "--compare", "--temperature", "1")
    assert code == 0
    found = re.search(r"again, in turn: .* the same 6 tokens · \d+\.\d\d times as fast", err)
    assert found is not None
    _, _, err = run("w5 w6", *drafter)  # by itself only with the embedded model
    assert "in turn" not in err
    code, _, err = run("w5 w6", "--compare")  # there is nothing to compare
    assert code != 0
    assert "--compare needs drafts" in err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--json"], "leave out --json"),
        (["--n", "2"], "leave out --n 2"),
        (["--verification", "rejection"], "--verification rejection does not give"),
    ],
)
def test_compare_refuses_what_it_cannot(run, argv, message):
    code, out, err = run("w5", "--drafter", "ngram", "--compare", *argv)
    assert code != 0
    assert message in out + err


def test_compare_says_where_texts_part():
    said = comparison.line(1.0, 0.5, num_equal=7, num_tokens=10)
    assert said == (
        "again, in turn: 0.50 s with drafts, 1.00 s without, the same tokens up to 7 of 10 · 2.00 "
        "times as fast with drafts"
    )


@pytest.mark.slow
def test_a_tree_does_not_change_the_text(run, model_folder):
    tree = {
        "method": "draft_model",
        "model": str(model_folder),
        "speculative_token_tree": [2, 1],
    }
    prompt = "w5 w6 w5 w6 w5"
    _, plain, _ = run(prompt, "--json")
    code, drafted, _ = run(prompt, "--json", "--speculative-config", json.dumps(tree))
    assert code == 0
    plain, drafted = json.loads(plain), json.loads(drafted)
    text = lambda document: [(o["text"], o["token_ids"]) for o in document["outputs"]]
    assert text(drafted) == text(plain)
    stats = drafted["stats"]
    assert stats["num_speculative_tokens"] == 2
    # The first child of every step is right, its sibling is not: a draft of the same weights.
    assert 0 < stats["num_accepted"] < stats["num_drafted"]
    assert plain["stats"]["num_drafted"] == 0


def test_colors_on_request(run, model_folder):
    _, out, err = run("w5", "--drafter", str(model_folder), "--color", "always")
    assert out.startswith("\x1b[2mw5\x1b[0m")
    assert "\x1b[32m" in out
    assert "drafted and accepted" in err


def test_json_document(run):
    code, out, err = run("w5 w6", "w7", "--json", "--logprobs", "2", "--n", "2")
    assert code == 0
    assert err == ""
    document = json.loads(out)
    places = [(o["prompt_index"], o["sample_index"]) for o in document["outputs"]]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first = document["outputs"][0]
    assert len(first["token_ids"]) == 6
    assert first["finish_reason"] == "length"
    assert first["error"] is None
    assert len(first["logprobs"]) == 6
    assert len(first["logprobs"][0]["top_raw"]) == 2
    assert document["stats"]["num_output_tokens"] == 24


@pytest.mark.full
@pytest.mark.parametrize(
    "prompts", [["w5 w6"], pytest.param(["w5 w6", "w7"], marks=pytest.mark.full)]
)
def test_logprobs_follow_the_text(run, prompts):
    _, plain, _ = run(*prompts)
    code, out, _ = run(*prompts, "--logprobs", "2")
    assert code == 0
    lines = [line for line in out.splitlines() if re.match(r" +-\d", line)]
    assert len(lines) == 6 * len(prompts)
    words = [word for word in plain.split() if re.fullmatch(r"w\d+", word)][-6:]
    for word, line in zip(words, lines[-6:], strict=True):
        # Greedy: the token is the most likely one.
        assert re.search(rf": (\d+ ' {word}'); \1 -[\d.]+, \d+ ' w\d+' -[\d.]+$", line)
    assert set(plain.splitlines()) <= set(out.splitlines())


@pytest.mark.full
def test_entropy_stands_beside_logprobs(run):
    _, out, _ = run("w5 w6", "--logprobs", "0", "--entropy", "--temperature", "1")
    assert "processed, raw, entropy: token" in out
    lines = [line.split(":")[0].split() for line in out.splitlines() if "-" in line[:9]]
    lines = [list(map(float, line)) for line in lines if len(line) == 3]
    assert len(lines) == 6
    assert all(entropy > 0 for _, _, entropy in lines)
    code, _, err = run("w5 w6", "--entropy")
    assert code == 2
    assert "set logprobs=0 or more" in err


@pytest.mark.full
def test_logprobs_without_a_tokenizer(run, untokenized_folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2], "logprobs": 0}')
    _, out, _ = run("--prompts", str(path), model=untokenized_folder)
    ids, _, *lines = out.splitlines()
    assert [line.split(": ")[1] for line in lines] == ids.split()


@pytest.mark.full
def test_several_prompts_have_headers(run):
    code, out, _ = run("w5 w6", "w7")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "=== prompt 0: w5 w6 ==="
    assert lines[2] == "=== prompt 1: w7 ==="
    assert len(lines) == 4


@pytest.mark.full
def test_prompts_file_overrides_options(run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w5", "max_tokens": 2}\n"w5"\n')
    _, out, _ = run("--prompts", str(path), "--json")
    short, long = json.loads(out)["outputs"]
    assert len(short["token_ids"]) == 2
    assert long["token_ids"][:2] == short["token_ids"]
    assert len(long["token_ids"]) == 6


def test_chat(run):
    _, chat, _ = run("w5 w6", "--chat")
    _, plain, _ = run("w5 w6 w9")  # what the template writes
    assert chat == plain
    template = {"chat_template": "{{ messages[0].content }} {{ last }}", "last": "w9"}
    assert run("w5 w6", "--chat", "--chat-arguments", json.dumps(template))[1] == plain


def test_a_chat_whose_process_does_not_start_is_refused_in_one_line(run, monkeypatch):
    monkeypatch.setattr(template_process._pool, "_idle", [])
    monkeypatch.setattr(template_process, "_START", "raise SystemExit(3)")
    code, _, err = run("w5 w6", "--chat")
    assert (code, err.count("\n")) == (2, 1)
    assert "the process that renders chat templates did not start (exit code 3)" in err


def test_model_without_tokenizer_takes_and_gives_ids(run, untokenized_folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2]}')
    code, out, _ = run("--prompts", str(path), model=untokenized_folder)
    assert code == 0
    assert len([int(word) for word in out.split()]) == 6


def test_one_failed_request_among_several(run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"w5"\n{"prompt": "w6", "top_p": 7}\n')
    code, out, err = run("--prompts", str(path), "--json")
    assert code == 1
    good, bad = json.loads(out)["outputs"]
    assert good["stop_reason"] is None
    assert good["error"] is None
    assert bad["finish_reason"] == "error"
    assert f"specjax: error: {path} line 2: prompt 1: top_p=7" in err


@pytest.mark.full
def test_texts_that_the_context_cut_are_said(run):
    code, out, err = run("w5 w6", "--max-context", "5", "--max-tokens", "40")
    assert code == 0
    assert len(out.split()) == 3
    assert "prompt 0 ended after 3 of max_tokens=40 tokens, where its context" in err
    assert "warning" not in run("w5 w6", "--max-context", "8")[2]
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a program of its own
        _, _, err = run("w5 w6", "--max-context", "1000")
    assert "warning: max_context=1000 is more than the 128 tokens that" in err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["w5", "--top-p", "7"], "error: top_p=7"),
        ([""], "the prompt is empty"),
        (["w5", "--logit-bias", "500=1"], "500"),
        (["w5", "--verification", "greedy", "--temperature", "1"], "greedy"),
        (["w5", "--drafter", "no/such/folder/at/all"], "no/such/folder/at/all"),
    ],
)
def test_bad_input_before_any_compile(run, argv, message):
    code, out, err = run(*argv)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_broken_pipe_is_quiet(monkeypatch, tmp_path):
    def broken(argv, owns_process):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_run", broken)
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main([]) == 141


def test_interrupt_is_quiet(run, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("specjax.api.generation.stream", interrupted)
    assert run("w5") == (130, "", "")


def test_terminal_without_utf8(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(cli, "_run", lambda argv, owns_process: print("\N{MIDDLE DOT}") or 0)
    assert main([]) == 0
    assert raw.getvalue() == b"\\xb7\n"


@pytest.mark.full
def test_a_mesh_does_not_change_the_text(run):
    _, plain, _ = run("w5 w6", "--json")
    code, split, _ = run("w5 w6", "--json", "--mesh", "data=2,tensor=2")
    assert code == 0
    outputs = lambda text: [o["token_ids"] for o in json.loads(text)["outputs"]]
    assert outputs(split) == outputs(plain)


@pytest.mark.parametrize(
    "text", ["tensor", "tensor=two", "tensor=0", "model=2", "tensor=2,tensor=4", "", "tensor=-1"]
)
def test_a_mesh_that_is_none(run, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("w5", "--mesh", text)
    assert stopped.value.code == 2
    assert "must give sizes of at least 1 to the axes data and tensor" in capsys.readouterr().err


def test_a_mesh_of_more_devices_than_there_are(run):
    code, _, err = run("w5", "--mesh", "tensor=64,data=2")
    assert code != 0
    assert "--mesh data=2,tensor=64 needs 128 devices, and jax sees 8" in err
    assert "xla_force_host_platform_device_count=128" in err


def test_a_mesh_that_the_model_does_not_divide_by(run):
    code, _, err = run("w5", "--mesh", "tensor=8")
    assert code != 0
    assert "is not divisible by the mesh's tensor axis of 8; possible sizes below it are" in err
