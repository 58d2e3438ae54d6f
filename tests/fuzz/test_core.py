"""Random models, caches and prompts: the sampler's log-probs, the replayed ones and those of an own forward.

Gradients too, and every eviction by the published formula of its policy.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from lit_rlkv import generate, prepare_backbone, replay_logps
from lit_rlkv.kernels.quantization import KV_DTYPES
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policies import UNTRAINED
from lit_rlkv.types import Rollout
from tests.fuzz import explicit
from tests.fuzz.harness import cases, run_cases
from tests.rollouts import moved

VOCAB, PAD = 48, 0
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": True},
    "mistral": {"sliding_window": None},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {},
    "cohere": {},
    "starcoder2": {"sliding_window": None},
    "arcee": {},
    "gemma": {"head_dim": True},
    "gemma2": {"head_dim": True, "attn_logit_softcapping": 0.5, "sliding_window": 4096},
    "gemma3_text": {"head_dim": True, "sliding_window": 4096},
}
"""Names of `CONFIG_MAPPING`; with `head_dim` the width of a head is free, and the sliding window is off."""


@dataclass(frozen=True)
class Sampling:
    """One random cache and batch of prompts."""

    spec: CacheSpec
    lens: tuple[int, ...]
    max_new_tokens: int
    n_samples: int
    max_rows: int | None
    temperature: float
    n_eos: int
    seed: int
    prefill_chunk: int | None

    def exact(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model, in float64 if keys are rounded, where no float error moves one to another code."""
        return model if self.spec.dtype is None else model.double()

    def rollout(self, model: PreTrainedModel, **options: Any) -> Rollout:
        generator = torch.Generator().manual_seed(self.seed)
        width = max(self.lens)
        is_prompt = torch.arange(width) >= width - torch.tensor(self.lens)[:, None]
        input_ids = torch.randint(1, VOCAB, (len(self.lens), width), generator=generator)
        return generate(
            model,
            input_ids.masked_fill(~is_prompt, PAD),
            is_prompt,
            cache=self.spec,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=list(range(1, 1 + self.n_eos)) or None,
            pad_token_id=PAD,
            temperature=self.temperature,
            num_return_sequences=self.n_samples,
            max_rows=self.max_rows,
            generator=generator,
            prefill_chunk=self.prefill_chunk,
            **options,
        )


def random_sampling(draw: Any) -> dict[str, Any]:
    """Draw the fields of `Sampling`."""
    sink, window = draw(st.integers(0, 3)), draw(st.integers(1, 6))
    n_samples = draw(st.integers(1, 3))
    return {
        "spec": CacheSpec(
            # The own forward knows no frequencies of RoPE, and some families have none.
            policy=draw(st.sampled_from(sorted({*UNTRAINED} - {"triattention"}))),
            budget=sink + window + draw(st.integers(1, 10)),
            interval=draw(st.integers(1, 7)),
            sink=sink,
            window=window,
            protect_prompt=draw(st.booleans()),
            dtype=draw(st.sampled_from([None, *KV_DTYPES])),
        ),
        "lens": tuple(draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))),
        "max_new_tokens": draw(st.integers(1, 24)),
        "n_samples": n_samples,
        "max_rows": draw(st.none() | st.integers(n_samples, 4)),
        "temperature": draw(st.sampled_from([1.0, 0.7, 1.5])),
        "n_eos": draw(st.sampled_from([0, 0, 2])),
        "seed": draw(st.integers(0, 2**31)),
        "prefill_chunk": draw(st.none() | st.integers(1, 12)),
    }


SAMPLING = {
    "spec": CacheSpec("h2o", budget=8, interval=3, sink=1, window=3),
    "lens": (11, 6),
    "max_new_tokens": 20,
    "n_samples": 2,
    "max_rows": None,
    "temperature": 1.0,
    "n_eos": 0,
    "seed": 0,
    "prefill_chunk": None,
}


@dataclass(frozen=True, kw_only=True)
class Case(Sampling):
    """One random model, cache and batch of prompts."""

    family: str
    n_layers: int
    n_kv_heads: int
    n_groups: int
    head_dim: int

    def model(self) -> PreTrainedModel:
        """A new model with sharp attention, so that a wrong mask shows."""
        n_heads = self.n_kv_heads * self.n_groups
        given = dict(FAMILIES[self.family])
        is_free = given.pop("head_dim", False)
        sizes: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": n_heads * (6 if is_free else self.head_dim),
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "intermediate_size": 32,
            "max_position_embeddings": 256,
            "pad_token_id": None,  # whose embedding would be 0, and so its keys
            "bos_token_id": None,
            "eos_token_id": None,
            **({"head_dim": self.head_dim} if is_free else {}),
            **given,
        }
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[self.family](**sizes)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
        return self.exact(model)


@st.composite
def random_cases(draw: Any) -> Case:
    return Case(
        family=draw(st.sampled_from(sorted(FAMILIES))),
        n_layers=draw(st.integers(1, 3)),
        n_kv_heads=draw(st.sampled_from([1, 2, 3])),
        n_groups=draw(st.sampled_from([1, 2, 4, 8])),
        head_dim=draw(st.sampled_from([4, 6, 8, 10, 14])),  # RoPE needs an even width
        **random_sampling(draw),
    )


def check(case: Case, **options: Any) -> tuple[Rollout, explicit.Layers]:
    """Compare sampler, replay and own forward, values and gradients, and every eviction."""
    model = prepare_backbone(case.model())
    rollout = case.rollout(model, **options)
    return compare(case, model, rollout)


def compare(
    case: Any,
    model: PreTrainedModel,
    rollout: Rollout,
    rows: Mapping[int, int] | None = None,
    without: Collection[int] = (),
) -> tuple[Rollout, explicit.Layers]:
    """Compare a rollout of a model of `case` with its replay and the own forward.

    Args:
        rows: row of the record for each layer that attends; None: its own number.
        without: layers with a window, whose evictions are not the policy's.
    """
    weight = torch.randn(rollout.input_ids.shape, generator=torch.Generator().manual_seed(1))
    replayed = replay_logps(model, rollout, temperature=case.temperature)
    (replayed * weight).sum().backward()
    own_model = case.model()
    own, layers = explicit.log_probs(own_model, rollout, case.temperature, rows)
    (own * weight).sum().backward()
    assert (replayed - rollout.rollout_logps).abs().max() < 1e-4
    assert (own - rollout.rollout_logps).abs().max() < 1e-4
    wrong = explicit.gradient_errors(model, own_model)
    assert max(wrong.values()) <= 1e-3, wrong
    assert explicit.wrong_evictions(rollout, layers, case.spec, case.prefill_chunk, without=without) == []
    return rollout, layers


@cases(25, 250)
def test_sampler_replay_and_an_own_forward_agree(n_cases: int):
    run_cases(n_cases, check, case=random_cases())


EXAMPLE = Case(family="llama", n_layers=2, n_kv_heads=2, n_groups=2, head_dim=8, **SAMPLING)


def test_a_record_shifted_by_one_column_is_caught_by_the_own_forward():
    rollout, _ = check(EXAMPLE)
    own, _ = explicit.log_probs(EXAMPLE.model(), moved(rollout), 1.0)
    assert (own - rollout.rollout_logps).abs().max() > 1e-2


def test_a_record_of_another_policy_is_caught_by_the_formulas():
    rollout, layers = check(EXAMPLE)
    other = replace(EXAMPLE.spec, policy="tova")
    assert len(explicit.wrong_evictions(rollout, layers, other)) > 10


def test_a_record_whose_heads_are_swapped_is_caught_by_the_formulas():
    case = replace(EXAMPLE, spec=replace(EXAMPLE.spec, policy="keydiff"))
    rollout, layers = check(case)
    swapped = rollout.with_record(evicted_at=rollout.evicted_at.flip(2))
    assert len(explicit.wrong_evictions(swapped, layers, case.spec)) > 10


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_learner_that_does_not_round_is_caught_by_the_own_forward(dtype: str):
    case = replace(EXAMPLE, spec=replace(EXAMPLE.spec, dtype=dtype))
    rollout, _ = check(case)
    own, _ = explicit.log_probs(case.model(), rollout.with_record(codes=None), 1.0)
    assert (own - rollout.rollout_logps).abs().max() > 2e-3


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "tova"])
def test_evictions_of_another_length_of_chunk_are_caught_by_the_formulas(policy: str):
    spec = replace(EXAMPLE.spec, policy=policy)
    case = replace(EXAMPLE, lens=(23, 17), spec=spec, prefill_chunk=5)
    rollout, layers = check(case)
    for other in (None, 4, 6):
        assert explicit.wrong_evictions(rollout, layers, spec, other)
