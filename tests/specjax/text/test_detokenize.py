"""Incremental text against decoding everything at once."""

import itertools

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from specjax.text.detokenize import Fed, IncrementalText
from specjax.text.tokenization import Tokenizer

LINES = [
    "the cat sat on the mat, and the dog sat too.",
    "to stop or not to stop: STOP!",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u4f60\u597d",
    "\U0001f600\U0001f602 na\u00efve caf\u00e9",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
]
ALPHABET = "ab t\u00e9\u4f60\u597d\U0001f600\n"


def _byte_level() -> Tokenizer:
    """Any byte is a token: characters are split, and ids may be invalid UTF-8."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens(["<tool>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def _byte_fallback() -> Tokenizer:
    """As SentencePiece: a leading space is dropped; byte runs are all or nothing."""
    pieces = ["<unk>", "<s>", "</s>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["\u2581", "a", "b", "t", "\u00e9", "\u2581a", "ab", "\u2581ab"]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[("\u2581", "a"), ("a", "b"), ("\u2581a", "b")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def _metaspace() -> Tokenizer:
    """As Llama-2 in transformers 5: the decoder drops the space of the first piece."""
    pieces = [("<unk>", 0.0), ("\u2581", -4.0), *((letter, -3.0) for letter in "abt\u00e9\u4f60")]
    pieces += [("\u2581a", -1.0), ("\u2581ab", -1.5), ("ab", -2.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def _word_piece() -> Tokenizer:
    """A space before each token but the first, added ones included."""
    pieces = ["[UNK]", "a", "##a", "b", "##b", "t", "##t", "\u4f60", "ab", "##ab"]
    model = models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


TOKENIZERS = {
    "byte_level": _byte_level(),
    "byte_fallback": _byte_fallback(),
    "metaspace": _metaspace(),
    "word_piece": _word_piece(),
}
BYTES = TOKENIZERS["byte_level"]


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request) -> Tokenizer:
    return TOKENIZERS[request.param]


def _calls(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Splits ids into calls; every cut is a place, some calls may be empty."""
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[begin:end] for begin, end in itertools.pairwise(edges)]


def _run(tokenizer: Tokenizer, calls, stop_strings=(), **options):
    """Returns (text, tokens used, stopped_by) of a whole sequence."""
    incremental = IncrementalText(tokenizer, stop_strings, **options)
    fed = [incremental.feed(call) for call in calls]
    text = "".join(piece.text for piece in fed) + incremental.finish()
    return text, sum(piece.num_tokens_used for piece in fed), incremental.stopped_by


def _expected(tokenizer: Tokenizer, ids: list[int], stop_strings, include=False, prompt=()):
    """The law, by decoding everything for every prefix."""
    text = _added(tokenizer, [*prompt], ids)
    ends = sorted(
        (text.find(stop) + len(stop), -len(stop), stop) for stop in stop_strings if stop in text
    )
    if not ends:
        return text, len(ids), None
    end, _, stop = ends[0]
    num_used = next(
        n
        for n in range(len(ids) + 1)
        if _added(tokenizer, [*prompt], ids[:n]).startswith(text[:end])
    )
    return text[: end if include else end - len(stop)], num_used, stop


def _added(tokenizer: Tokenizer, prompt: list[int], ids: list[int], **options) -> str:
    """The law: the text of prompt and ids, less what it has in common with the prompt's."""
    before, whole = (tokenizer.decode(each, **options) for each in (prompt, [*prompt, *ids]))
    return whole[len(_common(before, whole)) :]


def _common(one: str, other: str) -> str:
    """Returns the longest text that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other))
    return "".join(letter for letter, _ in pairs)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(TOKENIZERS)),
    skip=st.booleans(),
    spaces=st.booleans(),
)
def test_pieces_join_to_what_they_add_to_the_text_of_their_prompt(data, name, skip, spaces):
    """Any ids at all: invalid UTF-8, special tokens, ids outside the vocabulary."""
    tokenizer = TOKENIZERS[name]
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size), max_size=40)
    prompt, ids = data.draw(any_ids), data.draw(any_ids)
    calls = _calls(ids, data.draw(st.lists(st.integers(0, 40), max_size=40)))
    options = dict(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    text, num_used, stopped_by = _run(tokenizer, calls, prompt_token_ids=prompt, **options)
    assert text == _added(tokenizer, prompt, ids, **options)
    assert (num_used, stopped_by) == (len(ids), None)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_prompt_and_text_are_the_text_of_all_tokens(name):
    tokenizer = TOKENIZERS[name]
    for prompt, more in (
        ("ab", " ab a"),
        ("ab", "ab"),
        ("a b", " "),
        ("ab ", "a"),
        ("\u4f60", "b"),
    ):
        before, ids = tokenizer.encode(prompt), tokenizer.encode("x" + prompt + more)
        ids = ids[len(tokenizer.encode("x" + prompt)) :]
        text, _, _ = _run(tokenizer, [[i] for i in ids], prompt_token_ids=before)
        assert tokenizer.decode(before) + text == tokenizer.decode([*before, *ids])


def test_a_first_word_keeps_its_space_and_a_stop_string_that_begins_with_it_matches():
    for name, word in (
        ("byte_fallback", "\u2581ab"),
        ("metaspace", "\u2581ab"),
        ("word_piece", "ab"),
    ):
        tokenizer = TOKENIZERS[name]
        prompt, ab = tokenizer.encode("a"), tokenizer.token_id(word)
        assert _run(tokenizer, [[ab]], prompt_token_ids=prompt) == (" ab", 1, None), name
        stopped = _run(tokenizer, [[ab], [ab]], [" ab"], prompt_token_ids=prompt)
        assert stopped == ("", 1, " ab"), name
        # A prompt without text is no context: a first word has no space then.
        nothing = [tokenizer.token_id("<s>")] * 9
        assert _run(tokenizer, [[ab]], prompt_token_ids=nothing) == ("ab", 1, None), name


def test_a_prompt_that_ends_within_a_character():
    face, you = _bytes_of("\U0001f600"), _bytes_of("\u4f60")
    fallback = [TOKENIZERS["byte_fallback"].token_id(f"<0x{b:02X}>") for b in "\u4f60".encode()]
    right = {
        "completed": (BYTES, face[:3], [*face[3:], *_bytes_of("a")], "\U0001f600a"),
        "after one token": (BYTES, face[:1], face[1:], "\U0001f600"),
        "left unfinished": (BYTES, face[:3], _bytes_of("a"), "a"),
        "another begins": (BYTES, face[:3], you, "\u4f60"),
        "never finished": (BYTES, you[:1], you[1:2], ""),
        "byte tokens": (TOKENIZERS["byte_fallback"], fallback[:2], fallback[2:], "\u4f60"),
        "byte tokens, spoiled": (
            TOKENIZERS["byte_fallback"],
            fallback * 2,
            fallback[:1],
            "\ufffd" * 7,
        ),
        "byte tokens, done": (TOKENIZERS["byte_fallback"], fallback, fallback, "\u4f60"),
    }
    for case, (tokenizer, prompt, ids, text) in right.items():
        for calls in ([ids], [[i] for i in ids]):
            assert _run(tokenizer, calls, prompt_token_ids=prompt)[0] == text, case
            stopped = _run(tokenizer, calls, ["never"], prompt_token_ids=prompt)
            assert stopped[0] == text, case


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(TOKENIZERS)),
    text=st.text(ALPHABET, max_size=40),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    num_prompt=st.integers(0, 8),
)
def test_text_ends_at_the_first_stop_string(data, name, text, stops, include, num_prompt):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    prompt, ids = ids[:num_prompt], ids[num_prompt:]
    calls = _calls(ids, data.draw(st.lists(st.integers(0, 60), max_size=60)))
    expected = _expected(tokenizer, ids, stops, include, prompt)
    run = _run(tokenizer, calls, stops, include_stop_str=include, prompt_token_ids=prompt)
    assert run == expected


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(0, BYTES.vocab_size), max_size=40),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=2), min_size=1, max_size=3),
)
def test_stop_strings_among_invalid_bytes(ids, stops):
    assert _run(BYTES, [[i] for i in ids], stops) == _expected(BYTES, ids, stops)
    assert _run(BYTES, [ids], stops) == _expected(BYTES, ids, stops)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text("ab\u4f60", max_size=30),
    stops=st.lists(st.text("ab\u4f60", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_shown_text_is_never_part_of_a_stop_string(text, stops):
    """Whatever is shown stays shown: each piece extends a prefix of the final text."""
    ids = BYTES.encode(text)
    final, _, _ = _expected(BYTES, ids, stops)
    incremental, shown = IncrementalText(BYTES, stops), ""
    for token_id in ids:
        shown += incremental.feed(token_id).text
        assert final.startswith(shown)


def test_an_unfinished_character_is_held_back():
    ids = _bytes_of("a\U0001f600")
    incremental = IncrementalText(BYTES)
    assert [incremental.feed(i).text for i in ids] == ["a", "", "", "", "\U0001f600"]
    assert incremental.finish() == ""


def test_token_ids_may_be_numpy():
    ids = np.array(_bytes_of("abc"), np.int32)
    incremental = IncrementalText(BYTES)
    assert incremental.feed(ids[0]) == Fed("a", 1, None)
    assert incremental.feed(ids[1:]) == Fed("bc", 2, None)


def test_a_sequence_that_ends_inside_a_character():
    incremental = IncrementalText(BYTES)
    assert incremental.feed(_bytes_of("a\U0001f600")[:-1]).text == "a"
    assert incremental.finish() == "\ufffd"


def test_text_is_shown_as_soon_as_it_is_certain():
    incremental = IncrementalText(BYTES, ["STOP"])
    pieces = [incremental.feed(i).text for i in _bytes_of("xSTxSTO")]
    assert pieces == ["x", "", "", "STx", "", "", ""]
    assert incremental.finish() == "STO"


def test_a_stop_string_over_several_tokens_and_calls():
    ids = _bytes_of("ok STOP more")
    incremental = IncrementalText(BYTES, ["STOP"])
    assert incremental.feed(ids[:5]) == Fed("ok ", 5, None)
    assert incremental.feed(ids[5:]) == Fed("", 2, "STOP")
    assert incremental.feed(ids) == Fed("", 0, "STOP")
    assert incremental.finish() == ""


@pytest.mark.parametrize(
    ("stops", "text", "stopped_by"),
    [
        (["abc", "ab"], "x", "ab"),  # "ab" completes first
        (["abc", "b"], "xa", "b"),  # as does "b", inside what might be "abc"
        (["b", "ab"], "x", "ab"),  # both complete at b: the longest
        (["abcd", "c"], "xab", "c"),
        (["abd", "abe"], "xabcd", None),
    ],
)
def test_overlapping_stop_strings(stops, text, stopped_by):
    for calls in ([_bytes_of("xabcd")], [[i] for i in _bytes_of("xabcd")]):
        assert _run(BYTES, calls, stops)[::2] == (text, stopped_by)


def test_a_stop_string_that_begins_like_itself():
    assert _run(BYTES, [[i] for i in _bytes_of("aaab")], ["aab"]) == ("a", 4, "aab")


def test_a_stop_string_whose_character_is_split_over_tokens():
    ids = _bytes_of("a\u597db")
    assert _run(BYTES, [[i] for i in ids], ["\u597d"]) == ("a", 4, "\u597d")


def test_a_token_that_holds_more_than_the_stop_string():
    ids = BYTES.encode("the cat sat")
    text, num_used, _ = _run(BYTES, [ids], ["a"])
    assert text == "the c"
    assert BYTES.decode(ids[:num_used]).startswith("the ca")
    assert not BYTES.decode(ids[: num_used - 1]).startswith("the ca")


def test_stop_strings_inside_one_token():
    ids = BYTES.encode("a<tool>b")
    assert len(ids) == 3
    assert _run(BYTES, [ids], ["<tool>", "oo", "ool"]) == ("a<t", 2, "oo")
    assert _run(BYTES, [ids], ["ool>b", "b"]) == ("a<t", 3, "ool>b")


def _expected_after(tokenizer: Tokenizer, ids: list[int], stops, num_exempt: int):
    """The law of `may_stop`: the first end past what num_exempt tokens decode to."""
    text = tokenizer.decode(ids)
    exempt = len(tokenizer.decode(ids[:num_exempt]).rstrip("\ufffd"))
    ends = [
        (begin + len(stop), begin)
        for stop in stops
        for begin in range(len(text))
        if text.startswith(stop, begin) and begin + len(stop) > exempt
    ]
    return text[: min(ends)[1]] if ends else text


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    text=st.text("ab\u4f60\n", max_size=20),
    stops=st.lists(st.text("ab\u4f60\n", min_size=1, max_size=4), min_size=1, max_size=3),
    num_exempt=st.integers(0, 12),
)
def test_tokens_that_may_not_stop(name, text, stops, num_exempt):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    incremental = IncrementalText(tokenizer, stops)
    shown = incremental.feed(ids[:num_exempt], may_stop=False).text
    shown += incremental.feed(ids[num_exempt:]).text + incremental.finish()
    assert shown == _expected_after(tokenizer, ids, stops, num_exempt)


@pytest.mark.parametrize(
    ("stops", "text", "stopped_by"),
    [
        (["c"], "xabcd", None),
        (["bcd"], "xa", "bcd"),  # begun before, completed after
        (["bcde", "bc"], "xabcd", None),  # "bc" lies in what might be "bcde"
        (["d"], "xabc", "d"),
    ],
)
def test_a_stop_string_over_the_last_token_that_may_not_stop(stops, text, stopped_by):
    incremental = IncrementalText(BYTES, stops)
    shown = incremental.feed(_bytes_of("xabc"), may_stop=False).text
    shown += incremental.feed(_bytes_of("d")).text + incremental.finish()
    assert (shown, incremental.stopped_by) == (text, stopped_by)


def test_include_stop_string():
    assert _run(BYTES, [_bytes_of("a. b")], ["."], include_stop_str=True)[0] == "a."


def _expected_with_special(tokenizer, prompt, ids, stops, include=False):
    """The law of stop strings that hold a special token, by decoding everything for each prefix."""
    whole = [_added(tokenizer, prompt, ids[:n], skip_special_tokens=False) for n in _upto(ids)]
    shown = [_added(tokenizer, prompt, ids[:n]) for n in _upto(ids)]
    special = tokenizer.special_texts.values()
    for n in _upto(ids):
        found = []
        for stop in stops:
            is_special = any(text in stop for text in special)
            text = whole[n] if is_special else shown[n]
            if stop in text:
                begin = text.index(stop)
                found.append((len(text) - begin - len(stop), len(stop), stop, begin, is_special))
        if found:
            num_after, size, stop, begin, is_special = max(found)
            if include or not is_special:
                end = len(shown[n]) - num_after
                return shown[n][: end if include else end - size], n, stop
            before = max(m for m in _upto(ids) if len(whole[m]) <= begin)
            text = shown[before] + whole[n][len(whole[before]) : begin]
            # A space after a special token is none where the token is left out and a text begins.
            return _common(text, shown[-1]), n, stop
    return shown[-1], len(ids), None


def _upto(ids: list[int]) -> range:
    return range(len(ids) + 1)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["byte_level", "byte_fallback", "metaspace"]),
    texts=st.lists(st.sampled_from(["</s>", "<s>", "a", "b", "ab ", " a", "\u4f60"]), max_size=14),
    stops=st.lists(
        st.sampled_from(
            ["</s>", "<s>", "</s>a", "a</s>", "</s><s>", "</s>ab", "b<s>a", "ab", "aa"]
        ),
        min_size=1,
        max_size=3,
    ),
    num_prompt=st.integers(0, 4),
    include=st.booleans(),
)
@example(
    name="byte_fallback",
    texts=["</s>", "a", "</s>"],
    stops=["a</s>"],
    num_prompt=0,
    include=False,
)
def test_a_stop_string_with_a_special_token(name, texts, stops, num_prompt, include):
    tokenizer = TOKENIZERS[name]
    ids = [i for text in texts for i in tokenizer.encode(text)]
    prompt, ids = ids[:num_prompt], ids[num_prompt:]
    expected = _expected_with_special(tokenizer, prompt, ids, stops, include)
    for calls in ([ids], [[i] for i in ids]):
        run = _run(tokenizer, calls, stops, include_stop_str=include, prompt_token_ids=prompt)
        assert run == expected


def test_where_a_stop_string_with_a_special_token_ends_the_text():
    eos, bos = (BYTES.token_id(text) for text in ("</s>", "<s>"))
    a, b, x = (_bytes_of(letter)[0] for letter in "abx")
    right = {
        "the token itself": (["</s>"], [a, eos, b], ("a", 2)),
        "it begins with one": (["<s>ab"], [x, bos, a, b, x], ("x", 4)),
        "it ends in one": (["xa</s>"], [b, x, a, eos], ("b", 4)),
        "between": (["a</s>b"], [x, a, eos, b], ("x", 4)),
        "two in a row": (["</s><s>"], [a, eos, bos, eos], ("a", 3)),
        "another does not complete it": (["<s>ab"], [bos, a, x, eos, b], ("axb", 5)),
        "a plain one over a special": (["ab", "</s>x"], [x, a, eos, b], ("x", 4)),
        "what ends first": (["<s>ab", "a"], [bos, a, b], ("", 2)),
        "spelt in letters": (["</s>"], [x, *_bytes_of("</s>")], ("x", 5)),
        "within a character": (["</s>"], [*_bytes_of("\u4f60")[:2], eos, a], ("\ufffd", 3)),
    }
    for case, (stops, ids, expected) in right.items():
        assert _run(BYTES, [[i] for i in ids], stops)[:2] == expected, case
        assert _run(BYTES, [ids], stops)[:2] == expected, case
    # What is shown before it completes stays.
    incremental = IncrementalText(BYTES, ["</s>ab"])
    assert [incremental.feed(i).text for i in [x, eos, a, x]] == ["x", "", "", "ax"]
    assert _run(BYTES, [[x, bos, a, b]], ["<s>a"], include_stop_str=True)[:2] == ("xa", 3)
    kept = _run(BYTES, [[x, bos, a, b]], ["<s>a"], skip_special_tokens=False)
    assert kept == ("x", 3, "<s>a")
    both = _run(BYTES, [[x, eos, a, b]], ["ab", "</s>ab", "b"])
    assert both == ("x", 4, "</s>ab")
    unfinished = [*_bytes_of("\u4f60")[:2], eos]
    assert _run(BYTES, [unfinished], ["</s>"], include_stop_str=True)[:2] == ("\ufffd", 3)
    early = IncrementalText(BYTES, ["</s>"])
    assert early.feed([a, eos], may_stop=False) == Fed("a", 2, None)
    assert early.feed([b, eos]) == Fed("b", 2, "</s>")


def test_special_tokens_are_kept_and_spaced_as_asked():
    tokenizer = TOKENIZERS["word_piece"]
    bos, eos, a = (tokenizer.token_id(text) for text in ("<s>", "</s>", "a"))
    ids = [a, bos, eos, a, eos]
    options = dict(skip_special_tokens=False)
    assert tokenizer.decode(ids) == "a a"
    assert tokenizer.decode(ids, **options) == "a <s> </s> a </s>"
    options["spaces_between_special_tokens"] = False
    assert tokenizer.decode(ids, **options) == "a <s></s> a </s>"
    assert _run(tokenizer, [[i] for i in ids], **options)[0] == "a <s></s> a </s>"
    # The prompt's last token is one of the run.
    assert _run(tokenizer, [[eos]], prompt_token_ids=[a, bos], **options)[0] == "</s>"
    assert tokenizer.decode(ids, spaces_between_special_tokens=False) == "a a"
    joined = Tokenizer(tokenizers.Tokenizer(tokenizer.backend.model))  # no decoder: joined by " "
    joined.backend.add_special_tokens(["<s>", "</s>"])
    assert joined.decode([*ids, 99], **options) == "a <s></s> a </s>"


def test_byte_tokens_stop_at_once():
    """A newline of a SentencePiece model is a byte token, whose run is still open."""
    tokenizer = TOKENIZERS["byte_fallback"]
    newline, a = tokenizer.token_id("<0x0A>"), tokenizer.token_id("\u2581a")
    incremental = IncrementalText(tokenizer, ["\n"])
    assert incremental.feed([a, newline, a]) == Fed("a", 2, "\n")


def test_special_tokens_do_not_reach_the_text(tokenizer):
    eos = tokenizer.token_id("</s>")
    ids = [*tokenizer.encode("ab"), eos, *tokenizer.encode(" ab")]
    assert _run(tokenizer, [[i] for i in ids])[0] == tokenizer.decode(ids)
    shown = _run(tokenizer, [ids], skip_special_tokens=False)[0]
    assert "</s>" in shown


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_a_special_token_inside_a_character(name):
    tokenizer = TOKENIZERS[name]
    eos = tokenizer.token_id("</s>")
    if tokenizer is BYTES:
        first, *rest = _bytes_of("\u4f60")
    else:
        first, *rest = (tokenizer.token_id(f"<0x{b:02X}>") for b in "\u4f60".encode())
    ids = [first, eos, *rest]
    assert tokenizer.decode(ids) == "\u4f60"
    assert _run(tokenizer, [[i] for i in ids])[0] == "\u4f60"


@pytest.mark.parametrize("stops", [(), ("never seen",)])
def test_the_work_per_token_does_not_grow(tokenizer, stops, monkeypatch):
    lengths = []
    decode = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer,
        "decode",
        lambda self, ids, **options: lengths.append(len(ids)) or decode(self, ids, **options),
    )
    incremental = IncrementalText(tokenizer, stops)
    for token_id in tokenizer.encode("ab a\u00e9 t\u4f60" * 50):
        incremental.feed(token_id)
    assert max(lengths) <= 12


def test_invalid_bytes_without_end_are_shown_and_forgotten():
    incremental = IncrementalText(BYTES)
    ids = [_bytes_of("\U0001f600")[1]] * 200  # continuation bytes only
    shown = "".join(incremental.feed(i).text for i in ids)
    assert len(shown) == 199
    assert shown + incremental.finish() == BYTES.decode(ids)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc"])
def test_stop_strings_that_make_no_sense_are_refused(stops):
    with pytest.raises(ValueError, match="stop_strings"):
        IncrementalText(BYTES, stops)


def _bytes_of(text: str) -> list[int]:
    """One token per byte, whatever merges the tokenizer knows."""
    names = {byte: name for name, byte in _byte_names().items()}
    return [BYTES.token_id(names[byte]) for byte in text.encode()]


def _byte_names() -> dict[str, int]:
    """Byte-level names: printable latin-1 is itself, the rest follows from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }
