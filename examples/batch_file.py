"""A file of prompts, one a line, to a file of JSON lines.

    python examples/batch_file.py prompts.txt answers.jsonl --model path/to/model --drafter ngram

Each answer is written when it ends, so answers are in the order in which they end; "line" says
which prompt each belongs to. A run that was stopped goes on: lines that have an answer are left
out, those that have an error are taken away and tried again. A prompt that cannot be served is
reported in its own line; the others are answered.
"""

import argparse
import json
from pathlib import Path

import specjax


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="demo", help="a folder, or a name on the Hub")
    parser.add_argument("--drafter", help="a folder, ngram, ...; by default demo, or ngram")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args(argv)
    drafter = args.drafter or ("demo" if args.model == "demo" else "ngram")

    with args.prompts.open(encoding="utf-8") as file:
        prompts = [line.removesuffix("\n") for line in file]
    has_answer = answered(args.answers)
    todo = {line: text for line, text in enumerate(prompts, start=1) if line not in has_answer}
    print(f"{len(todo)} of {len(prompts)} lines are to be answered")

    sampling = specjax.SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with (
        specjax.Engine(args.model, drafter=drafter) as engine,
        args.answers.open("a", encoding="utf-8") as file,
    ):

        def write(line, **answer):
            print(json.dumps({"line": line, **answer}, ensure_ascii=False), file=file, flush=True)

        line_of = {}
        for line, prompt in todo.items():
            try:
                line_of[engine.add(prompt, sampling)] = line
            except ValueError as error:
                write(line, error=str(error))
        while engine.has_work:
            for chunk in engine.step():
                if (done := chunk.completion) is not None:
                    write(
                        line_of[done.prompt_index],
                        text=done.text,
                        finish_reason=done.finish_reason,
                        num_tokens=len(done.token_ids),
                        error=done.error,
                    )
        print(engine.stats)


def answered(path):
    """Returns the numbers of lines with an answer; drops errors, and what is half-written."""
    written = path.read_bytes() if path.exists() else b""
    whole = [line for line in written.split(b"\n")[:-1] if line]
    kept = [line for line in whole if json.loads(line).get("error") is None]
    if (text := b"".join(line + b"\n" for line in kept)) != written:
        path.with_suffix(".part").write_bytes(text)
        path.with_suffix(".part").replace(path)
    return {json.loads(line)["line"] for line in kept}


if __name__ == "__main__":
    main()
