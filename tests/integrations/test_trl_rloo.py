"""EvictingRLOOTrainer: TRL's own losses without evictions, and exact replay with them."""

import pytest

pytest.importorskip("trl")

from peft import LoraConfig

from lit_rlkv.integrations.trl import EvictingRLOOTrainer
from tests.integrations.trl_runs import (
    IN_TWO_PARTS,
    KEEPS_ALL,
    TWICE,
    Recorder,
    save_model,
    train,
    train_plain_rloo,
)
from tests.tiers import slow

SAME = ("loss", "grad_norm", "reward", "entropy", "kl", "completions/mean_length")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def train_ours(model, folder, **options):
    return train(model, folder, trainer=EvictingRLOOTrainer, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        TWICE,
        slow({"beta": 0.0}),
        slow({"normalize_advantages": True, "temperature": 0.7}),
        slow({"mask_truncated_completions": True}),
        slow(IN_TWO_PARTS),
    ],
    ids=str,
)
def test_a_budget_that_evicts_nothing_gives_the_losses_of_trl(model, tmp_path, options):
    recorder = Recorder()
    _, rows = train_ours(model, tmp_path, reward=recorder, **KEEPS_ALL | options)
    _, plain_rows = train_plain_rloo(model, tmp_path, recorder, **options)
    assert len(rows) == len(plain_rows) >= 3
    for row, expected in zip(rows, plain_rows, strict=True):
        for name in set(SAME) & set(expected):
            assert row[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name
        assert set(expected) <= set(row)


def test_with_evictions_trl_alone_has_other_losses(model, tmp_path):
    recorder = Recorder()
    _, rows = train_ours(model, tmp_path, reward=recorder)
    _, plain_rows = train_plain_rloo(model, tmp_path, recorder)
    assert rows[0]["grad_norm"] != pytest.approx(plain_rows[0]["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("options", [{}, TWICE, {"steps_per_generation": 2}], ids=str)
def test_the_learner_replays_what_the_sampler_saw(model, tmp_path, options):
    _, rows = train_ours(model, tmp_path, **options)
    gaps = [row["kv/replay_gap"] for row in rows if "kv/replay_gap" in row]
    assert len(gaps) == (len(rows) if not options else (len(rows) + 1) // 2)
    assert max(gaps) < 1e-4


def test_a_dense_learner_is_far_from_the_sampler(model, tmp_path):
    _, rows = train_ours(model, tmp_path, correction="naive")
    assert all(row["kv/replay_gap"] > 0.1 for row in rows)


def test_an_adapter_and_its_reference_replay(model, tmp_path):
    lora = LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    _, rows = train_ours(model, tmp_path, arguments={"peft_config": lora}, beta=0.1)
    assert all(row["kv/replay_gap"] < 1e-4 for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert abs(rows[-1]["kl"]) > 1e-5
