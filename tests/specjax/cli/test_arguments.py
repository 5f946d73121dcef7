"""Reading the command line and --prompts files: no model is loaded here."""

import dataclasses
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specjax import SamplingParams, demo
from specjax.cli import (
    engine_arguments,
    generate_command,
    prompts,
    sampling_arguments,
    terminal,
)
from specjax.cli.main import build_parser, main
from specjax.config import keywords
from specjax.models.hf_config import SAMPLING_KEYS

EVERY_OPTION = shlex.split(
    "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 "
    "--presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 4=-1.5 --logit-bias 5=2 "
    "--bad-token-ids 1,2 --allowed-token-ids 3,4,5 --min-tokens 2 --max-tokens 7 "
    "--stop-token-ids 6 --stop one --stop two --seed 8 --n 2 --logprobs 1 --ignore-eos "
    "--no-speculate --self-check --entropy --include-stop-str-in-output --no-skip-special-tokens "
    "--no-spaces-between-special-tokens"
)


def parse(*argv):
    return build_parser().parse_args(["generate", *argv])


def test_every_sampling_parameter_has_an_option():
    arguments = parse("hello", *EVERY_OPTION, "--num-speculative-tokens", "3")
    given = sampling_arguments.given_options(arguments)
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    # These two are the call's own.
    assert set(given) == fields - {"num_speculative_tokens", "verification"}
    SamplingParams(**given).validate(vocab_size=10)
    assert given["logit_bias"] == {4: -1.5, 5: 2.0}
    assert given["stop"] == ["one", "two"]
    assert given["allowed_token_ids"] == (3, 4, 5)
    assert given["include_stop_str_in_output"]
    assert not given["skip_special_tokens"]
    assert not given["spaces_between_special_tokens"]
    document = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert sampling_arguments.from_json(document) == document
    with pytest.raises(ValueError, match="skip_special_tokens is 0, expected true or false"):
        sampling_arguments.from_json({"skip_special_tokens": 0})


def test_options_not_given_leave_no_trace():
    assert sampling_arguments.given_options(parse("hello")) == {}


@pytest.mark.parametrize(
    "argv, method, model",
    [
        ([], "draft_model", "demo"),
        (["--drafter", "none"], None, None),
        (["--drafter", "ngram"], "ngram", None),
        (["--model", "folder"], None, None),
        (["--model", "folder", "--drafter", "demo"], "draft_model", "demo"),
        (["--speculative-config", '{"method": "ngram"}'], "ngram", None),
        (["--speculative-config", '{"model": "draft"}'], "draft_model", "draft"),
        (["--speculative-config", '{"model": "head", "method": "eagle"}'], "eagle", "head"),
        (
            ["--speculative-config", '{"model": "head", "method": "eagle"}', "--drafter", "demo"],
            "draft_model",
            "demo",
        ),
        (["--speculative-config", '{"model": "[ngram]"}'], "ngram", "[ngram]"),
        (["--speculative-config", '{"method": "mtp"}'], "mtp", None),
        (
            ["--speculative-config", '{"model": "draft"}', "--drafter", "none"],
            None,
            None,
        ),
    ],
)
def test_which_drafter(argv, method, model):
    config = generate_command.speculation_config(parse("hello", *argv))
    assert (config.method, config.model) == (method, model)


@pytest.mark.parametrize(
    ("argv", "policy", "depth"),
    [
        ([], "fixed", 7),
        (["--temperature", "0"], "fixed", 7),
        (["--temperature", "0.8"], "fixed", 3),
        (["--temperature", "0.8", "--num-speculative-tokens", "2"], "fixed", 2),
        (["--model", "folder"], None, None),
        (["--drafter", "demo"], None, None),
        (["--speculative-config", '{"method": "ngram"}'], None, None),
    ],
)
def test_one_text_of_the_embedded_model_is_drafted_at_once(argv, policy, depth):
    arguments = parse("hello", *argv)
    before = generate_command.speculation_config(arguments)
    (entry,) = prompts.collect(["hello"], None, is_chat=False)
    after = generate_command._of_embedded_pair(arguments, entry, before)
    if policy is None:
        assert after == before
    else:
        assert (after.policy, after.num_speculative_tokens) == (policy, depth)


def test_a_line_of_its_own_temperature_is_drafted_for_as_that(tmp_path):
    arguments = parse("x")
    config = generate_command.speculation_config(arguments)
    for temperature, depth in (("1.0", 3), ("0", 7)):
        path = write_lines(tmp_path, f'{{"prompt": "a", "temperature": {temperature}}}')
        (entry,) = prompts.collect([], path, is_chat=False)
        after = generate_command._of_embedded_pair(arguments, entry, config)
        assert after.num_speculative_tokens == depth
    stored = Path(demo.__file__).parent / "weights" / "target" / "generation_config.json"
    own = json.loads(stored.read_text())["temperature"]
    assert own == generate_command.EMBEDDED_TEMPERATURE


def test_options_win_over_speculative_config():
    json = '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3}'
    arguments = parse("x", "--speculative-config", json, "--num-speculative-tokens", "2")
    config = generate_command.speculation_config(arguments)
    assert config.num_speculative_tokens == 2
    assert config.prompt_lookup_max == 3


def test_plain_decoding_of_all_prompts_or_of_one(tmp_path):
    arguments = parse("x", "--no-speculate")
    assert sampling_arguments.given_options(arguments) == {"speculate": False}
    assert sampling_arguments.given_options(parse("x")) == {}
    path = write_lines(tmp_path, '{"prompt": "a", "speculate": false}')
    (entry,) = prompts.collect([], path, is_chat=False)
    assert entry.sampling == {"speculate": False}


def test_engine_options():
    engine = engine_arguments.config_of(parse("x", "--page-size", "8"), ("page_size",))
    assert (engine.page_size, engine.max_rows) == (8, 32)


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "there is no prompt"),
        (["x", "--top-k", "many"], "--top-k"),
        (["x", "--logit-bias", "5"], "expected ID=VALUE"),
        (["x", "--bad-token-ids", "1,b"], "must be whole numbers"),
        (["x", "--num-speculative-tokens", "-1"], "num_speculative_tokens"),
        (["x", "--page-size", "0"], "page_size"),
        (["x", "--speculative-config", "{"], "no JSON"),
        (["x", "--speculative-config", '{"method": "medusa"}'], "'medusa'"),
        (["x", "--verification", "hope"], "hope"),
        (["x", "--frobnicate"], "--frobnicate"),
        (
            ["--prompts", "no/such/file.jsonl"],
            "no/such/file.jsonl cannot be read (there",
        ),
        (["--prompts", "."], "--prompts . cannot be read (it is a folder)"),
        (["x", "--temprature", "1"], "(did you mean '--temperature'?)"),
        (["x", "--temprature", "1"], "see specjax generate -h"),
        (["x", "--verification", "sedeed"], "(did you mean 'seeded'?)"),
        (["x", "--drafter", "ngramm"], "(did you mean 'ngram'?)"),
        (["x", "--speculative-config", '{"metod": "ngram"}'], "did you mean 'method'"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    try:
        code = main(["generate", *argv])
    except SystemExit as end:  # argparse's own errors
        code = end.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.startswith("specjax: error: ")
    assert output.err.count("\n") == 1
    assert message in output.err


def test_unknown_command_is_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["guess"])
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["genrate", "x"])
    assert "(did you mean 'generate'?)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve"])
    assert "(examples/server.py of the repository serves" in capsys.readouterr().err


def test_what_options_of_other_programs_are_called_here_exists():
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action.choices, dict))
    known = {
        option.lstrip("-").replace("-", "_")
        for command in commands.choices.values()
        for option in command._option_string_actions
    }
    assert set(" ".join(keywords.OPTIONS.values()).split()) <= known


@pytest.mark.parametrize("command", ["plan", "bench"])
def test_each_command_suggests_its_own_options(command, capsys):
    model = ["demo"] if command == "plan" else []
    with pytest.raises(SystemExit) as end:
        main([command, *model, "--jsn"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "--jsn (did you mean '--json'?)" in error
    assert f"see specjax {command} -h" in error


def test_errors_of_the_system_have_no_number(monkeypatch, capsys):
    def fail(argv, owns_process):
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr("specjax.cli.main._run", fail)
    assert main([]) == 2
    assert capsys.readouterr().err == "specjax: error: some/file: permission denied.\n"


@pytest.mark.parametrize("closed", [("stdout",), ("stderr",), ("stdout", "stderr")], ids=str)
def test_closed_streams(monkeypatch, capsys, closed):
    """As of `specjax generate x >&-`: one line on the stream that is open."""
    for name in closed:
        monkeypatch.setattr(f"sys.{name}", None)
    assert main(["generate", "x"]) == 2
    said = "specjax: error: stdout or stderr is closed; send it somewhere, as to /dev/null.\n"
    assert "".join(capsys.readouterr()) == (said if len(closed) == 1 else "")


def test_help_says_what_the_model_decides():
    fields = {*sampling_arguments.OF_MODEL, "do_sample"}
    assert fields == set(SAMPLING_KEYS)
    for action in parse("x").command_parser._actions:
        if action.dest in fields:
            assert "(default the model's, else " in action.help


def test_no_command_shows_help(capsys):
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("specjax ")


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(capsys):
    main(["generate", "--speculative-config", '{"surprise": 1}', "--page-size=0", "x"])
    assert capsys.readouterr().err.startswith(
        "specjax: warning: speculative_config: ignored unknown keys surprise.\n"
    )


def test_help_does_not_import_jax():
    # The package's own __init__ stands aside, so that this speaks of the command line.
    script = (
        "import sys, types, importlib.util as util\n"
        "found = util.find_spec('specjax').submodule_search_locations\n"
        "sys.modules['specjax'] = package = types.ModuleType('specjax')\n"
        "package.__path__ = list(found)\n"
        "from specjax.cli.main import main\n"
        "try:\n"
        "    main(['generate', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'jax', 'jaxlib', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--num-speculative-tokens" in done.stdout


def write_lines(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_prompts_file(tmp_path):
    path = write_lines(
        tmp_path,
        '"plain text"',
        "",
        '{"prompt": [1, 2, 3], "temperature": 0, "logit_bias": {"5": 1}}',
        '{"messages": [{"role": "user", "content": "hi"}], "stop": ["."], "seed": 1}',
    )
    first, second, third = prompts.collect([], path, is_chat=False)
    assert first == ("plain text", {}, f"{path} line 1")
    assert second.prompt == [1, 2, 3]
    assert second.sampling == {"temperature": 0, "logit_bias": {5: 1.0}}
    assert second.source == f"{path} line 3"
    assert third.prompt == [{"role": "user", "content": "hi"}]
    assert third.sampling == {"stop": ["."], "seed": 1}


def test_prompts_come_after_arguments(tmp_path):
    path = write_lines(tmp_path, '"second"')
    entries = prompts.collect(["first"], path, is_chat=False)
    assert [entry.prompt for entry in entries] == ["first", "second"]


def test_prompts_from_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO('"one"\n"two"\n'))
    entries = prompts.collect([], "-", is_chat=False)
    assert [entry.source for entry in entries] == ["stdin line 1", "stdin line 2"]


def test_chat_wraps_text():
    (entry,) = prompts.collect(["hi"], None, is_chat=True)
    assert entry.prompt == [{"role": "user", "content": "hi"}]


def test_a_line_may_hold_arguments_of_the_template(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    more = {"tools": [{"name": "now"}], "continue_final_message": True, "max_tokens": 3}
    more["chat_template_kwargs"] = {"enable_thinking": False}
    path = write_lines(tmp_path, json.dumps({"messages": messages} | more), '"text"')
    chat, text = prompts.collect(["a"], path, is_chat=False)[1:]
    assert (chat.prompt.messages, chat.sampling) == (messages, {"max_tokens": 3})
    expected = {"tools": more["tools"], "continue_final_message": True, "enable_thinking": False}
    assert chat.prompt.arguments == expected
    for_all = {"enable_thinking": True, "documents": []}
    entries = prompts.collect(["a"], path, is_chat=True, chat_arguments=for_all)
    assert [each.prompt.arguments for each in entries] == [
        for_all, for_all | expected, for_all,
    ]  # fmt: skip
    assert prompts.collect(["a"], path, is_chat=False, chat_arguments=for_all)[0].prompt == "a"
    with pytest.raises(ValueError, match=r"--chat-arguments are of a chat template, .* add --chat"):
        prompts.collect(["a"], None, is_chat=False, chat_arguments=for_all)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match=r"empty.jsonl holds no prompt; write one per line"):
        prompts.collect([], str(empty), is_chat=False)
    assert terminal.first_line(entries[0].prompt) == "a"
    assert text.prompt == "text"


def test_messages_are_no_argument_of_the_template(tmp_path):
    for name in ("messages", "self"):
        line = {"messages": [{"role": "user", "content": "hi"}]}
        own = write_lines(tmp_path, json.dumps(line | {"chat_template_kwargs": {name: []}}))
        with pytest.raises(ValueError, match=f"line 1: '{name}' is no argument of a chat's"):
            prompts.collect([], own, is_chat=False)
        with pytest.raises(ValueError, match=f"'{name}' is no argument of a chat's template"):
            prompts.collect(["a"], None, is_chat=True, chat_arguments={name: []})


@pytest.mark.parametrize("text", ["[1]", "{", "5"])
def test_arguments_of_the_template_are_an_object(text, capsys):
    with pytest.raises(SystemExit):
        parse("generate", "--chat-arguments", text)
    assert "is no JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, message",
    [
        ("hello", "no JSON"),
        ('{"messages": [{"role": "user"}], "chat_template_kwargs": 5}', "expected an object"),
        ('{"prompt": "a", "tools": []}', "'tools' is no sampling parameter"),
        ("5", "a int is no prompt"),
        ("{}", "exactly one"),
        ('{"prompt": "a", "messages": []}', "exactly one"),
        ('{"prompt": 5}', "string or a list of token ids"),
        ('{"prompt": [1, true]}', "string or a list of token ids"),
        ('{"messages": []}', "messages must be"),
        ('{"messages": "hi"}', "messages must be"),
        ('{"prompt": "a", "temprature": 1}', "'temprature' is no sampling parameter"),
        ('{"prompt": "a", "top_k": "5"}', "top_k"),
        ('{"prompt": "a", "stop": 5}', "stop"),
        ('{"prompt": "a", "bad_token_ids": "12"}', "bad_token_ids"),
        ('{"prompt": "a", "logit_bias": [1]}', "logit_bias"),
        ('{"prompt": "a", "ignore_eos": 1}', "ignore_eos"),
        ('{"prompt": "a", "speculate": 0}', "speculate is 0, expected true or false"),
    ],
)
def test_wrong_line_is_named(line, message, tmp_path):
    path = write_lines(tmp_path, '"fine"', line)
    with pytest.raises(ValueError, match="line 2: ") as error:
        prompts.collect([], path, is_chat=False)
    assert message in str(error.value)


def test_line_that_is_nested_too_deep_is_named(tmp_path, monkeypatch):
    """json gives up with a RecursionError."""
    path = write_lines(tmp_path, '"fine"')

    def loads(text):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(prompts.json, "loads", loads)
    with pytest.raises(ValueError, match=r"line 1: .*recursion"):
        prompts.collect([], path, is_chat=False)


def test_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "prompts.jsonl").write_bytes(b'"fine"\n\xff\xfe\n')
    with pytest.raises(ValueError, match="no UTF-8"):
        prompts.collect([], str(tmp_path / "prompts.jsonl"), is_chat=False)


def test_lines_of_a_text_file_are_prompts_as_they_stand(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b'one "two"\r\n\n{"prompt": "x"}\n  indented\n')
    entries = prompts.collect([], str(path), is_chat=False)
    assert [entry.prompt for entry in entries] == ['one "two"', '{"prompt": "x"}', "  indented"]
    assert [entry.sampling for entry in entries] == [{}, {}, {}]
    assert entries[1].source == f"{path} line 3"
    json_lines = tmp_path / "prompts.jsonl"
    json_lines.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"line 1: this is no JSON .* In a file named .txt"):
        prompts.collect([], str(json_lines), is_chat=False)


def test_a_text_file_that_begins_with_objects_is_warned_of(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('\n{"prompt": "x"}\n{"prompt": "y"}\n')
    with pytest.warns(UserWarning, match=r"prompts.txt, a file named .txt, .*name it .jsonl"):
        entries = prompts.collect([], str(path), is_chat=False)
    assert [entry.prompt for entry in entries] == ['{"prompt": "x"}', '{"prompt": "y"}']


def test_a_speculative_config_is_json_or_a_file_of_it(tmp_path, capsys):
    path = tmp_path / "drafts.json"
    path.write_text('{"method": "ngram", "num_speculative_tokens": 3}')
    for given in (str(path), path.read_text(), f"  {path.read_text()}"):
        config = generate_command.speculation_config(parse("x", "--speculative-config", given))
        assert (config.method, config.num_speculative_tokens) == ("ngram", 3)
    for wrong in (str(tmp_path / "none.json"), str(tmp_path), "ngram"):
        with pytest.raises(SystemExit):
            parse("x", "--speculative-config", wrong)
        assert "is no JSON, as {...}, nor a file of it: " in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_a_model_is_read(tmp_path, capsys):
    for argv, said in [
        (["--output", str(tmp_path)], "is a folder; name a file"),
        (["--output", str(tmp_path / "none" / "file")], "none, which is no folder; name a file"),
        (["--output", str(tmp_path / "file"), "--json"], "leave out one of them"),
    ]:
        assert main(["generate", "x", "--model", str(tmp_path / "no model"), *argv]) == 2
        assert said in capsys.readouterr().err


def test_options_of_other_programs_say_what_to_write(capsys):
    for option, said in {
        "--max-new-tokens": "(did you mean '--max-tokens'?)",
        "--temprature": "(did you mean '--temperature'?)",
        "--do-sample": "do_sample=False is temperature=0",
        "--num-samples": "(did you mean '--n'?)",
        "-m": "(did you mean '--model'?)",
        "--k": "--k (did you mean '--num-speculative-tokens'?)",
        "-k": "-k (did you mean '--num-speculative-tokens'?)",
        "--num-spec": "--num-spec (did you mean '--num-speculative-tokens'?)",
        "--stream": "`specjax generate` writes one prompt's so",
        "--tensor-parallel-size": "`--mesh tensor=2` makes one",
        "--enable-thinking": "--chat-arguments JSON",
        "--policy": "(write --speculative-config '{\"policy\": ...}')",
        "--guided-json": "text is not held to a grammar",
    }.items():
        with pytest.raises(SystemExit):
            parse("x", option)
        assert said in capsys.readouterr().err
