"""Demonstrations and preference pairs as batches."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from lit_rlkv.data.demonstrations import (
    PreferenceDataModule,
    SFTBatch,
    dense_hidden,
    encode_completions,
    preference_pair,
)
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import build_task_tokenizer, decode_completions
from lit_rlkv.distributed.ranks import SINGLE_PROCESS
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.modules.hydra_sft import HydraSFT
from lit_rlkv.tasks import ChainSum
from lit_rlkv.types import Message, Problem
from tests.evaluation.test_evaluator import Together

TOKENIZER = build_task_tokenizer()
PROMPTS = ["1+2=", "9="]
T, F = True, False


class Forgiving(ChainSum):
    """A task whose verifier is broken: everything is right."""

    def score(self, problem, completion):
        return 1.0


class Taste:
    """A task without a verifier: the last letter of the alphabet was preferred to what `worse` says."""

    is_verifiable = False

    def __init__(self, worse):
        self.worse = worse

    def sample(self, rng):
        return Problem((Message("user", "a or z?"),), "z", "z")

    def score(self, problem, completion):
        return 0.5

    def corrupt(self, problem, rng):
        return self.worse


def test_a_pair_is_the_solution_and_a_corruption():
    problem = Problem("7+3=", "7,10", "10")
    pair = preference_pair(ChainSum(), problem, random.Random(0))
    assert (pair.prompt, pair.chosen) == ("7+3=", "7,10")
    assert ChainSum().score(problem, pair.rejected) == 0.0
    assert preference_pair(ChainSum(), problem, random.Random(0)) == pair


def test_a_pair_that_the_verifier_cannot_tell_apart_is_refused():
    with pytest.raises(ValueError, match="Forgiving must score the two sides"):
        preference_pair(Forgiving(), Problem("7+3=", "7,10", "10"), random.Random(0))


def test_without_a_verifier_the_sides_of_a_pair_need_only_differ():
    rng = random.Random(0)
    pair = preference_pair(Taste("a"), Taste("a").sample(rng), rng)
    assert (pair.chosen, pair.rejected) == ("z", "a")
    assert pair.prompt == (Message("user", "a or z?"),)
    with pytest.raises(ValueError, match=r"the sides of .* must differ; fix corrupt of Taste"):
        preference_pair(Taste("z"), Taste("z").sample(rng), rng)


def test_completions_start_in_one_column():
    batch = encode_completions(TOKENIZER, PROMPTS, ["14", ""])
    # Ids: digit d is d + 2, pad 0, eos 1. Completions start at column 4, the longest is "14<eos>".
    plus, equals = TOKENIZER.convert_tokens_to_ids(["+", "="])
    assert batch.input_ids.tolist() == [[3, plus, 4, equals, 3, 6, 1], [0, 0, 11, equals, 1, 0, 0]]
    assert batch.attention_mask.tolist() == [[T, T, T, T, T, T, T], [F, F, T, T, T, F, F]]
    assert batch.is_target.tolist() == [[F, F, F, F, T, T, T], [F, F, F, F, T, F, F]]


def test_observations_between_worked_turns_are_read_and_not_imitated():
    batch = encode_completions(TOKENIZER, ["1=", "2="], ["9", "8"], [("3*2", "6;", "4", "5;"), ()])
    said, seen = [
        "".join(TOKENIZER.decode(row[mask]) for row, mask in zip(batch.input_ids[:1], masks[:1], strict=True))
        for masks in (batch.is_target, batch.attention_mask & ~batch.is_target)
    ]
    assert said == "3*2<eos>4<eos>9<eos>"
    assert seen == "1=6;5;"
    assert TOKENIZER.decode(batch.input_ids[0]) == "1=3*2<eos>6;4<eos>5;9<eos>"
    assert TOKENIZER.decode(batch.input_ids[1][batch.is_target[1]]) == "8<eos>"
    assert batch.attention_mask.sum(dim=1).tolist() == [2 + 4 + 2 + 2 + 2 + 2, 2 + 2]


def test_the_end_of_sequence_is_a_target_even_if_it_is_the_padding():
    tokenizer = build_task_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    batch = encode_completions(tokenizer, ["1=", "12="], ["1", "1,2"])
    assert batch.input_ids[0].tolist() == [1, 3, TOKENIZER.convert_tokens_to_ids("="), 3, 1, 1, 1]
    assert batch.attention_mask[0].tolist() == [F, T, T, T, T, F, F]
    assert batch.is_target[0].tolist() == [F, F, F, T, T, F, F]


def test_hidden_states_do_not_depend_on_the_padding():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 32}
    backbone = prepare_backbone(tiny_qwen3(51, 0, 1, **size))
    with torch.no_grad():
        batch = encode_completions(TOKENIZER, PROMPTS, ["14", ""])
        padded = dense_hidden(backbone, batch)[1, 2:5]
        alone = dense_hidden(backbone, encode_completions(TOKENIZER, PROMPTS[1:], [""]))[0]
        seen = replace(batch, attention_mask=torch.ones_like(batch.attention_mask))
        assert torch.allclose(padded, alone, atol=1e-5)
        assert not torch.allclose(dense_hidden(backbone, seen)[1, 2:5], alone, atol=1e-2)


def test_the_length_of_a_batch_excludes_padding():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 32}
    backbone = prepare_backbone(tiny_qwen3(51, 0, 1, **size))
    backbone.config.max_position_embeddings = 8
    prompts, completions = ["1+2=", "9="], ["14", "1234"]  # 7 tokens in each row, in 9 columns
    batch = encode_completions(TOKENIZER, prompts, completions)
    with torch.no_grad():
        hidden = dense_hidden(backbone, batch)
        alone = [
            dense_hidden(backbone, encode_completions(TOKENIZER, prompts[n : n + 1], completions[n : n + 1]))[
                0
            ]
            for n in range(2)
        ]
    assert batch.input_ids.shape == (2, 9)
    assert torch.allclose(hidden[batch.attention_mask], torch.cat(alone), atol=1e-5)
    with pytest.raises(ValueError, match=r"may reach 9 tokens, but .* has positions for 8"):
        dense_hidden(backbone, encode_completions(TOKENIZER, ["1+2=", "9="], ["1234", "1"]))


TASK = ChainSum(n_terms=2, max_operand=3)


def make_data(**options):
    options = {"batch_size": 16, "n_pairs": 8, "steps_per_loader": 10, "seed": 0} | options
    return PreferenceDataModule(TASK, PromptSource(TASK, split="train", seed=0), TOKENIZER, **options)


def texts(side):
    return decode_completions(TOKENIZER, side.input_ids, side.is_target)


def test_pairs_share_their_prompt_and_batches_differ():
    datamodule = make_data()
    first, second = datamodule.next_batch(), datamodule.next_batch()
    assert not torch.equal(first.chosen.input_ids, second.chosen.input_ids)
    n_prompt = int((~first.chosen.is_target[0] & first.chosen.attention_mask[0]).sum())
    assert torch.equal(first.chosen.input_ids[:8, :n_prompt], first.rejected.input_ids[:, :n_prompt])


def test_the_chosen_side_is_right_and_the_rejected_side_wrong():
    problems = PromptSource(TASK, split="train", seed=0).take(16)
    batch = make_data().next_batch()
    assert [TASK.score(*pair) for pair in zip(problems, texts(batch.chosen), strict=True)] == [1.0] * 16
    assert [TASK.score(*pair) for pair in zip(problems[:8], texts(batch.rejected), strict=True)] == [0.0] * 8


def test_a_restored_module_continues_its_batches():
    datamodule = make_data()
    datamodule.next_batch()
    state = datamodule.state_dict()
    second, again = datamodule.next_batch(), make_data()
    again.load_state_dict(state)
    assert torch.equal(again.next_batch().rejected.input_ids, second.rejected.input_ids)
    assert not torch.equal(make_data().next_batch().chosen.input_ids, second.chosen.input_ids)


def test_each_loader_continues_after_the_last():
    whole = [batch.chosen.input_ids for batch in make_data(steps_per_loader=4).train_dataloader()]
    datamodule = make_data(steps_per_loader=2)
    parts = [batch.chosen.input_ids for _ in range(2) for batch in datamodule.train_dataloader()]
    assert len(parts) == 4
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_demonstrations_are_the_same_with_and_without_pairs():
    plain, paired = make_data(n_pairs=0), make_data()
    for _ in range(2):
        without, with_pairs = plain.next_batch(), paired.next_batch()
        assert without.rejected is None
        assert torch.equal(without.chosen.input_ids, with_pairs.chosen.input_ids)
        assert without.to("cpu").rejected is None


RAGGED = ChainSum(n_terms=4, max_operand=99)


def ragged_data(**options) -> PreferenceDataModule:
    options = {"batch_size": 16, "n_pairs": 8, "steps_per_loader": 1, "seed": 0} | options
    source = PromptSource(RAGGED, split="train", seed=0)
    return PreferenceDataModule(RAGGED, source, TOKENIZER, **options)


def sizes_of(batch: SFTBatch) -> tuple[int, int]:
    """Return the tokens of a micro-batch, padding included, and its units: rows or pairs."""
    sides = [batch.chosen, *([] if batch.rejected is None else [batch.rejected])]
    return sum(side.input_ids.numel() for side in sides), len(batch.chosen.input_ids)


def make_module(lm_weight: float, reward_weight: float) -> HydraSFT:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 32}
    module = HydraSFT(
        prepare_backbone(tiny_qwen3(51, 0, 1, **size)),
        lambda parameters: torch.optim.AdamW(parameters),
        lm_weight=lm_weight,
        reward_weight=reward_weight,
        n_steps=1,
        n_warmup_steps=0,
    )
    if module.reward_head is not None:
        module.reward_head.linear.weight.data.normal_()
    return module


def learned(module: HydraSFT, batches: list[SFTBatch]) -> tuple[dict[str, float], torch.Tensor]:
    """Return the sums of loss and metrics over micro-batches, and the gradients of all parameters."""
    module.zero_grad()
    sums: dict[str, float] = {}
    for batch in batches:
        outputs = module.training_step(batch, 0)
        outputs["loss"].backward()
        for name, value in outputs.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach())
    return sums, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("lm_weight", "reward_weight", "n_pairs"),
    # one head, both heads on rows of which half have pairs, and the reward head alone
    [(1.0, 0.0, 0), (1.0, 0.0, 8), (1.0, 0.5, 8), (1.0, 0.5, 16), (0.0, 1.0, 16), (0.0, 1.0, 8)],
)
@pytest.mark.parametrize("tokens_per_pass", [1, 160])
def test_micro_batches_change_neither_loss_nor_metrics_nor_gradients(
    lm_weight, reward_weight, n_pairs, tokens_per_pass
):
    (whole,) = ragged_data(n_pairs=n_pairs).train_dataloader()
    parts = list(ragged_data(n_pairs=n_pairs, tokens_per_pass=tokens_per_pass).train_dataloader())
    assert len(parts) >= 3
    assert [part.ends_step for part in parts] == [False] * (len(parts) - 1) + [True]
    for part in parts:
        n_tokens, n_units = sizes_of(part)
        assert n_tokens <= tokens_per_pass or n_units == 1
    assert sorted(text for part in parts for text in texts(part.chosen)) == sorted(texts(whole.chosen))

    module = make_module(lm_weight, reward_weight)
    expected, gradient = learned(module, [whole])
    found, in_parts = learned(module, parts)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert (in_parts - gradient).abs().max() < 1e-5 * gradient.abs().max()
    # the control: each micro-batch divides by its own counts
    alone = [
        replace(
            part,
            n_targets=int(part.chosen.is_target.sum()),
            n_pairs=0 if part.n_pairs == 0 else 1 if part.rejected is None else len(part.rejected.input_ids),
        )
        for part in parts
    ]
    wrong, wrong_gradient = learned(module, alone)
    assert wrong["loss"] != pytest.approx(expected["loss"], rel=1e-2)
    assert (wrong_gradient - gradient).abs().max() > 1e-2 * gradient.abs().max()


def test_a_step_that_fits_is_not_cut():
    data = ragged_data(tokens_per_pass=10_000)
    step = data.next_batch()
    assert [part is step for part in data.micro_batches(step)] == [True]
    data.tokens_per_pass = sizes_of(step)[0] - 1
    assert len(list(data.micro_batches(step))) > 1


def test_micro_batches_know_how_many_steps_of_the_iteration_are_done():
    batches = list(ragged_data(tokens_per_pass=40).train_dataloader())
    n_steps = sum(batch.ends_step for batch in batches)
    assert {batch.n_steps for batch in batches} == {n_steps}
    done = [batch.n_steps_done for batch in batches]
    assert done == sorted(set(done))
    assert len(done) > n_steps
    assert [batch.n_steps_done for batch in batches if batch.ends_step] == [*range(1, n_steps + 1)]


def test_ranks_have_as_many_micro_batches_with_pairs_in_the_same_ones():
    def step_with(completion: str) -> SFTBatch:
        completions = [completion[: 1 + row % len(completion)] for row in range(8)]
        chosen = encode_completions(TOKENIZER, ["1+2="] * 8, completions)
        rejected = encode_completions(TOKENIZER, ["1+2="] * 4, completions[4:])
        return SFTBatch(chosen, rejected, n_targets=1, n_pairs=8)

    steps = [step_with("123456789" * 2), step_with("12")]
    brought = [[], []]
    data = [ragged_data(ranks=Together(rank, brought), tokens_per_pass=40) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda one, step: list(one.micro_batches(step)), data, steps)
    assert [part.rejected is None for part in first] == [part.rejected is None for part in second]
    assert [part.ends_step for part in second] == [False] * (len(second) - 1) + [True]
    for parts, step in zip((first, second), steps, strict=True):
        assert sum(len(part.chosen.input_ids) for part in parts) == 8
        assert sorted(text for part in parts for text in texts(part.chosen)) == sorted(texts(step.chosen))
        assert all(sizes_of(part)[0] <= 40 or sizes_of(part)[1] == 1 for part in parts)
    # alone, the rank with short rows has fewer
    for one in data:
        one.ranks = SINGLE_PROCESS
    alone = [len(list(one.micro_batches(step))) for one, step in zip(data, steps, strict=True)]
    assert alone[1] < alone[0] == len(first)
