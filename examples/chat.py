"""A chat on the terminal.

    python examples/chat.py --model path/to/an/instruct/model --drafter ngram

An empty line ends it; Ctrl-C stops an answer, and the chat goes on with what was written. Each
turn sends the whole conversation: the engine still has its pages, and feeds the new part alone.

Without arguments the model inside the package answers. It has read Python code, nothing else, and
has no chat template, so it goes on with the text so far.
"""

import argparse

import specjax


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="a folder, or a name on the Hub")
    parser.add_argument("--drafter", help="a folder, ngram, ...; by default demo, or ngram")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args(argv)
    drafter = args.drafter or ("demo" if args.model == "demo" else "ngram")

    target = specjax.load_model(args.model)
    sampling = specjax.SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    messages = []
    with specjax.Engine(target, drafter=drafter) as engine:
        while line := ask():
            messages.append({"role": "user", "content": line})
            answer = ""
            try:
                for chunk in engine.stream(prompt_of(target, messages), sampling):
                    print(chunk.text, end="", flush=True)
                    answer += chunk.text
            except KeyboardInterrupt:  # the stream aborts its request
                pass
            except ValueError as error:  # the chat is longer than the model's context, for one
                print(error)
                break
            print()
            messages.append({"role": "assistant", "content": answer})
        print(engine.stats)


def ask():
    """Returns the next line that somebody types; "" at the end."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return ""


def prompt_of(target, messages):
    """Returns the messages for the model's chat template, or as text where it has none."""
    if target.tokenizer.chat_template is not None:
        return messages
    contents = [isinstance(each, dict) and each.get("content") for each in messages]
    if not all(isinstance(content, str) for content in contents):
        raise ValueError("a model without a chat template takes messages whose content is text.")
    return "\n".join(contents)


if __name__ == "__main__":
    main()
