import json
import zlib
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lit_rlkv.callbacks.rollout_statistics import rollout_statistics
from lit_rlkv.config.schema import CurriculumConfig, RewardConfig
from lit_rlkv.data.chat import encode_prompts
from lit_rlkv.data.tokenizers import decode_completions
from lit_rlkv.experience.advantages import GroupAdvantage, PairAdvantage, ReturnAdvantage
from lit_rlkv.experience.batch import Experience
from lit_rlkv.experience.sample import generate_options
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models.hydra import acting_as
from lit_rlkv.models.packing import TOKENS_PER_PASS
from lit_rlkv.objectives.gains import by_covariance
from lit_rlkv.rollout import generate
from lit_rlkv.types import Problem
from tests.hand_built import ARMS, DigitsAreGood, make_datamodule, make_roles, shift, tokens_of
from tests.rewards.helpers import InThreads


def test_one_iteration_after_another_asks_for_new_prompts_and_new_draws():
    data = make_datamodule(make_roles())
    first, second = data.collect(), None
    data.iteration += 1
    second = data.collect()
    assert [p.prompt for p in first.problems] != [p.prompt for p in second.problems]
    assert first.problems[0] == first.problems[3] != first.problems[4]  # groups of four


def test_a_prompt_is_prefilled_once_for_its_group():
    roles = make_roles()
    data, sizes = make_datamodule(roles), []
    embedding = roles.backbone("policy").get_input_embeddings()
    hook = embedding.register_forward_hook(lambda *call: sizes.append(tuple(call[1][0].shape)))
    data.collect()
    hook.remove()
    prefill, *steps = sizes[:3]
    assert prefill[0] == 4
    assert steps == [(16, 1)] * 2


def test_state_brings_back_the_same_iteration():
    data = make_datamodule(make_roles())
    list(data.train_dataloader())
    state = data.state_dict()
    expected = next(iter(data.train_dataloader()))
    again = make_datamodule(make_roles())
    again.load_state_dict(state)
    found = next(iter(again.train_dataloader()))
    assert torch.equal(found.rollout.input_ids, expected.rollout.input_ids)
    assert torch.equal(found.rollout.evicted_at, expected.rollout.evicted_at)


class ListedSums(DigitsAreGood):
    """A list of forty sums, so that problems return; no score where a response begins with a 9."""

    def __len__(self):
        return 40

    def at(self, index):
        return Problem(f"{index}+1=", str(index + 1), str(index + 1))

    def score(self, problem, completion):
        return float("nan") if completion.startswith("9") else super().score(problem, completion)


def with_curriculum(**options):
    options = {"curriculum": CurriculumConfig(decay=0.5), "task": ListedSums(n_terms=3), **options}
    return make_datamodule(make_roles(), reward=RewardConfig(verifier=1.0, max_failed=1.0), **options)


def test_a_curriculum_knows_the_mean_score_of_each_group():
    data = with_curriculum()
    experience = data.collect()
    scores = experience.rewards.components["exact_match"].view(-1, 4).nanmean(dim=1)
    listed = {data.source.problem(index).prompt for index in range(data.source.size)}
    known = {problem.prompt for problem in experience.problems}
    assert known <= listed
    rates = [rate for _, rate in data.source.curriculum.state_dict()]
    assert sorted(rates) == sorted(scores[~scores.isnan()].tolist())
    assert len(set(rates)) > 1
    found = rollout_statistics(experience)
    assert found["curriculum/drawn"] == len(rates) / len(listed)
    assert found["curriculum/success"] == pytest.approx(sum(rates) / len(rates))
    assert "curriculum/drawn" not in rollout_statistics(make_datamodule(make_roles()).collect())


def test_rounds_that_replace_groups_count_in_the_curriculum_too():
    small = {"group_size": 2, "rollout": {"n_prompts": 6}}
    one, more = with_curriculum(**small), with_curriculum(**small, resample=2)
    one.collect()
    experience = more.collect()
    assert experience.n_rounds > 1
    n_known = len(more.source.curriculum.state_dict())
    assert n_known > len(one.source.curriculum.state_dict())
    assert experience.curriculum["curriculum/drawn"] == n_known / more.source.size


def test_a_resumed_curriculum_draws_the_same_problems():
    data = with_curriculum()
    list(data.train_dataloader())
    state = json.loads(json.dumps(data.state_dict()))
    expected, again = data.collect(), with_curriculum()
    again.load_state_dict(state)
    assert [p.prompt for p in again.collect().problems] == [p.prompt for p in expected.problems]


@pytest.mark.parametrize(
    ("n_minibatches", "tokens_per_pass", "n_epochs"),
    [(1, TOKENS_PER_PASS, 1), (2, 48, 2), (3, 64, 1), (2, 1, 1)],
)
def test_every_response_is_learned_once_an_epoch_and_weights_sum_to_one_a_step(
    n_minibatches, tokens_per_pass, n_epochs
):
    data = make_datamodule(
        make_roles(), n_minibatches=n_minibatches, tokens_per_pass=tokens_per_pass, n_epochs=n_epochs
    )
    experience = data.collect()
    batches = list(data.splitter.minibatches(experience))
    assert sum(batch.ends_step for batch in batches) == n_minibatches * n_epochs
    assert (len(batches) > n_minibatches * n_epochs) == (tokens_per_pass < TOKENS_PER_PASS)
    assert all(batch.advantages.numel() <= tokens_per_pass or len(batch.advantages) == 1 for batch in batches)
    learned = [row for batch in batches for row in tokens_of(batch.rollout)]
    assert sorted(learned) == sorted(tokens_of(experience.rollout) * n_epochs)
    weight, n_response_tokens, n_fresh = 0.0, 0, 0
    for batch in batches:
        weight += float(batch.loss_weight.sum())
        n_response_tokens += int(batch.rollout.response_mask.sum())
        n_fresh += batch.is_first_update and batch.ends_step
        if batch.ends_step:
            assert weight == pytest.approx(1.0, abs=1e-5)
            assert n_response_tokens == batch.n_response_tokens
            weight, n_response_tokens = 0.0, 0
    assert n_fresh == 1


@pytest.mark.parametrize("tokens_per_pass", [64, 100])
def test_a_step_with_one_long_response_is_cut_without_the_padding_of_a_rectangle(tokens_per_pass):
    data = make_datamodule(make_roles(), rollout={"max_new_tokens": 40}, tokens_per_pass=tokens_per_pass)
    whole = data.collect()
    longest = int(whole.rollout.response_mask.sum(dim=1).argmax())
    experience = with_short_responses(whole, [40 if row == longest else 3 for row in range(16)])
    n_tokens = int(experience.rollout.attention_mask.sum())
    rectangle = 16 * int(experience.rollout.attention_mask.sum(dim=1).max())
    parts = list(data.splitter.minibatches(experience))
    sizes = [part.advantages.numel() for part in parts]
    assert len(parts) > 1
    assert max(sizes) <= tokens_per_pass
    assert sorted(row for part in parts for row in tokens_of(part.rollout)) == sorted(
        tokens_of(experience.rollout)
    )
    # 15 short rows beside a long one: half of the rectangle is padding
    assert rectangle > 1.9 * n_tokens
    assert sum(sizes) - n_tokens < 0.3 * (rectangle - n_tokens)
    # the control: of one pass that is large enough it is the rectangle
    data.splitter.tokens_per_pass = rectangle
    assert [part.advantages.numel() for part in data.splitter.minibatches(experience)] == [rectangle]


def with_short_responses(experience: Experience, n_tokens: list[int]) -> Experience:
    """Return an experience whose responses end after so many tokens."""
    rollout = experience.rollout
    is_kept = rollout.response_mask.cumsum(dim=1) <= torch.tensor(n_tokens)[:, None]
    rollout = replace(
        rollout,
        attention_mask=rollout.attention_mask & is_kept,
        response_mask=rollout.response_mask & is_kept,
    )
    rollout = rollout.with_record(evicted_at=rollout.evicted_at * is_kept[:, None, None])
    weights = replace(experience.weights, is_counted=experience.weights.is_counted & is_kept)
    return replace(experience, rollout=rollout, weights=weights)


def test_rows_and_devices_keep_every_field():
    (batch,) = make_datamodule(make_roles()).train_dataloader()
    part = batch.rows(torch.tensor([3, 1])).to("cpu")
    assert torch.equal(part.rollout.evicted_at, batch.rollout.evicted_at[[3, 1]])
    for field in fields(batch):
        value, source = getattr(part, field.name), getattr(batch, field.name)
        if isinstance(source, torch.Tensor):
            assert torch.equal(value, source[[3, 1]]), field.name
        elif field.name != "rollout":
            assert value == source, field.name


def test_more_parts_than_groups_are_refused():
    data = make_datamodule(make_roles())
    experience = data.collect()
    with pytest.raises(ValueError, match="4 groups cannot be cut into 5 parts; give at most 4"):
        list(data.splitter.parts(experience, 5))


def of_functions(**functions):
    return {"reward": RewardConfig(max_failed=1.0), "functions": functions}


def flaky(question):
    """Fails on about every third response."""
    n = zlib.crc32(question["completion"].encode())
    return float("nan") if n % 3 == 0 else n % 5


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_a_response_without_a_reward_has_no_advantage_and_no_loss(estimator):
    data = make_datamodule(
        make_roles(), advantage=GroupAdvantage(estimator), **of_functions(own=InThreads(ask=flaky))
    )
    experience = data.collect()
    is_failed = experience.rewards.is_failed
    assert 0 < is_failed.sum() < 16
    (part,) = data.splitter.parts(experience, 1)  # rows in order
    (batch,) = part.batches
    assert (batch.loss_weight[is_failed] == 0).all()
    assert batch.advantages[is_failed].abs().max() < 1e-5
    assert (batch.loss_weight[~is_failed] * batch.rollout.response_mask[~is_failed]).sum() == pytest.approx(
        1.0
    )
    assert batch.advantages.isfinite().all()


def test_a_pair_with_a_side_without_a_reward_does_not_count():
    data = make_datamodule(make_roles(), advantage=PairAdvantage(), **of_functions(own=InThreads(ask=flaky)))
    experience = data.collect()
    is_failed = experience.rewards.is_failed
    credit = data.advantage.compute(experience)
    is_tie = (credit.advantages[credit.units] == 0).all(dim=2).all(dim=1)
    assert not (is_failed[credit.units].any(dim=1) & ~is_tie).any()


def test_callbacks_are_called_around_rollout_score_and_reward_in_their_order():
    data, heard = make_datamodule(make_roles()), []
    data.callbacks = [
        SimpleNamespace(on_phase_start=lambda *what: heard.append(("start", *what))),
        SimpleNamespace(
            on_phase_start=lambda *what: heard.append(("second", *what)),
            on_phase_end=lambda *what: heard.append(("end", *what)),
        ),
    ]
    data.train_dataloader()
    data.train_dataloader()
    assert heard == [
        (moment, phase, iteration)
        for iteration in (0, 1)
        for phase in ("rollout", "score", "reward")
        for moment in ("start", "second", "end")
    ]


def progress_of(data):
    """Return for each phase of one iteration the units that were reported as done, and their totals."""
    heard = {}

    def on_phase_progress(phase, n_done, n_total):
        heard.setdefault(phase, []).append((n_done, n_total))

    data.callbacks = [*data.callbacks, SimpleNamespace(on_phase_progress=on_phase_progress)]
    data.train_dataloader()
    done = {phase: [n_done for n_done, _ in reports] for phase, reports in heard.items()}
    return done, {phase: {n_total for _, n_total in reports} for phase, reports in heard.items()}


def test_each_phase_reports_its_progress_from_0_to_its_total():
    length = InThreads(ask=lambda question: len(question["completion"]))
    data = make_datamodule(
        make_roles(),
        correction=ARMS["naive"],
        rollout={"max_rows": 8, "n_shards": 2},
        tokens_per_pass=64,
        **of_functions(length=length),
    )
    data.callbacks = [
        SimpleNamespace(
            on_update_start=lambda experience, split: [list(split(experience, 2)) for _ in range(2)]
        )
    ]
    done, totals = progress_of(data)
    assert totals == {"rollout": {160}, "score": {16}, "reward": {16}, "diagnostics": {4}}
    for phase, reports in done.items():
        assert reports == sorted(reports), phase
        assert (reports[0], reports[-1]) == (0, max(totals[phase])), phase
    assert len(done["rollout"]) == 1 + 2 * 9  # two shards, and a report for each step
    assert len(done["score"]) > 4
    assert len(done["reward"]) == 1 + 16
    # two hooks of two callbacks; the third call cut the rollout twice, and its parts count
    assert done["diagnostics"] == [0, 1, 2, 2 + 1 / 3, 2 + 2 / 3, 2 + 2 / 3, 2 + 2 / 3, 3, 4]


def test_a_phase_without_work_reports_nothing():
    done, _ = progress_of(make_datamodule(make_roles()))
    assert "reward" not in done  # no reward functions
    assert "rollout" in done


def test_minibatches_know_how_much_of_the_update_is_done():
    data = make_datamodule(
        make_roles(), n_epochs=2, n_minibatches=2, tokens_per_pass=64, learner_parts=(("policy",), ("value",))
    )
    batches = list(data.train_dataloader())
    assert {batch.n_steps for batch in batches} == {4}
    done = [batch.n_steps_done for batch in batches]
    assert done == sorted(set(done))
    assert [batch.n_steps_done for batch in batches if batch.ends_step] == [1, 2, 3, 4]
    assert len(batches) > 8


REMAX = ReturnAdvantage(whiten_advantages=False, greedy_baseline=True)


def of_text(completion):
    return float(zlib.crc32(completion.encode()) % 97)


def with_greedy(ask, **options):
    spec = CacheSpec(policy="knorm", budget=5, interval=1, sink=1, window=2)  # draws nothing
    reward, functions = RewardConfig(verifier=0.0, max_failed=1.0), {"own": InThreads(ask=ask, n_workers=1)}
    options = {"advantage": REMAX, "spec": spec, "reward": reward, "functions": functions} | options
    return make_datamodule(shift(make_roles(), std=0.3), **options)


@pytest.mark.parametrize("group_size", [1, 4])
def test_the_baseline_of_remax_is_the_reward_of_a_greedy_response_under_the_same_cache(group_size):
    graded = []

    def ask(question):
        graded.append(question["completion"])
        return of_text(graded[-1])

    data = with_greedy(ask, group_size=group_size)
    experience = data.collect()
    assert len(graded) == len(experience.problems) + 4
    assert len(experience.completions) == len(experience.rollout.input_ids) == 4 * group_size
    encoded = encode_prompts(data.tokenizer, [one.prompt for one in experience.problems[::group_size]])
    options = generate_options(data.tokenizer, data.settings) | {"temperature": 0.0}
    rewards = []
    for cache in (data.cache, CacheSpec.dense()):
        model = data.roles.backbone("policy")
        with acting_as(data.roles, "policy"):
            found = generate(model, encoded.input_ids, encoded.attention_mask, cache=cache, **options)
        completions = decode_completions(data.tokenizer, found.input_ids, found.response_mask)
        rewards.append([of_text(completion) for completion in completions])
    expected = torch.tensor(rewards[0]).repeat_interleave(group_size)
    assert torch.equal(experience.greedy_rewards, expected)
    assert rewards[0] != rewards[1]  # the cache decides
    assert rollout_statistics(experience)["reward/greedy"] == pytest.approx(float(expected.mean()))
    plain = with_greedy(ask, group_size=group_size, advantage=ReturnAdvantage()).collect()
    assert torch.equal(plain.rollout.input_ids, experience.rollout.input_ids)
    assert plain.greedy_rewards is None


def test_without_the_reward_of_its_greedy_response_a_group_does_not_count():
    asked = []

    def ask(question):
        asked.append(question)
        return float("nan") if len(asked) == 9 else 1.0  # the first greedy one

    data = with_greedy(ask, group_size=2)
    experience = data.collect()
    assert sorted(experience.rewards.is_failed.view(-1, 2).all(dim=1).tolist()) == [False] * 3 + [True]
    assert int(experience.rewards.is_failed.sum()) == 2
    (part,) = data.splitter.parts(experience, 1)
    assert not part.batches[0].loss_weight[experience.rewards.is_failed].any()


def test_greedy_responses_are_scored_by_the_reward_role_and_go_with_their_groups():
    data = make_datamodule(
        make_roles(needed=("policy", "reward")),
        advantage=REMAX,
        reward=RewardConfig(verifier=1.0, learned=1.0),
        resample=1,
    )
    experience = data.collect()
    groups = experience.greedy_rewards.view(-1, 4)
    assert (groups == groups[:, :1]).all()
    assert groups[:, 0].unique().numel() == 4


def test_random_choices_of_tokens_depend_on_the_seed_of_the_run_and_come_again():
    choose = partial(by_covariance, share=0.2, between=[-9.0, 9.0])
    experience = make_datamodule(make_roles(), seed=3).collect()
    assert experience.seed == 3
    advantage = GroupAdvantage("grpo", choose=choose)
    chosen = [advantage.compute(replace(experience, seed=seed)).is_chosen for seed in (3, 3, 4)]
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])
    resumed = make_datamodule(make_roles(), seed=3, advantage=advantage)
    resumed.load_state_dict(make_datamodule(make_roles(), seed=3).state_dict())
    assert torch.equal(advantage.compute(resumed.collect()).is_chosen, chosen[0])
