"""Random conversations: given tokens between sampled ones, as many as chance has it, and the own forward."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import PreTrainedModel

from lit_rlkv import prepare_backbone
from lit_rlkv.rollout.decoder import Decoder, DecodeSettings
from lit_rlkv.rollout.generate import as_rollout
from lit_rlkv.settings import Sampling
from lit_rlkv.types import Rollout
from tests.fuzz import explicit
from tests.fuzz.harness import cases, run_cases
from tests.fuzz.test_core import EXAMPLE, PAD, VOCAB, Case, compare, random_cases

Turn = tuple[int, tuple[int, ...]]
"""Steps of decoding, then given tokens of each row; 0 for a row that goes on."""


@dataclass(frozen=True, kw_only=True)
class Conversation(Case):
    """A random model, cache and batch of prompts, and turns after the first tokens."""

    turns: tuple[Turn, ...]

    def rollout(self, model: PreTrainedModel, **options: Any) -> Rollout:
        generator = torch.Generator().manual_seed(self.seed)
        width, n_rows = max(self.lens), len(self.lens)
        is_prompt = torch.arange(width) >= width - torch.tensor(self.lens)[:, None]
        input_ids = torch.randint(1, VOCAB, (n_rows, width), generator=generator)
        n_new = sum(steps + max(given) + 1 for steps, given in self.turns) + 1
        settings = DecodeSettings(n_new, torch.tensor([], dtype=torch.long), PAD, Sampling(self.temperature))
        options |= {"cuda_graph": None, "prefill_chunk": self.prefill_chunk}
        decoder = Decoder(model, self.spec, n_rows, width, settings, generator, **options)
        with torch.no_grad():
            decoder.prefill(range(n_rows), input_ids.masked_fill(~is_prompt, PAD), is_prompt)
            for n_steps, n_given in self.turns:
                for _ in range(n_steps):
                    decoder.step()
                if rows := [row for row, n in enumerate(n_given) if n > 0]:
                    n = torch.tensor([n_given[row] for row in rows])
                    is_token = torch.arange(int(n.max())) >= int(n.max()) - n[:, None]
                    decoder.feed(rows, torch.randint(1, VOCAB, is_token.shape, generator=generator), is_token)
        return as_rollout(decoder, decoder.read_rows(range(n_rows)), is_prompt)


@st.composite
def random_conversations(draw: Any) -> Conversation:
    case = draw(random_cases())
    given = st.tuples(*[st.integers(0, 9)] * len(case.lens))
    turns = draw(st.lists(st.tuples(st.integers(0, 8), given), min_size=1, max_size=5))
    values = {each.name: getattr(case, each.name) for each in fields(Case)}
    return Conversation(**values, turns=tuple(turns))


def check(case: Conversation) -> tuple[Rollout, explicit.Layers]:
    model = prepare_backbone(case.model())
    return compare(case, model, case.rollout(model))


@cases(20, 150)
def test_given_tokens_are_those_of_the_own_forward(n_cases: int):
    run_cases(n_cases, check, case=random_conversations())


def test_turns_that_end_one_column_later_are_caught_by_the_formulas():
    values = {each.name: getattr(EXAMPLE, each.name) for each in fields(Case)}
    case = Conversation(**values | {"prefill_chunk": 4}, turns=((5, (9, 6)), (3, (2, 8)), (6, (0, 0))))
    rollout, layers = check(case)
    later = replace(rollout, response_mask=rollout.response_mask.roll(1, dims=1))
    assert explicit.wrong_evictions(later, layers, case.spec, case.prefill_chunk)
