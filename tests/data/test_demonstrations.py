"""Batches for supervised fine-tuning: demonstrations, and pairs where they are asked for."""

import pytest
import torch

from lit_rlkv.data.demonstrations import PreferenceDataModule
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import build_task_tokenizer, decode_completions
from lit_rlkv.tasks import ChainSum

TASK, TOKENIZER = ChainSum(n_terms=2, max_operand=3), build_task_tokenizer()


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


def test_a_restored_module_goes_on_where_it_was():
    datamodule = make_data()
    datamodule.next_batch()
    state = datamodule.state_dict()
    second, again = datamodule.next_batch(), make_data()
    again.load_state_dict(state)
    assert torch.equal(again.next_batch().rejected.input_ids, second.rejected.input_ids)
    assert not torch.equal(make_data().next_batch().chosen.input_ids, second.chosen.input_ids)


def test_each_loader_goes_on_where_the_last_ended():
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


@pytest.mark.parametrize("n_pairs", [-1, 17])
def test_a_number_of_pairs_that_no_batch_can_hold_is_refused(n_pairs):
    with pytest.raises(ValueError, match=f"n_pairs={n_pairs} must be between 0 and batch_size=16"):
        make_data(n_pairs=n_pairs)
