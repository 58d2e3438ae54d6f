"""The scorer of evictions learns the order of the model's own later attention, and nothing else learns."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from lit_rlkv.data.demonstrations import PreferenceDataModule, dense_hidden
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.kvcache import CacheSpec
from lit_rlkv.kvcache.policies import Learned
from lit_rlkv.models.future_attention import future_attention
from lit_rlkv.models.kv_scorer import add_kv_scorer
from lit_rlkv.modules.eviction_start import EvictionStart
from lit_rlkv.tasks import ChainSum
from tests.hand_built import make_model, train_here

SPEC = CacheSpec("learned", budget=7, interval=2, sink=1, window=2)
PROTECTED = replace(SPEC, budget=4, protect_prompt=True)


def make_run(spec=SPEC, n_steps=60):
    backbone = make_model()
    torch.manual_seed(1)
    scorer = add_kv_scorer(backbone, Learned())
    del backbone.kv_scorer

    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)

    module = EvictionStart(
        backbone, scorer, make_optimizer, cache=spec, lr_scale=20, n_steps=n_steps, n_warmup_steps=5
    )
    return module, data(spec="train")


def data(spec):
    task = ChainSum(n_terms=3, max_operand=9)
    source = PromptSource(task, split=spec, seed=0)
    options = {"batch_size": 16, "n_pairs": 0, "steps_per_loader": 10, "seed": 0}
    return PreferenceDataModule(task, source, build_task_tokenizer(), **options)


def of_layers(module, rows):
    """The inputs of each layer's attention."""
    found = []
    with torch.no_grad():
        dense_hidden(module.backbone, rows, probe=found.append)
    return found


def scores_at(module, inputs, now):
    """Scores [batch, kv_head, key] at one column, as the policy computes them."""
    age = (now - torch.arange(inputs.key.shape[2])).clamp(min=0).float().log1p()
    return module.scorer.layer(inputs.layer)(inputs.key, inputs.value, age[None, None, None])[:, :, 0]


def expected_loss(module, batch, spec):
    """The loss by its definition: each key that leaves the window beside a teacher's heap of earlier ones."""
    rows, w, total = batch.chosen, spec.window + 1, 0.0
    layers = of_layers(module, rows)
    for inputs in layers:
        target = future_attention(inputs, rows.attention_mask, w)
        scores = {}
        for row in range(len(rows.input_ids)):
            own = rows.attention_mask[row].nonzero().flatten().tolist()
            first = own[0] + spec.sink
            if spec.protect_prompt:
                first = max(first, int(rows.is_target[row].nonzero()[0]))
            n_kept = spec.budget - spec.window - (0 if spec.protect_prompt else spec.sink)
            for head in range(2):
                heap = []
                for t in range(first, own[-1] + 1 - w):
                    m = target[row, head]
                    if len(heap) >= n_kept:
                        edge = sorted(heap, key=lambda j: -float(m[j]))[n_kept - 1]
                        now = t + w
                        if now not in scores:
                            scores[now] = scores_at(module, inputs, now)
                        y = 1 if m[t] > m[edge] else -1
                        r = scores[now][row, head]
                        total += float(F.softplus(-y * (r[t] - r[edge])).detach()) / 2
                    heap.append(t)
    return total / len(layers) / batch.n_targets


@pytest.mark.parametrize("spec", [SPEC, PROTECTED], ids=["all", "protected"])
def test_the_loss_is_that_of_its_definition(spec):
    module, datamodule = make_run(spec)
    for parameter in module.scorer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    batch = datamodule.next_batch()
    found = float(module.training_step(batch, 0)["eviction_loss"])
    assert found == pytest.approx(expected_loss(module, batch, spec), rel=1e-4)
    assert found > 0.05


def test_only_the_scorer_gets_gradients():
    module, datamodule = make_run()
    module.training_step(datamodule.next_batch(), 0)["loss"].backward()
    assert all(parameter.grad is None for parameter in module.backbone.parameters())
    assert all(float(layer.out.grad.abs().max()) > 0 for layer in module.scorer.layers)


def agreement(module):
    """Spearman's rank correlation of scores and target, mean over held-out rows, layers and heads."""
    rows, found = data(spec="eval").next_batch().chosen, []
    for inputs in of_layers(module, rows):
        target = future_attention(inputs, rows.attention_mask, SPEC.window + 1)
        for row in range(len(target)):
            own = rows.attention_mask[row].nonzero().flatten()[SPEC.sink : -SPEC.window - 1]
            scores = scores_at(module, inputs, int(own[-1]) + SPEC.window + 1)
            ranks = [each[row][:, own].argsort(-1).argsort(-1).double() for each in (target, scores)]
            found += [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(*ranks, strict=True)]
    return sum(found) / len(found)


def test_the_loss_falls_and_held_out_keys_come_in_the_order_of_their_attention():
    module, datamodule = make_run()
    torch.nn.init.normal_(module.scorer.layers[0].out, std=0.01)  # ties have no order
    torch.nn.init.normal_(module.scorer.layers[1].out, std=0.01)
    before = agreement(module)
    rows = train_here(module, datamodule, n_iterations=6).rows
    assert rows[-1]["eviction_loss"] < 0.85 * rows[0]["eviction_loss"]
    assert abs(before) < 0.3
    assert agreement(module) > before + 0.3
