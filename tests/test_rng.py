import torch

from lit_rlkv.rng import derive_seed, stream


def test_seeds_are_the_same_on_every_machine():
    # Other values here are other random numbers in every run, and runs that no longer resume as they were.
    assert derive_seed(0, "sample", 3, 1) == 6930171997090759306
    assert derive_seed(7, "a") == 4251682656775808862


def test_every_name_and_their_order_matter():
    seeds = [
        derive_seed(*names) for names in [(0, "a", 1), (0, "a", 2), (1, "a", 1), (0, "b", 1), (0, 1, "a")]
    ]
    assert len({*seeds, derive_seed(0, "a", "1")}) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stream_is_of_its_seed():
    first, second, other = (stream(0, "x", number) for number in (1, 1, 2))
    drawn = torch.rand(8, generator=first)
    assert torch.equal(drawn, torch.rand(8, generator=second))
    assert not torch.equal(drawn, torch.rand(8, generator=other))
