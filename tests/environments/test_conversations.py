"""Conversations with environments: rewards, failures that stay alone, and what the learner gets."""

import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lit_rlkv.checks import OneLineError
from lit_rlkv.config.schema import RewardConfig, RolloutConfig
from lit_rlkv.data.tokenizers import build_task_tokenizer, decode_turn
from lit_rlkv.environments import conversations
from lit_rlkv.environments.conversations import EnvironmentPool, checked_step, extended, fitting
from lit_rlkv.experience.advantages import GAEAdvantage, ReturnAdvantage
from lit_rlkv.models.replay import replay_logps
from lit_rlkv.modules.base import PolicyModule
from lit_rlkv.rollout.turns import last_turn, turn_starts
from lit_rlkv.types import Message, Problem
from tests.environments.talkers import (
    Counter,
    Crashing,
    Hanging,
    Lazy,
    Leaving,
    Unreachable,
    quick_tokenizer,
)
from tests.hand_built import make_datamodule, make_module, make_ppo, make_roles, train_here
from tests.rewards.helpers import wait_until

AT_ONCE = {"max_new_tokens": 60, "environment_timeout_s": None}
IN_THREADS = AT_ONCE | {"environment_timeout_s": 0.5, "environment_workers": 8}


def collected(environment, rollout=AT_ONCE, **options):
    datamodule = make_datamodule(
        make_roles(),
        environment=environment,
        tokenizer=quick_tokenizer(),
        rollout=rollout,
        **{"reward": RewardConfig(environment=1.0, max_failed=1.0), **options},
    )
    return datamodule, datamodule.collect()


@pytest.mark.parametrize("rollout", [AT_ONCE, IN_THREADS])
def test_rewards_of_all_turns_are_added_and_masks_are_of_sampled_tokens(rollout):
    datamodule, experience = collected(Counter, rollout)
    sampled, tokenizer = experience.rollout, datamodule.tokenizer
    is_whole = experience.has_eos
    assert is_whole.float().mean() > 0.5
    assert experience.rewards.components["environment"][is_whole].unique().tolist() == [1.0 + 2.0 + 3.0]
    assert turn_starts(sampled.response_mask)[is_whole].sum(dim=1).unique().tolist() == [3]
    for row in range(len(sampled.input_ids)):
        text = tokenizer.decode(sampled.input_ids[row][sampled.attention_mask[row]])
        assert text.startswith(f"{experience.problems[row].prompt}?")
        given = sampled.attention_mask[row] & ~sampled.response_mask[row]
        assert tokenizer.decode(sampled.input_ids[row][given]).endswith("1;2;" if is_whole[row] else "")
        ids = sampled.input_ids[row][last_turn(sampled.response_mask)[row]].tolist()
        assert experience.completions[row] == decode_turn(tokenizer, ids)
    gap = (replay_logps(datamodule.roles.backbone("policy"), sampled) - sampled.rollout_logps).abs().max()
    assert gap < 1e-4


def test_sampled_tokens_are_never_encoded_again(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    real = conversations.encode_observation

    def watched(tokenizer, observation, turn):
        seen.append(observation)
        return real(tokenizer, observation, turn)

    monkeypatch.setattr(conversations, "encode_observation", watched)
    datamodule, experience = collected(Counter)
    assert set(seen) == {"1;", "2;"}
    # It would show: few of these turns are the tokens of their text, which has no end.
    is_turn = last_turn(experience.rollout.response_mask)
    texts = zip(experience.completions, experience.rollout.input_ids, is_turn, strict=True)
    assert any(datamodule.tokenizer.encode(text) != ids[mask].tolist() for text, ids, mask in texts)


def test_a_crash_fails_its_response_alone(caplog: pytest.LogCaptureFixture):
    _, experience = collected(Crashing)
    is_failed = experience.rewards.is_failed
    assert 0 < is_failed.float().mean() < 1
    scores = experience.rewards.components["environment"]
    assert torch.equal(scores.isnan(), is_failed)
    assert sum("of even length" in record.message for record in caplog.records) == 1


def test_a_timeout_fails_its_response_alone_and_holds_up_no_other():
    started_at = time.monotonic()
    _, experience = collected(Hanging, IN_THREADS)
    is_failed = experience.rewards.is_failed
    assert 0 < is_failed.float().mean() < 1
    assert time.monotonic() - started_at < 20


@pytest.mark.parametrize("rollout", [AT_ONCE, IN_THREADS])
@pytest.mark.parametrize("environment", [Leaving, Unreachable, Lazy])
def test_an_exit_and_an_empty_observation_fail_the_response(
    environment: type[Counter], rollout: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    _, experience = collected(environment, rollout)
    assert environment is Lazy or "SystemExit: 0" in caplog.text
    is_cut = ~experience.has_eos  # cut before its first turn has ended
    assert (experience.rewards.is_failed | is_cut).all()


def test_calls_that_never_end_end_the_run_before_their_threads_are_many(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "MAX_HUNG", 3)
    settings = RolloutConfig(environment_timeout_s=0.05, environment_workers=2)
    pool, over = EnvironmentPool(Counter, settings, build_task_tokenizer()), threading.Event()
    n_before = threading.active_count()
    for _ in range(2):
        with pytest.raises(TimeoutError, match="no answer"):
            pool.submit(over.wait, 60).result()
    assert pool.submit(int, "3").result() == 3
    with pytest.raises(TimeoutError, match="no answer"):
        pool.submit(over.wait, 60).result()
    with pytest.raises(OneLineError, match="3 calls of the environment still run"):
        pool.submit(int, "3")
    assert threading.active_count() <= n_before + 3 + 2  # and the two that wait for them
    over.set()
    wait_until(lambda: threading.active_count() <= n_before + 2)
    assert pool.submit(int, "3").result() == 3


def test_a_reset_that_differs_within_a_group_fails_those_responses():
    numbers = iter(range(100))

    class Unseeded(Counter):
        def reset(self, problem: Problem) -> str:
            return f"{next(numbers)}?"

    _, experience = collected(Unseeded)
    assert experience.rewards.is_failed.view(4, 4).tolist() == [[False, True, True, True]] * 4


def test_an_observation_without_room_truncates_the_response():
    _, experience = collected(
        partial(Counter, n_turns=100), {**AT_ONCE, "max_new_tokens": 12, "max_turns": 90}
    )
    assert not experience.has_eos.any()
    assert (experience.rollout.attention_mask & ~experience.rollout.response_mask).any()


def test_the_overlong_penalty_counts_observations():
    # Two turns of at most a few sampled tokens around an observation of 40: the whole counts.
    class Verbose(Counter):
        def step(self, response: str) -> tuple[str, float, bool]:
            self.n += 1
            return "1" * 40, 0.0, self.n == 2

    reward = RewardConfig(environment=1.0, max_failed=1.0, overlong_buffer=60, overlong_penalty=1.0)
    _, experience = collected(Verbose, reward=reward)
    sampled = experience.rollout
    n_given = (sampled.attention_mask & ~sampled.response_mask).sum(dim=1)
    n_prompt = torch.tensor([len(f"{problem.prompt}?") for problem in experience.problems])
    n_tokens = sampled.response_mask.sum(dim=1) + n_given - n_prompt
    assert (n_tokens[experience.has_eos] > 40).any()
    assert torch.allclose(experience.rewards.total, -n_tokens / 60)


def test_turns_end_at_the_limit():
    _, experience = collected(partial(Counter, n_turns=100), {**AT_ONCE, "max_turns": 2})
    assert turn_starts(experience.rollout.response_mask).sum(dim=1).max() == 2
    assert experience.rewards.components["environment"].max() == 1 + 2


def test_the_same_seed_gives_the_same_conversations():
    first, second = (collected(Counter)[1] for _ in range(2))
    assert torch.equal(first.rollout.input_ids, second.rollout.input_ids)
    assert first.transcripts == second.transcripts
    assert "user: 1;" in next(text for text in first.transcripts if "\n" in text)


def test_waiting_rows_do_not_stop_the_others():
    # Eight environments at a time, 16 responses of 3 turns of 0.1 s: 0.6 s, and 4.8 s one after another.
    started_at = time.monotonic()
    collected(partial(Counter, sleep_s=0.1), IN_THREADS | {"environment_timeout_s": 5.0})
    assert time.monotonic() - started_at < 4.0


@pytest.mark.parametrize("make", [make_module, make_ppo])
def test_several_turns_are_trained_on_with_exact_replay(make: Callable[..., PolicyModule]):
    module = make(make_roles(needed=("policy", "value")))
    datamodule = make_datamodule(
        module.roles,
        environment=Counter,
        tokenizer=quick_tokenizer(),
        reward=RewardConfig(environment=1.0),
        rollout=AT_ONCE,
        advantage=GAEAdvantage(1.0, 0.95) if make is make_ppo else None,
        learner_parts=module.learner_parts,
    )
    first = train_here(module, datamodule, n_iterations=1).rows[0]
    assert first["kv/replay_gap"] < 1e-4


def test_what_a_step_returns_is_checked():
    assert checked_step(("a", 1, False)) == ("a", 1.0, False)
    for wrong in [None, "a", ("a", 1.0), (None, 0.0, False), ("", 0.0, False), ("a", float("nan"), True)]:
        with pytest.raises(ValueError, match="step"):
            checked_step(wrong)


def test_an_observation_is_put_after_a_prompt():
    chat = (Message("system", "s"), Message("user", "u"))
    assert extended("a", None) == "a"
    assert extended("a", "b") == "ab"
    assert extended(chat, "b") == (Message("system", "s"), Message("user", "ub"))
    assert extended("a", [Message("user", "b")]) == (Message("user", "a"), Message("user", "b"))


def test_a_long_observation_is_cut_at_its_end():
    tokenizer = build_task_tokenizer()
    assert fitting(tokenizer, "0123456789", 4) == ("0123", [2, 3, 4, 5])
    assert fitting(tokenizer, "0123", 4)[0] == "0123"
    with pytest.raises(ValueError, match="max_observation_tokens"):
        fitting(with_template(), "0123", 4)


@pytest.mark.parametrize("n_messages", [None, 3, 4000])
def test_a_huge_observation_is_cut_before_it_is_encoded(n_messages: int | None):
    text = "12+7;" * 600_000
    observation = text if n_messages is None else [Message("user", text)] * n_messages
    tracemalloc.start()
    if n_messages == 4000:
        with pytest.raises(ValueError, match="max_observation_tokens"):
            fitting(with_template(), observation, 256)
    else:
        found, token_ids = fitting(with_template(), observation, 256)
        assert 200 < len(token_ids) <= 256
        cut = [found] if isinstance(found, str) else [message.content for message in found]
        assert len(set(cut)) == 1
        assert text.startswith(cut[0])
    assert tracemalloc.get_traced_memory()[1] < 30e6
    tracemalloc.stop()


def with_template():
    tokenizer = build_task_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    return tokenizer


class Unready(Counter):
    def reset(self, problem):
        raise RuntimeError("no server")


def test_prompts_have_what_reset_appends_or_the_error_says_why_not():
    settings, tokenizer = RolloutConfig(**AT_ONCE), quick_tokenizer()
    problems = [Problem("1+2=", "3", "3"), Problem("2+2=", "4", "4")]
    assert EnvironmentPool(Counter, settings, tokenizer).prompts(problems) == ["1+2=?", "2+2=?"]
    with pytest.raises(ValueError, match=r"reset failed for '1\+2=': .*no server"):
        EnvironmentPool(Unready, settings, tokenizer).prompts(problems)


def test_greedy_responses_have_conversations_of_their_own():
    remax = ReturnAdvantage(whiten_advantages=False, greedy_baseline=True)
    _, experience = collected(Counter, advantage=remax)
    rewards = experience.greedy_rewards.view(-1, 4)
    assert (rewards == rewards[:, :1]).all()
    assert 0 < rewards.max() <= 1.0 + 2.0 + 3.0
    _, without = collected(Counter)
    assert torch.equal(experience.rewards.total, without.rewards.total)
