"""OpenRollout: sequences that go on in the caches of their rows, and are replayed exactly."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lit_rlkv.diagnostics.evictions import affected_shares
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.models import prepare_backbone
from lit_rlkv.rollout import Rollout
from lit_rlkv.rollout.open_rollout import OpenRollout
from lit_rlkv.rollout.turns import turn_starts
from lit_rlkv.settings import Sampling
from tests.models.test_hybrids import hybrid
from tests.models_zoo import PAD, VOCAB, ragged_prompts, tiny_model
from tests.rollout.conversations import ENDS
from tests.rollouts import LONG, NOTICED, TOLERANCE, died, gap, moved, roll_out, spec_of
from tests.tiers import diagonal

N_MOST = 60
MAX_TURNS = 3


def answer(place: int, turn: int) -> list[int]:
    """Return 1 to 9 tokens; none to every fourth row, and to each once it has had its turns."""
    n = 1 + (3 * place + 5 * turn) % 9
    generator = torch.Generator().manual_seed(10 * place + turn)
    is_over = place % 4 == 0 or turn >= MAX_TURNS
    return [] if is_over else torch.randint(1, VOCAB, (n,), generator=generator).tolist()


def opened(
    model: PreTrainedModel | str, cache: CacheSpec | str, lens: tuple[int, ...] = LONG, **options: Any
) -> OpenRollout:
    """Two responses to each of four prompts, or others."""
    model = tiny_model(model) if isinstance(model, str) else model
    settings: dict[str, Any] = {
        "cache": spec_of(cache) if isinstance(cache, str) else cache,
        "max_new_tokens": N_MOST,
        "eos_token_id": ENDS,
        "pad_token_id": PAD,
        "sampling": Sampling(),
        "num_return_sequences": 2,
        "generator": torch.Generator().manual_seed(0),
    }
    return OpenRollout(model, *ragged_prompts(lens), **settings | options)


def talked(model: PreTrainedModel | str, cache: CacheSpec | str, **options: Any) -> Rollout:
    """All turns of `opened`; what is returned has been checked against what went in and out."""
    rollout = opened(model, cache, **options)
    sequences, n_prompt = [*rollout.sequences], [n for n in LONG for _ in range(2)]
    is_sampled = [[True] * (len(ids) - n) for ids, n in zip(sequences, n_prompt, strict=True)]
    for turn in range(1, MAX_TURNS):
        given = {place: answer(place, turn) for place in range(len(sequences))}
        n_most = [n + N_MOST - len(ids) for n, ids in zip(n_prompt, sequences, strict=True)]
        places = [place for place, ids in given.items() if ids and len(ids) <= n_most[place]]
        found = rollout.go_on([sequences[place] + given[place] for place in places])
        for place, ids in zip(places, found, strict=True):
            sequences[place] = sequences[place] + given[place] + ids
            is_sampled[place] += [False] * len(given[place]) + [True] * len(ids)
            assert bool(ids) == (len(given[place]) < n_most[place])
    closed = rollout.close(sequences)
    for place, ids in enumerate(sequences):
        is_token = closed.attention_mask[place]
        assert closed.input_ids[place, is_token].tolist() == ids
        assert closed.response_mask[place, is_token].tolist() == [False] * n_prompt[place] + is_sampled[place]
    assert turn_starts(closed.response_mask).sum(dim=1).tolist()[0] == 1
    assert turn_starts(closed.response_mask).sum(dim=1).max() == MAX_TURNS
    return closed


class Answers:
    """The same answers as environments of `generate`."""

    def __init__(self) -> None:
        self.turns: dict[int, int] = {}

    def ask(self, place: int, token_ids: object) -> "Future[None]":
        self.turns[place] = self.turns.get(place, 0) + 1
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def answer(self, place: int, answered: object, most_tokens: int) -> list[int]:
        ids = answer(place, self.turns[place])
        return ids if len(ids) <= most_tokens else []


POLICIES = ["dense", "h2o", "snapkv", "streaming", "random", "tova", "rkv"]
OPTIONS = [{"dtype": "int8"}, {"dtype": "int4"}, {"sampling": Sampling(top_k=8)}, {"sampling": Sampling(0.7)}]


@pytest.mark.parametrize(("policy", "options"), diagonal(POLICIES, OPTIONS))
def test_sequences_that_go_on_are_replayed_exactly(policy: str, options: dict[str, Any]):
    options = {**options}
    dtype = options.pop("dtype", None)
    rollout = talked("qwen3", spec_of(policy, dtype=dtype), **options)
    assert gap("qwen3", rollout) < TOLERANCE
    if policy != "dense":
        is_given = rollout.attention_mask & ~rollout.response_mask
        is_given[:, : max(LONG)] = False
        is_prompt = rollout.attention_mask & ~is_given & ~rollout.response_mask
        for mask in (is_prompt, rollout.response_mask, is_given):
            assert (died(rollout) & mask[:, None, None]).any()
        assert gap("qwen3", moved(rollout)) > NOTICED


@pytest.mark.parametrize("make", [partial(tiny_model, "gemma3"), partial(hybrid, "qwen3_5")])
def test_windows_and_states_go_on_too(make: Callable[[], PreTrainedModel]):
    model = prepare_backbone(make())
    assert gap(model, talked(model, "h2o")) < TOLERANCE


@pytest.mark.parametrize("policy", ["dense", "h2o", "snapkv"])
def test_greedy_rows_are_those_of_a_rollout_with_environments(policy: str):
    rollout = talked("qwen3", policy, sampling=Sampling(temperature=0.0))
    options = {"max_new_tokens": N_MOST, "eos_token_id": ENDS, "num_return_sequences": 2, "temperature": 0.0}
    expected = roll_out("qwen3", policy, LONG, conversations=Answers(), **options)
    for name in ("input_ids", "attention_mask", "response_mask", "evicted_at"):
        assert torch.equal(getattr(rollout, name), getattr(expected, name)), name


def test_rows_of_equal_tokens_stand_for_each_other_once_each():
    every = range(VOCAB)  # so that a turn is a token
    options = {"num_return_sequences": 64, "eos_token_id": every}
    rollout = opened("qwen3", "random", (9,), **options)
    first = rollout.sequences
    assert len({*map(tuple, first)}) < 48
    more = [[*ids, *[3] * (1 + place % 7)] for place, ids in enumerate(first) if place % 3 > 0]
    sequences = [ids + turn for ids, turn in zip(more, rollout.go_on(more), strict=True)]
    again = [[*ids, 4, 5] for ids in sequences[::2]]
    sequences[::2] = [ids + turn for ids, turn in zip(again, rollout.go_on(again), strict=True)]
    sequences += first[::3]
    sequences.reverse()
    closed = rollout.close(sequences)
    rows = zip(closed.input_ids, closed.attention_mask, strict=True)
    assert [ids[mask].tolist() for ids, mask in rows] == sequences
    assert gap("qwen3", closed) < TOLERANCE
    assert gap("qwen3", moved(closed)) > NOTICED


def test_a_sequence_of_no_row_or_without_room_is_refused():
    rollout = opened("qwen3", "h2o")
    first = rollout.sequences[0]
    for refused in ([[*first]], [[1, *first]], [[*first[:-1], first[-1] + 1, 3]], [[*first, 3]] * 2):
        with pytest.raises(ValueError, match=r"is that of no row; give its turns as they were sampled"):
            rollout.go_on(refused)
    with pytest.raises(ValueError, match="give fewer tokens, or raise max_new_tokens"):
        rollout.go_on([first + [3] * N_MOST])
    with pytest.raises(ValueError, match="is that of no row"):
        rollout.close([first[:-1]])


@pytest.mark.parametrize("reads", [False, True])
def test_a_graph_that_reads_weights_is_captured_anew_when_sequences_go_on(reads: bool):
    rollout = opened("qwen3", spec_of("h2o", policy_options={"value_norms": reads}))
    step, evict = rollout._decoder._step, rollout._decoder._evict
    step.graph = evict.graph = SimpleNamespace(replay=lambda: pytest.fail("it reads weights that have moved"))
    rollout._decoder.forget_graph()
    assert step.graph is None
    assert (evict.graph is None) == reads


def test_a_row_at_its_limit_ends_with_what_it_was_given():
    rollout = opened("qwen3", "h2o")
    first = rollout.sequences
    full = [[*ids, *[3] * (n + N_MOST - len(ids))] for ids, n in zip(first, (31, 31, 22, 22), strict=False)]
    assert rollout.go_on(full) == [[]] * 4
    closed = rollout.close([*full, *first[4:]])
    assert closed.input_ids.shape[1] == max(LONG) + N_MOST
    assert closed.attention_mask[:4].sum(dim=1).tolist() == [31 + N_MOST] * 2 + [22 + N_MOST] * 2
    assert not closed.response_mask[:, -1].any()
    assert gap("qwen3", closed) < TOLERANCE
    assert affected_shares(closed)["kv/affected_rows"] < 1  # what stands after a row's turns was not evicted
