import pytest
import torch

from lit_rlkv.models import prepare_backbone
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
