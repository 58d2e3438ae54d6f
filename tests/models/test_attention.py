from itertools import product

import pytest
import torch

from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.attention import Replay
from lit_rlkv.types import Record
from tests.models_zoo import FAMILIES, PAD, build, ragged_prompts, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_an_ordinary_call_gives_what_it_gave_before(family: str):
    input_ids, attention_mask = ragged_prompts()
    model = build(tiny_config(family))
    before = model(input_ids, attention_mask=attention_mask.long()).logits
    unmasked = model(input_ids).logits
    prepare_backbone(model)
    assert torch.equal(model(input_ids, attention_mask=attention_mask.long()).logits, before)
    assert torch.equal(model(input_ids).logits, unmasked)
    assert not torch.allclose(before, unmasked, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_generate_of_transformers_works_on(family: str):
    input_ids, attention_mask = ragged_prompts()
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD}
    model = build(tiny_config(family))
    before = model.generate(input_ids, attention_mask=attention_mask.long(), **settings)
    after = prepare_backbone(model).generate(input_ids, attention_mask=attention_mask.long(), **settings)
    assert torch.equal(after, before)


def test_attention_dropout_is_off_in_an_ordinary_call_too():
    input_ids, _ = ragged_prompts()
    model = build(tiny_config("llama", attention_dropout=0.5)).train()
    assert not torch.equal(model(input_ids).logits, model(input_ids).logits)
    prepare_backbone(model)
    assert torch.equal(model(input_ids).logits, model(input_ids).logits)


NAMES = ["record", "evicted_at", "sampling_masks", "codes", "expert_ids", "rounding"]


@pytest.mark.parametrize(("family", "name"), [*product(["llama"], NAMES), *product(FAMILIES, NAMES[:2])])
def test_a_record_that_a_call_would_ignore_is_refused(family: str, name: str):
    input_ids, _ = ragged_prompts()
    record = Record(torch.arange(1, input_ids.shape[1] + 1).int().expand(len(input_ids), 1, 1, -1))
    model = prepare_backbone(build(tiny_config(family)))
    with pytest.raises(ValueError, match=rf"takes no '{name}' .* a record by .*hidden_states"):
        model(input_ids, **{name: record.evicted_at})
    replayed = model(input_ids, replay=Replay(record), use_cache=False).logits
    assert not torch.allclose(replayed, model(input_ids).logits, atol=1e-2)
