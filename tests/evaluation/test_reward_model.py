"""The report on a reward head: its numbers equal loops, and torchmetrics' bins equal bins of our own."""

import math
import random

import pytest
import torch
from torchmetrics.classification import BinaryCalibrationError

from lit_rlkv.data.demonstrations import preference_pair
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.evaluation.results import N_BINS
from lit_rlkv.evaluation.reward_model import report_margins, score_pairs
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.heads import ScalarHead
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.tasks import ChainSum

TOKENIZER, TASK = build_task_tokenizer(), ChainSum(n_terms=4)


def make_pairs(n=23):
    rng = random.Random(0)
    return [preference_pair(TASK, p, rng) for p in PromptSource(TASK, split="eval", seed=0).take(n)]


def make_reward_model():
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 32}
    backbone = prepare_backbone(tiny_qwen3(51, 0, 1, **size))
    head = ScalarHead(32)
    head.linear.weight.data.normal_(std=2.0)
    head.linear.bias.data.fill_(3.0)
    return backbone, head


def reward(backbone, head, prompt, completion):
    """Return the reward of one unpadded sequence by the model's plain forward."""
    input_ids = torch.tensor([[*TOKENIZER.encode(prompt + completion), TOKENIZER.eos_token_id]])
    mask = torch.ones_like(input_ids)
    output = backbone(input_ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
    return float(output.hidden_states[-1][0, -1] @ head.linear.weight[0] + head.linear.bias)


def binned(margins):
    """Comparisons (confidence, was right) of both orders, by place among the bins."""
    bins = [[] for _ in range(N_BINS)]
    for margin in margins:
        for confidence, is_right in (
            (1 / (1 + math.exp(-margin)), 1.0),
            (1 / (1 + math.exp(margin)), 0.0),
        ):
            bins[min(int(confidence * N_BINS), N_BINS - 1)].append((confidence, is_right))
    return bins


def mean(values):
    return sum(values) / len(values)


def gap(comparisons):
    return abs(mean([is_right for _, is_right in comparisons]) - mean([p for p, _ in comparisons]))


def test_margins_are_those_of_single_sequences_without_padding():
    backbone, head = make_reward_model()
    pairs = make_pairs()
    margins = [
        reward(backbone, head, pair.prompt, pair.chosen) - reward(backbone, head, pair.prompt, pair.rejected)
        for pair in pairs
    ]
    report = score_pairs(backbone, head, TOKENIZER, pairs, batch_size=5)
    n_right = sum(margin > 0 for margin in margins)
    assert 0 < n_right < 23
    assert (report.n_pairs, report.pair_accuracy) == (23, n_right / 23)
    assert report.margin_mean == pytest.approx(mean(margins), abs=1e-5)
    spread = math.sqrt(mean([(margin - mean(margins)) ** 2 for margin in margins]))
    assert report.margin_std == pytest.approx(spread, rel=1e-4)
    first_only = [reward(backbone, head, pair.prompt, pair.chosen) for pair in pairs]
    assert report.margin_mean != pytest.approx(mean(first_only), abs=0.1)


def test_the_batch_size_changes_nothing_and_progress_counts_pairs():
    model, pairs, scored = make_reward_model(), make_pairs(), []
    whole = score_pairs(*model, TOKENIZER, pairs, batch_size=100)
    parts = score_pairs(*model, TOKENIZER, pairs, batch_size=9, on_scored=scored.append)
    assert scored == [9, 9, 5]
    assert parts.pair_accuracy == whole.pair_accuracy
    assert parts.margin_mean == pytest.approx(whole.margin_mean, abs=1e-5)
    assert parts.calibration_error == pytest.approx(whole.calibration_error, abs=1e-4)


def test_calibration_equals_bins_of_our_own():
    margins = torch.randn(400, dtype=torch.float64) * 2.5 + 1
    report = report_margins(margins)
    bins = [comparisons for comparisons in binned(margins.tolist()) if comparisons]
    expected = sum(len(comparisons) * gap(comparisons) for comparisons in bins) / 800
    assert report.calibration_error == pytest.approx(expected, abs=1e-12)
    assert report.bin_counts == [len(comparisons) for comparisons in bins]
    assert report.bin_confidence == pytest.approx([mean([p for p, _ in found]) for found in bins])
    assert report.bin_accuracy == pytest.approx([mean([right for _, right in found]) for found in bins])
    shifted = [found[1:] for found in bins]
    assert report.bin_confidence != pytest.approx([mean([p for p, _ in found]) for found in shifted])


def test_full_confidence_belongs_to_the_last_bin():
    # σ(40) is 1 in float64. Above 0.9: confidences 1, 1, 1, 0.95, of which the third is wrong:
    # |3/4 − 3.95/4| = 0.2375 for half of the comparisons; below 0.1 it is the same.
    margins = torch.tensor([40.0, 40.0, -40.0, math.log(19)], dtype=torch.float64)
    report = report_margins(margins)
    assert report.calibration_error == pytest.approx(0.2375)
    assert report.bin_counts == [4, 4]
    # torchmetrics alone has a bin for 1 itself: (3 · |2/3 − 1| + |1 − 0.95|) / 8 + 0.2375 / 2
    plain = BinaryCalibrationError(N_BINS)(
        torch.cat([margins, -margins]).sigmoid(), torch.arange(8) < torch.tensor(4)
    )
    assert float(plain) == pytest.approx(0.25)


def test_a_tie_is_not_ranked_right():
    report = report_margins(torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64))
    assert report.pair_accuracy == 0.25
    assert report_margins(torch.zeros(3)).calibration_error == 0.0


def test_a_single_pair_has_a_report():
    report = report_margins(torch.tensor([2.0]))
    assert (report.n_pairs, report.margin_std, report.bin_counts) == (1, 0.0, [1, 1])


def test_pairs_without_finite_rewards_are_refused():
    with pytest.raises(ValueError, match="no pairs to score"):
        score_pairs(*make_reward_model(), TOKENIZER, [], batch_size=4)
    with pytest.raises(ValueError, match="2 of 3 pairs have rewards that are not finite"):
        report_margins(torch.tensor([1.0, math.nan, math.inf]))
