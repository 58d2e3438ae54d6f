"""Problems drawn by their success rates."""

import json
from collections import Counter

import pytest
import torch

from lit_rlkv.config.schema import CurriculumConfig
from lit_rlkv.data.curriculum import Curriculum, success_weights
from lit_rlkv.data.prompts import PromptSource
from tests.data.test_prompts import Questions, prompts

NAMES = [f"question {n}" for n in range(8)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def source(n=300, decay=0.5, seed=0):
    curriculum = CurriculumConfig(decay=decay)
    return PromptSource(Questions(n), split="train", seed=seed, curriculum=curriculum)


def test_weights_match_hand_arithmetic():
    # p (1 − p) of 0, 1/4, 1/2 and 1, and 0.05
    rates = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    expected = [0.05, 0.2375, 0.3, 0.05]
    assert success_weights(rates, 0.05).tolist() == pytest.approx(expected)


def test_rates_match_hand_arithmetic():
    curriculum = Curriculum(NAMES, decay=0.75, floor=0.05)
    curriculum.update([(NAMES[0], 0.0), (NAMES[1], 1.0), (NAMES[1], 0.5)])
    # the first time the mean itself, 0 and 0.75; then 0.75 · 0 + 0.25 · 1
    curriculum.update([(NAMES[0], 1.0)])
    assert curriculum.state_dict() == [(0, 0.25), (1, 0.75)]
    assert curriculum.metrics() == {"curriculum/drawn": 2 / 8, "curriculum/success": 0.5}


def test_problems_are_drawn_by_their_weights():
    curriculum = Curriculum(NAMES, decay=0.0, floor=0.05)
    # Rates of the others stay at 1/2: their weight is six times as large.
    curriculum.update([(name, 1.0) for name in NAMES[:4]])
    drawn = Counter(curriculum.draw(1, generator(seed))[0] for seed in range(4000))
    # 1/28 and 6/28 of 4,000: 143 ± 12 and 857 ± 26
    for place in range(8):
        expected, sd = (143, 12) if place < 4 else (857, 26)
        assert abs(drawn[place] - expected) < 5 * sd


def test_a_draw_repeats_no_problem_unless_there_are_too_few():
    curriculum = Curriculum(NAMES, decay=0.5, floor=0.05)
    assert sorted(curriculum.draw(8, generator())) == [*range(8)]
    assert len(curriculum.draw(20, generator())) == 20


def test_equal_prompts_share_a_rate():
    curriculum = Curriculum(["a", "b", "a"], decay=0.5, floor=0.05)
    curriculum.update([("a", 1.0)])
    assert curriculum.state_dict() == [(0, 1.0), (2, 1.0)]


def test_two_ranks_together_draw_what_one_draws():
    one, ranks = source(), [source(), source()]
    for _ in range(3):
        whole = prompts(one.take(8))
        parts = [prompts(rank.take_places(8, range(number, 8, 2))) for number, rank in enumerate(ranks)]
        assert whole == [name for pair in zip(*parts, strict=True) for name in pair]
        for each in (one, *ranks):
            each.curriculum.update([(name, float("1" in name)) for name in whole])
    assert len({str(each.state_dict()) for each in (one, *ranks)}) == 1


def test_what_json_keeps_brings_back_the_same_draws():
    first = source()
    first.curriculum.update([(name, 1 / 3) for name in prompts(first.take(40))])
    state, again, other = json.loads(json.dumps(first.state_dict())), source(), source()
    again.load_state_dict(state)
    other.load_state_dict(state | {"rates": []})
    expected = prompts(first.take(40))
    assert prompts(again.take(40)) == expected
    assert prompts(other.take(40)) != expected  # twin: rates decide


def test_without_a_decay_problems_come_in_epochs():
    plain = PromptSource(Questions(300), split="train", seed=0)
    off = source(decay=None)
    assert off.curriculum is None
    assert prompts(off.take(40)) == prompts(plain.take(40))
    assert "rates" not in off.state_dict()
