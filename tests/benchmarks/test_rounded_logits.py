import rounded_logits
import torch

from lit_rlkv.models.lm_head import LMHead


def test_every_precision_is_measured_with_and_without_rounded_logits(capsys):
    rounded_logits.main(["--fast"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    kinds = [("float32", "float32"), ("float16", "float32"), ("float16", "rounded")]
    kinds += [("bfloat16", "float32"), ("bfloat16", "rounded")]
    assert [tuple(line[:2]) for line in lines] == [kind for kind in kinds for _ in rounded_logits.CACHES]
    means = [float(line[-3]) for line in lines[::2]]
    assert means[0] < 1e-5 < means[1] < means[3]


def test_replay_in_bfloat16_is_closer_than_with_rounded_logits():
    model, cache = rounded_logits.make_model(torch.bfloat16, "cpu"), rounded_logits.CACHES["snapkv 24+8"]
    ours = rounded_logits.measure(model, cache, 8, 64)
    with rounded_logits.rounded_logits(model):
        rounded = rounded_logits.measure(model, cache, 8, 64)
    assert all(ours[name] < 0.9 * rounded[name] for name in ours)


def test_rounding_is_that_of_a_plain_linear_layer_and_ends_with_the_block():
    model = rounded_logits.make_model(torch.bfloat16, "cpu")
    head, hidden = model.get_output_embeddings(), torch.randn(3, rounded_logits.HIDDEN).bfloat16()
    assert isinstance(head, LMHead)
    with rounded_logits.rounded_logits(model):
        found = head(hidden)
    plain = torch.nn.functional.linear(hidden, head.weight)
    torch.testing.assert_close(found, plain, rtol=2**-7, atol=0)
    assert found.dtype == torch.bfloat16
    assert head(hidden).dtype == torch.float32
