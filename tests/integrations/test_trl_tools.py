"""TRL's tools and environments under eviction: rows go on in their caches, and the learner replays them."""

import pytest

pytest.importorskip("trl")

from dataclasses import replace

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from lit_rlkv.integrations.trl import EvictingGRPOTrainer
from lit_rlkv.models.preparation import FORGETS_BETWEEN_CHUNKS
from tests.integrations.spelled import (
    ADD,
    END,
    LONG,
    RESULTS,
    TURNS,
    Spelling,
    build_with_tools,
    call,
    chat_model,
    train_with_tools,
)
from tests.rollouts import died, moved
from tests.tiers import short_tier, slow


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat"))


class Watched(EvictingGRPOTrainer):
    """Keeps what TRL gets of the first rollout."""

    def _generate_single_turn(self, *args, **options):
        found = super()._generate_single_turn(*args, **options)
        self.turns = [*getattr(self, "turns", []), [[*ids] for ids in found[0]]]
        return found

    def _generate(self, prompts):
        found = super()._generate(prompts)
        self.first = getattr(self, "first", (found, self._rollout))
        return found


def check_tokens(trainer):
    """Compare tokens, masks and log-probs of TRL with those of the rollout, and return the rollout."""
    (prompt_ids, completion_ids, tool_mask, _, logps, *_), rollout = trainer.first
    for row, (prompt, *expected) in enumerate(zip(prompt_ids, completion_ids, tool_mask, logps, strict=True)):
        is_token = rollout.attention_mask[row]
        parts = (rollout.input_ids, rollout.response_mask.int(), rollout.rollout_logps)
        assert [part[row, is_token][len(prompt) :].tolist() for part in parts] == expected
        assert all((logp == 0) == (is_sampled == 0) for is_sampled, logp in zip(*expected[1:], strict=True))
    return rollout


def results(trainer):
    """Return the results of tools in each completion."""
    return [[m["content"] for m in completion if m["role"] == "tool"] for completion in trainer.first[0][3]]


OPTIONS = [
    {"cache_policy": "h2o", "cache_dtype": "int8"},
    {"cache_policy": "random", "temperature": 1.3},
    {"cache_policy": "snapkv", "beta": 0.1},
    {"cache_policy": "streaming", "top_k": 40},
    {"cache_policy": "tova", "pad_to_multiple_of": 8},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    {"mask_truncated_completions": True},
    {"num_iterations": 2, "max_steps": 2},
    {"distillation": "dense_student"},
    {"arguments": {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}},
]


@pytest.mark.parametrize("options", short_tier(OPTIONS, OPTIONS[:2]), ids=str)
def test_rows_with_no_call_and_with_several_replay_in_one_batch(chatty, tmp_path, monkeypatch, options):
    Spelling(monkeypatch, TURNS)
    trainer, rows = train_with_tools(chatty, tmp_path, trainer=Watched, **options)
    assert results(trainer) == RESULTS
    assert [len(turn) for turn in trainer.turns[:3]] == [8, 5, 2]
    rollout = check_tokens(trainer)
    assert (rollout.attention_mask.sum(dim=1) - torch.tensor([*map(len, trainer.first[0][0])])).max() == LONG
    is_given = rollout.attention_mask & ~rollout.response_mask
    is_given &= rollout.response_mask.cumsum(dim=1) > 0
    for mask in (
        is_given,
        rollout.response_mask,
        rollout.attention_mask & ~rollout.response_mask & ~is_given,
    ):
        assert (died(rollout) & mask[:, None, None]).any()
    assert 0 < max(row["kv/replay_gap"] for row in rows if "kv/replay_gap" in row) < 1e-4
    assert rows[0]["kv/affected_rows"] == 1
    assert rows[0]["tools/call_frequency"] == 9 / 8
    if "beta" in options:  # the reference is the policy before the first update
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)


def moved_mask(rollout):
    return replace(rollout, response_mask=rollout.response_mask.roll(1, dims=1))


@pytest.mark.parametrize("change", [moved, moved_mask])
def test_a_record_that_is_shifted_by_one_is_another(chatty, tmp_path, monkeypatch, change):
    class Spoiled(EvictingGRPOTrainer):
        def _take(self, rollout, prompt_ids):
            return super()._take(change(rollout), prompt_ids)

    Spelling(monkeypatch, TURNS)
    _, rows = train_with_tools(chatty, tmp_path, trainer=Spoiled)
    assert rows[0]["kv/replay_gap"] > 1e-2


def test_without_evictions_the_losses_are_those_of_trl(chatty, tmp_path, monkeypatch):
    Spelling(monkeypatch, TURNS)
    options = {"beta": 0.1}
    ours, rows = train_with_tools(chatty, tmp_path, trainer=Watched, cache_budget=2000, **options)
    turns = iter(ours.turns)

    class Plain(GRPOTrainer):
        def _generate_single_turn(self, *args, **options):
            return next(turns), None

    _, plain_rows = train_with_tools(chatty, tmp_path, trainer=Plain, **options)
    assert rows[0]["kv/affected_rows"] == 0
    assert len(rows) == len(plain_rows) == 1
    for row, expected in zip(rows, plain_rows, strict=True):
        assert set(expected) <= set(row)
        for name in set(expected) - {"step_time"}:
            assert row[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name


def test_a_result_that_fills_the_completion_ends_its_row(chatty, tmp_path, monkeypatch):
    Spelling(monkeypatch, [[ADD, f"it is 5{END}"]] * 8)
    trainer, _ = train_with_tools(chatty, tmp_path, trainer=Watched)
    tool_mask = trainer.first[0][2][0]
    n = len(tool_mask) - tool_mask[::-1].index(0)
    trainer, rows = train_with_tools(chatty, tmp_path, trainer=Watched, max_completion_length=n)
    assert trainer.turns[1] == [[]] * 8
    assert results(trainer) == [["5"]] * 8
    assert all(len(mask) == n and mask[-1] == 0 for mask in trainer.first[0][2])
    check_tokens(trainer)
    assert 0 < rows[0]["kv/replay_gap"] < 1e-4
    trainer, rows = train_with_tools(chatty, tmp_path, trainer=Watched, max_completion_length=n - 1)
    assert len(trainer.turns) == 1
    assert results(trainer) == [[]] * 8
    assert 0 < rows[0]["kv/replay_gap"] < 1e-4


class Bag:
    """An environment whose results differ between rows of equal calls; those of two rows are too long."""

    n_made = 0

    def __init__(self):
        self.number, self.n_looks = Bag.n_made, 0
        Bag.n_made += 1

    def reset(self, **row) -> str:
        self.n_looks = 0
        return " with a bag"

    def look(self) -> str:
        """Look into the bag."""
        self.n_looks += 1
        return "o" * (LONG if self.number % 4 == 1 else 3 * self.number)

    def get_reward(self) -> float:
        return float(self.n_looks)


@pytest.mark.parametrize("policy", ["random", slow("h2o")])
def test_environments_of_rows_with_equal_turns(chatty, tmp_path, monkeypatch, policy):
    Bag.n_made = 0
    look = call("look")
    Spelling(monkeypatch, [[look, look, f"done{END}"]] * 8)
    trainer, rows = train_with_tools(
        chatty, tmp_path, trainer=Watched, arguments={"environment_factory": Bag}, cache_policy=policy
    )
    assert results(trainer) == [[] if row in (1, 5) else ["o" * 3 * row] * 2 for row in range(8)]
    check_tokens(trainer)
    assert 0 < rows[0]["kv/replay_gap"] < 1e-4
    assert rows[0]["rewards/Bag/mean"] == 14 / 8


def test_a_model_that_forgets_its_states_has_no_tools(chatty, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(chatty)
    FORGETS_BETWEEN_CHUNKS.add(network)
    with pytest.raises(ValueError, match="no given tokens within responses"):
        build_with_tools(network, tmp_path)
