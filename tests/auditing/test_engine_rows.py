"""The same sample in the form of every engine and trainer is the same row; broken rows are named."""

import json

import pytest

from lit_rlkv.auditing.engine_rows import fitting_rows, read_log
from lit_rlkv.log_row import LogRow
from tests.auditing.logs import model

PROMPT, RESPONSE, LOGPS = [5, 6, 7], [8, 9, 10, 11], [-0.5, -1.5, -0.25, -2.0]
CANDIDATES = [
    {str(token): {"logprob": logp}, "3": {"logprob": -9.0}}
    for token, logp in zip(RESPONSE, LOGPS, strict=True)
]
PAIRS = [[logp, token, None] for token, logp in zip(RESPONSE, LOGPS, strict=True)]
FORMS = {
    "own": {"prompt_ids": PROMPT, "response_ids": RESPONSE, "logps": LOGPS},
    "vllm_chat": {
        "prompt_token_ids": PROMPT,
        "choices": [{"token_ids": RESPONSE, "logprobs": {"content": [{"logprob": logp} for logp in LOGPS]}}],
    },
    "vllm_completion": {
        "prompt_token_ids": PROMPT,
        "choices": [{"token_ids": RESPONSE, "logprobs": {"token_logprobs": LOGPS}}],
    },
    "vllm_offline": {
        "prompt_token_ids": PROMPT,
        "outputs": [{"token_ids": RESPONSE, "logprobs": CANDIDATES}],
    },
    "sglang": {
        "output_ids": RESPONSE,
        "meta_info": {
            "input_token_logprobs": [[None, token, None] for token in PROMPT],
            "output_token_logprobs": PAIRS,
        },
    },
    "trl": {
        "prompt_ids": [0, 0, *PROMPT],
        "prompt_mask": [0, 0, 1, 1, 1],
        "completion_ids": [*RESPONSE, 0],
        "completion_mask": [1, 1, 1, 1, 0],
        "sampling_per_token_logps": [*LOGPS, 0.0],
    },
    "verl": {
        "prompts": [0, *PROMPT],
        "responses": [*RESPONSE, 0, 0],
        "attention_mask": [0, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        "response_mask": [1, 1, 1, 1, 0, 0],
        "rollout_log_probs": [*LOGPS, 0.0, 0.0],
    },
    "prime_rl": {
        "token_ids": [*PROMPT, *RESPONSE],
        "loss_mask": [False] * 3 + [True] * 4,
        "inference_logprobs": [0.0] * 3 + LOGPS,
    },
    "verifiers": {
        "prompt_ids": PROMPT,
        "prompt_mask": [False] * 3,
        "completion_ids": RESPONSE,
        "completion_mask": [True] * 4,
        "completion_logprobs": LOGPS,
    },
}


def write(tmp_path, *lines):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_is_the_same_row_in_every_form(form, tmp_path):
    (row,), places, broken = read_log(write(tmp_path, FORMS[form]))
    assert (row.prompt_ids.tolist(), row.response_ids.tolist(), row.logps.tolist()) == (
        PROMPT,
        RESPONSE,
        LOGPS,
    )
    assert row.is_sampled.all()
    assert places == [f"{tmp_path}/rows.jsonl:1"]
    assert broken == []


def test_results_of_tools_are_no_samples(tmp_path):
    masked = FORMS["trl"] | {"tool_mask": [1, 0, 1, 1, 0]}
    (row,), _, _ = read_log(write(tmp_path, masked))
    assert row.is_sampled.tolist() == [True, False, True, True]


def test_kept_keys_become_times(tmp_path):
    kept = [{"at": 5, "kept": [[[0, 3, 4]]]}]
    (row,), _, _ = read_log(write(tmp_path, FORMS["own"] | {"kept": kept}))
    assert row.evicted_at[0, 0, 1:3].tolist() == [5, 5]


def test_a_row_without_compactions_is_dense(tmp_path):
    (row,), _, broken = read_log(write(tmp_path, FORMS["own"] | {"kept": []}))
    assert row.evicted_at is None
    assert broken == []


def test_a_file_without_a_row_that_can_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no row can be compared: .*rows.jsonl:1: not JSON"):
        read_log(write(tmp_path, "{"))


def test_a_table_is_read_like_lines(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([FORMS["own"], FORMS["own"]]).to_parquet(path)
    rows, places, _ = read_log(path)
    assert [row.logps.tolist() for row in rows] == [LOGPS, LOGPS]
    assert places[1].endswith("row 1")


def test_parts_that_a_table_has_as_null_are_passed_over(tmp_path):
    chat = {"content": None, "token_logprobs": LOGPS}
    row = {"prompt_ids": PROMPT, "choices": None, "outputs": [{"token_ids": RESPONSE, "logprobs": chat}]}
    (row,), _, _ = read_log(write(tmp_path, row))
    assert row.logps.tolist() == LOGPS


BROKEN = {
    "got nan for token 1 of the response": FORMS["own"] | {"logps": [-0.5, float("nan"), -1.0, -1.0]},
    "got -inf for token 0 of the response": FORMS["own"] | {"logps": [-float("inf"), -1.0, -1.0, -1.0]},
    "got None for token 3 of the response": FORMS["own"] | {"logps": [*LOGPS[:3], None]},
    "no logps: logps is null; log it": FORMS["own"] | {"logps": None},
    "no response: response_ids is null": FORMS["own"] | {"response_ids": None},
    "no prompt: prompt_ids is []": FORMS["own"] | {"prompt_ids": []},
    "no response: token_ids is null": {"token_ids": None, "loss_mask": [0, 1, 1], "logps": LOGPS},
    "response_ids must be numbers": FORMS["own"] | {"response_ids": [8, None, 10, 11]},
    "no response: give it as": {"prompt_ids": PROMPT, "logps": LOGPS},
    "no logps": {"prompt_ids": PROMPT, "response_ids": RESPONSE},
    "3 log-probs for 4 tokens": FORMS["own"] | {"logps": LOGPS[1:]},
    "at most 0": FORMS["own"] | {"logps": [0.5, *LOGPS[1:]]},
    "not JSON": '{"prompt_ids": [1',
    "must be an object": [1, 2],
    "has no attribute 'get'": {"prompt_ids": PROMPT, "response_ids": RESPONSE, "meta_info": PAIRS},
    "no response: choices is []": {"prompt_token_ids": PROMPT, "choices": []},
    "no response: choices is null": {"prompt_token_ids": PROMPT, "choices": None},
    "must be an object with token ids and log-probs, got None": {"prompt_ids": PROMPT, "choices": [None]},
    "a mask has 3 numbers for 4 tokens of the response": FORMS["own"] | {"response_mask": [1, 1, 1]},
    "a mask has 5 numbers for 4 tokens": FORMS["own"] | {"response_mask": [1] * 4, "tool_mask": [1] * 5},
    "a mask has 2 numbers for 3 tokens of the prompt": FORMS["own"] | {"prompt_mask": [1, 1]},
    "none of its 4 tokens is sampled": FORMS["own"] | {"is_sampled": [False] * 4},
    "own position": FORMS["own"] | {"evicted_at": [[[0, 9, 9, 9, 9, 9, 9]]]},
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_row_is_named_and_the_others_are_read(said, tmp_path):
    rows, places, (why,) = read_log(write(tmp_path, FORMS["own"], BROKEN[said], FORMS["own"]))
    assert len(rows) == len(places) == 2
    assert "rows.jsonl:2: " in why
    assert said in why


def test_a_broken_choice_is_named_and_the_others_of_its_row_are_read(tmp_path):
    (choice,) = FORMS["vllm_completion"]["choices"]
    row = {"prompt_token_ids": PROMPT, "choices": [None, choice, choice | {"token_ids": None}]}
    (read,), places, broken = read_log(write(tmp_path, row))
    assert read.logps.tolist() == LOGPS
    assert places == [f"{tmp_path}/rows.jsonl:1 choices[1]"]
    assert [each.partition(": ")[0].rpartition(":")[2] for each in broken] == ["1 choices[0]", "1 choices[2]"]


def test_a_row_longer_than_the_model_is_named_and_the_others_stay():
    rows = [LogRow([5] * 4, [6] * n, [-1.0] * n) for n in (3, 60)]
    kept, places, broken = fitting_rows(model(max_position_embeddings=32), rows, ["1", "2"], ["0: known"])
    assert (len(kept), places, broken[0]) == (1, ["1"], "0: known")
    assert broken[1].startswith("2: ")
    assert "64 tokens" in broken[1]


def test_a_row_with_evictions_of_other_heads_than_most_is_named():
    heads = [[[7] * 7] * 2]
    parts = (None, heads, heads * 3, heads * 3)
    rows = [LogRow([5] * 4, [6] * 3, [-1.0] * 3, part) for part in parts]
    kept, places, (odd,) = fitting_rows(model(), rows, ["1", "2", "3", "4"], [])
    assert kept == [rows[0], *rows[2:]]
    assert places == ["1", "3", "4"]
    assert odd.startswith("2: evicted_at has (1, 2) layers and KV heads, and that of most rows (3, 2)")
