"""The record of what the sampler kept: packed bits, the ring, rows that come and go, captured steps."""

import pytest
import torch
from torch import Tensor

from lit_rlkv.rollout.mask_record import N_SLOTS, MaskRecorder, pack_bits, unpack_bits
from tests.models_zoo import VOCAB
from tests.rollouts import TOLERANCE, gap, roll_out


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 64, 101])
def test_bits_are_unpacked_as_they_were_packed(vocab: int):
    is_kept = torch.rand(6, vocab, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = pack_bits(is_kept)
    assert bits.shape == (6, -(-vocab // 8))
    unpacked = unpack_bits(bits)
    assert torch.equal(unpacked[:, :vocab], is_kept)
    assert not unpacked[:, vocab:].any()


class Steps:
    """Random sets for some rows at each step, written to a record and kept as lists."""

    def __init__(self, n_rows: int, as_bits: bool) -> None:
        self.recorder = MaskRecorder(n_rows, torch.device("cpu"))
        self.generator = torch.Generator().manual_seed(0)
        self.as_bits = as_bits
        self.expected: list[list[list[int]]] = [[] for _ in range(n_rows)]

    def step(self, rows: list[int], is_running: list[bool]) -> None:
        is_kept = torch.rand(len(rows), 20, generator=self.generator) < 0.3
        is_kept[:, 4] = True
        kept: Tensor = is_kept
        if not self.as_bits:
            kept = torch.where(is_kept, torch.arange(20), -1).int()
        self.recorder.begin_step()
        self.recorder.sampled(torch.tensor(rows), kept, torch.tensor(is_running))
        for row, runs, mask in zip(rows, is_running, is_kept, strict=True):
            if runs:
                self.expected[row].append(mask.nonzero()[:, 0].tolist())

    def found(self, row: int) -> list[list[int]]:
        ((counts, ids),) = self.recorder.read([row])
        return [part.tolist() for part in torch.split(ids, counts.tolist())]


@pytest.mark.parametrize("as_bits", [True, False], ids=["bits", "ids"])
@pytest.mark.parametrize("n_steps", [1, N_SLOTS, 2 * N_SLOTS + 3])
def test_every_row_has_its_own_sets_in_the_order_of_its_steps(as_bits: bool, n_steps: int):
    steps = Steps(3, as_bits)
    for number in range(n_steps):
        steps.step([0, 1, 2], [True, number % 3 > 0 or n_steps == 1, True])
    assert [steps.found(row) for row in range(3)] == steps.expected
    assert steps.found(0) != steps.expected[2]


@pytest.mark.parametrize("as_bits", [True, False], ids=["bits", "ids"])
def test_a_row_that_starts_again_forgets_and_rows_are_numbered_anew(as_bits: bool):
    steps = Steps(3, as_bits)
    for _ in range(5):
        steps.step([0, 1, 2], [True] * 3)
    steps.recorder.begin([1])
    steps.expected[1] = []
    steps.step([1], [True])
    steps.step([0, 1, 2], [True] * 3)
    assert [steps.found(row) for row in range(3)] == steps.expected
    steps.step([0, 1, 2], [True] * 3)
    steps.recorder.keep([2, 0])
    steps.expected = [steps.expected[2], steps.expected[0]]
    steps.step([0, 1], [True] * 2)
    assert [steps.found(row) for row in range(2)] == steps.expected


def test_rows_of_different_lengths_become_one_record():
    rows = [
        (torch.tensor([2, 1], dtype=torch.int32), torch.tensor([5, 3, 7], dtype=torch.int32)),
        (torch.tensor([1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)),
    ]
    is_response = torch.tensor([[False, True, True, False], [False, False, True, False]])
    recorder = MaskRecorder(2, torch.device("cpu"))
    masks = recorder.finish(rows, torch.ones_like(is_response), is_response)
    assert masks.counts.tolist() == [[0, 2, 1, 0], [0, 0, 1, 0]]
    assert masks.token_ids.tolist() == [5, 3, 7, 9]


@pytest.mark.parametrize("options", [{"top_k": 6}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8, "min_p": 0.1}])
def test_each_response_token_has_a_set_with_that_token(options: dict[str, float]):
    rollout = roll_out(max_new_tokens=N_SLOTS + 9, eos_token_id=[3, 5, 11], max_rows=3, **options)
    masks = rollout.record.sampling_masks
    assert masks is not None
    assert torch.equal(masks.counts > 0, rollout.response_mask)
    counts, tokens = masks.counts[rollout.response_mask], rollout.input_ids[rollout.response_mask]
    for token, ids in zip(tokens, torch.split(masks.token_ids, counts.tolist()), strict=True):
        assert token in ids
        assert len(ids.unique()) == len(ids)
    assert int(masks.counts.max()) < VOCAB
    assert gap("llama", rollout) < TOLERANCE


def test_greedy_decoding_and_the_whole_vocabulary_have_no_record():
    assert roll_out(temperature=0.0, top_k=4).record.sampling_masks is None
    assert roll_out().record.sampling_masks is None


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"top_p must be a number above 0 and at most 1, got 0 .*1: all"):
        roll_out(top_p=0)
