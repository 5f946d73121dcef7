"""The page of a small document, line by line."""

import copy

import pytest

from specjax.cli.bench.device_report import page
from specjax.cli.table import number

MADE_ON = {
    "device_kind": "TPU v5 lite",
    "platform": "tpu",
    "num_devices": 4,
    "host_cpu": "A host",
    "host_cores": 24,
    "python": "3.11.7",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "plugin": "libtpu 0.0.42",
    "specjax": "0.1.0",
    "commit": "abc123",
    "size": "full",
    "date": "2026-11-26",
}
SPEED = {
    "copy_bytes_per_s": 700e9,
    "read_bytes_per_s": None,
    "flops_per_s": 180e12,
    "product_dtype": "bfloat16",
    "published": {"bytes_per_s": 819e9, "flops_per_s": 197e12, "source": "published"},
}
STEPS = {
    "target": "llama_3_2_1b",
    "drafter": "ngram",
    "rows": 8,
    "context": 2048,
    "dtype": "bfloat16",
    "page_size": 64,
    "shares_pages": False,
    "peak": "published",
    "steps": [
        {
            "num_speculative_tokens": 0,
            "drafted_per_row": 0.0,
            "step_s": 0.005,
            "roofline_s": 0.004,
            "of_roofline": 0.8,
            "plain_tokens_per_s": 1600.0,
            "synthetic_acceptance_tokens_per_s": {},
        },
        {
            "num_speculative_tokens": 2,
            "drafted_per_row": 2.0,
            "step_s": 0.0055,
            "roofline_s": 0.004,
            "of_roofline": 0.727,
            "plain_tokens_per_s": None,
            "synthetic_acceptance_tokens_per_s": {"0.6": 2850.9, "0.8": 3549.1},
        },
    ],
}
ERROR = {
    "op": "write_kv",
    "implementation": "mosaic_tpu",
    "tolerance": 0.0,
    "relative_tolerance": 0.0,
    "largest_error": 0.0,
    "agrees": True,
}
DOCUMENT = {
    "schema_version": 1,
    "made_on": MADE_ON,
    "cases": {
        "device: speed": {"result": SPEED, "took_s": 2.0},
        "numerics: write_kv, mosaic_tpu, one": {"result": ERROR},
        "numerics: write_kv, mosaic_tpu, two": {
            "result": ERROR | {"agrees": False, "largest_error": None}
        },
        "numerics: move_kv, mosaic_tpu, one": {"failed": "it broke", "error": "MosaicError"},
        "models: llama_3_2_1b + ngram, batch 8": {"result": STEPS},
        "models: llama_3_1_8b + llama_3_2_1b, batch 8": {"left_out": "it does not fit"},
        "models: llama_3_1_8b + llama_3_2_1b, batch 64": {"left_out": "it does not fit"},
        "prefill: llama_3_2_1b, 512 tokens": {"not_reached": "the limit of 30 minutes came first"},
        "prefill: llama_3_2_1b, 2048 tokens": {"attempts": 0},
    },
}
LINES = """\
# TPU v5 lite, specjax 0.1.0: device report
Cases: 9; measured 4, left out 2, failed 1, not reached 1, interrupted 1. \
1 kernel example DISAGREES with the definition of the op.
- Interrupted: llama_3_2_1b, 2048 tokens. The same command begins it anew.
Shares and rooflines are of the device's speed as published.
| copy of a large array | 700.0 GB/s |
| memory, as published | 819 GB/s |
| `write_kv` | mosaic_tpu | 1 of 2 | not finite, 0 |
- Failed: move_kv, mosaic_tpu, one. MosaicError: it broke.
| llama_3_2_1b + ngram | 8 | 2048 | 0 | 5.000 | 4.00 | 80% | 1600 | - | - |
| llama_3_2_1b + ngram | 8 | 2048 | 2 | 5.500 | 4.00 | 73% | - | 2851 | 3549 |
- Left out: llama_3_1_8b + llama_3_2_1b, batch 8; llama_3_1_8b + llama_3_2_1b, batch 64. \
It does not fit.
- Not reached: llama_3_2_1b, 512 tokens. The limit of 30 minutes came first.
""".splitlines()


def test_the_page_of_a_document():
    before = copy.deepcopy(DOCUMENT)
    lines = page.as_markdown(DOCUMENT).splitlines()
    assert [line for line in LINES if line not in lines] == []
    assert before == DOCUMENT
    conditions = lines[2]
    for said in ("4 devices seen, one measured", "libtpu 0.0.42", "commit abc123", "jax 0.10.2"):
        assert said in conditions
    assert "CPU" not in page.as_markdown(DOCUMENT)


def test_assumed_acceptance_is_marked_in_each_column():
    (heads,) = [line for line in page.as_markdown(DOCUMENT).splitlines() if "at rate" in line]
    columns = [column for column in heads.split("|") if "at rate" in column]
    assert len(columns) == 2
    assert all("(synthetic acceptance)" in column for column in columns)


def test_a_cpu_is_said_to_be_one():
    document = copy.deepcopy(DOCUMENT)
    document["made_on"] |= {"platform": "cpu", "device_kind": "cpu"}
    document["cases"]["device: speed"]["result"]["published"] = None
    assert "as measured here" not in page.as_markdown(document)  # nothing was drawn by it
    document["cases"]["models: llama_3_2_1b + ngram, batch 8"]["result"]["peak"] = "measured here"
    text = page.as_markdown(document)
    assert text.startswith("# CPU (A host), specjax 0.1.0: device report\n")
    assert "say nothing about a TPU or a GPU" in text
    assert "speed as measured here." in text


def test_rows_that_share_pages_say_so():
    document = copy.deepcopy(DOCUMENT)
    document["cases"]["models: llama_3_2_1b + ngram, batch 8"]["result"]["shares_pages"] = True
    assert "| 8, sharing pages |" in page.as_markdown(document)


def test_steps_that_drafted_less_say_so():
    document = copy.deepcopy(DOCUMENT)
    step = document["cases"]["models: llama_3_2_1b + ngram, batch 8"]["result"]["steps"][1]
    step |= {"drafted_per_row": 0.25, "synthetic_acceptance_tokens_per_s": {}}
    assert "| 2 (0.25 drafted) | 5.500 | 4.00 | 73% | - |" in page.as_markdown(document)


def test_a_document_without_cases():
    text = page.as_markdown(DOCUMENT | {"cases": {}})
    assert "Cases: 0" in text
    assert "rooflines" not in text  # none was drawn
    assert "##" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (1.0, "1.00"),
        (12345.6, "12,346"),
        (123.4, "123"),
        (1e-7, "1.0e-07"),
        (999.6, "1,000"),
        (-999.6, "-1,000"),
        (9.996, "10.0"),
        (0.00099999, "0.00100"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_a_number_of_two_digits_is_rounded_first():
    assert number(99.7, 2) == "100"
    assert number(99.4, 2) == "99"


def test_one_of_a_thing_has_no_plural():
    text = page.as_markdown(DOCUMENT | {"made_on": MADE_ON | {"num_devices": 1, "host_cores": 1}})
    assert "1 device seen" in text
    assert "host A host, 1 core;" in text


def test_figures_that_are_missing_cost_one_line_of_the_page():
    document = copy.deepcopy(DOCUMENT)
    document["cases"]["device: speed"]["result"] = {}
    text = page.as_markdown(document)
    assert "- No table can be drawn of these results. KeyError: 'copy_bytes_per_s'." in text
    assert "| llama_3_2_1b + ngram |" in text
