import pytest
import torch

from lit_rlkv.kvcache.seeded_draws import seeded_draws
from lit_rlkv.types import NEVER
from tests.rollouts import roll_out, spec_of

SEEDED = spec_of("random", policy_options={"seed": 7})


def draws(seed=7, layer=0, now=4000, n=4000):
    return seeded_draws(seed, layer, torch.arange(n).expand(1, 2, n), torch.tensor([now]))[0]


def test_draws_are_uniform_and_independent_of_those_of_another_place():
    one, other_head = draws()
    assert one.min() >= 0
    assert one.max() < 1
    assert torch.histc(one, 10, 0, 1).sub(400).abs().max() < 80  # four standard deviations
    swapped = draws(seed=6, layer=1)[0]  # seed and layer mixed alike: 7 ^ 0 = 6 ^ 1
    for other in (other_head, draws(seed=8)[0], draws(layer=1)[0], draws(now=4001)[0], one.roll(1), swapped):
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.07


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_row_loses_the_same_keys_alone_as_beside_others(family):
    together, alone = (roll_out(family, SEEDED, lens=lens) for lens in [(15, 11, 6), (6,)])
    n_padding = together.evicted_at.shape[-1] - alone.evicted_at.shape[-1]
    times = together.evicted_at[2, :, :, n_padding:]
    assert torch.equal(torch.where(times == NEVER, times, times - n_padding), alone.evicted_at[0])
    assert (times != NEVER).any()


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5])
def test_a_seed_is_a_whole_number_of_32_bits(seed):
    with pytest.raises(ValueError, match="seed must be"):
        spec_of("random", policy_options={"seed": seed}).make_policy()
