"""TRL's trainer on rollouts of another engine, whose `rollout_func` returns its log of evictions."""

import pytest

pytest.importorskip("trl")

import torch

from lit_rlkv.integrations.trl import EvictingGRPOTrainer
from lit_rlkv.types import NEVER
from tests.integrations.trl_runs import build, train


class Logging(EvictingGRPOTrainer):
    """Keeps what an engine's log would have of each rollout."""

    def sample(self, prompt_ids):
        completions, logps = super().sample(prompt_ids)
        rollout, times = self._rollout, []
        for row, mask in enumerate(rollout.attention_mask):
            first, end = int(mask.int().argmax()), int(mask.nonzero().max()) + 1
            table = rollout.evicted_at[row, :, :, first:end]
            times.append(torch.where(table == NEVER, table, table - first).tolist())
        log = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logps}
        self.__dict__.setdefault("engine_logs", []).append({**log, "evicted_at": times})
        return completions, logps


def playing(logs, change=lambda log: log):
    calls = iter(logs)
    return {"arguments": {"rollout_func": lambda prompts, trainer: change(dict(next(calls)))}}


def score(completions, **_):
    """A reward after which torch draws the same, because TRL then shuffles the rollout."""
    torch.manual_seed(0)
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]


@pytest.mark.parametrize("options", [{}, {"pad_to_multiple_of": 8, "beta": 0.1}])
def test_the_log_of_an_engine_trains_as_the_rollout_itself(model, tmp_path, options):
    own, rows = train(model, tmp_path / "own", trainer=Logging, reward=score, **options)
    _, others = train(
        model, tmp_path / "other", reward=score, cache_policy="dense", **playing(own.engine_logs), **options
    )
    assert len(rows) == len(others) == 3
    for row, other in zip(rows, others, strict=True):
        assert row["kv/affected_rows"] > 0
        for name in ("loss", "grad_norm", "kv/affected_rows", "kv/replay_gap"):
            assert other[name] == pytest.approx(row[name], abs=1e-5), name


def test_a_log_of_another_record_is_seen_in_the_gap(model, tmp_path):
    own, _ = train(model, tmp_path / "own", trainer=Logging, reward=score)

    def dense(log):
        return log | {"evicted_at": None}

    _, rows = train(model, tmp_path / "other", reward=score, **playing(own.engine_logs, dense))
    assert rows[0]["kv/replay_gap"] > 1e-2
    assert rows[0]["kv/affected_rows"] == 0


def test_tokens_that_an_environment_gave_are_no_part_of_the_gap(model, tmp_path):
    own, _ = train(model, tmp_path / "own", trainer=Logging, reward=score)

    def given(log):
        masks = [[int(place != 1) for place in range(len(ids))] for ids in log["completion_ids"]]
        logps = [
            [logp * keep for logp, keep in zip(*each, strict=True)]
            for each in zip(log["logprobs"], masks, strict=True)
        ]
        return log | {"env_mask": masks, "logprobs": logps}

    _, rows = train(model, tmp_path / "other", reward=score, **playing(own.engine_logs, given))
    assert rows[0]["kv/replay_gap"] < 1e-3


def test_one_layer_and_head_of_a_log_serve_all(model, tmp_path):
    options = {"cache_policy": "streaming", "reward": score}
    own, (row, *_) = train(model, tmp_path / "own", trainer=Logging, **options)

    def one(log):
        return log | {"evicted_at": [[times[0][:1]] for times in log["evicted_at"]]}

    _, (other, *_) = train(model, tmp_path / "other", **options, **playing(own.engine_logs, one))
    assert row["kv/affected_rows"] > 0
    for name in ("loss", "grad_norm", "kv/affected_rows", "kv/affected", "kv/replay_gap"):
        assert other[name] == pytest.approx(row[name], abs=1e-5), name


def test_a_log_of_another_model_is_refused_by_name(model, tmp_path):
    log = {"prompt_ids": [[1]] * 8, "completion_ids": [[2]] * 8, "logprobs": [[-1.0]] * 8}
    log["evicted_at"] = [[[[NEVER] * 2]] * 7] * 8
    with pytest.raises(ValueError, match=r"evicted_at must be whole numbers .* layers"):
        build(model, tmp_path, **playing([log])).train()


def test_a_log_without_evictions_is_refused_by_name(model, tmp_path):
    def bare(log):
        return {name: log[name] for name in ("prompt_ids", "completion_ids", "logprobs")}

    log = {"prompt_ids": [[1]] * 8, "completion_ids": [[2]] * 8, "logprobs": [[-1.0]] * 8}
    with pytest.raises(ValueError, match="rollout_func must return evicted_at"):
        build(model, tmp_path, **playing([log], bare)).train()


def test_a_row_that_no_log_can_have_is_named(model, tmp_path):
    log = {"prompt_ids": [[1]] * 8, "completion_ids": [[2]] * 8, "logprobs": [[-1.0]] * 8}
    log = {**log, "logprobs": [[-1.0]] * 5 + [[1.0]] + [[-1.0]] * 2, "evicted_at": None}
    with pytest.raises(ValueError, match="row 5 of rollout_func: logps must be natural logarithms"):
        build(model, tmp_path, **playing([log])).train()
