import pytest
import torch
from lightning.fabric import Fabric

from lit_rlkv.callbacks.hooks import RLCallback
from lit_rlkv.data.demonstrations import PreferenceDataModule
from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tasks import ChainSum
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.loop import train
from lit_rlkv.models import prepare_backbone
from lit_rlkv.models.presets import tiny_qwen3
from lit_rlkv.modules.hydra_sft import HydraSFT


class Rows(RLCallback):
    def __init__(self):
        self.rows = []

    def on_iteration_end(self, iteration, n_iterations, metrics):
        self.rows.append(dict(metrics))


def make_run(n_steps=40, reward_weight=0.5, **data):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 64}
    backbone = prepare_backbone(tiny_qwen3(51, 0, 1, **size))

    def make_optimizer(parameters):
        return torch.optim.AdamW(parameters, lr=5e-3)

    module = HydraSFT(
        backbone, make_optimizer, reward_weight=reward_weight, n_steps=n_steps, n_warmup_steps=5
    )
    task = ChainSum(n_terms=2, max_operand=3)
    options = {"batch_size": 16, "n_pairs": 8, "steps_per_loader": 10, "seed": 0} | data
    source = PromptSource(task, split="train", seed=0)
    return module, PreferenceDataModule(task, source, build_task_tokenizer(), **options)


def test_both_heads_learn_on_one_backbone():
    module, datamodule = make_run(n_steps=120)
    rows = Rows()
    train(
        Fabric(accelerator="cpu"),
        module,
        datamodule,
        callbacks=[rows],
        n_iterations=12,
        max_grad_norm=1.0,
    )
    assert rows.rows[-1]["lm_loss"] < 0.5 * rows.rows[0]["lm_loss"]
    assert rows.rows[-1]["pair_accuracy"] > 0.8
    assert rows.rows[-1]["learning_rate"] < 0.1 * 5e-3


def test_losses_equal_their_definition():
    module, datamodule = make_run()
    module.reward_head.linear.weight.data.normal_()
    batch = datamodule.next_batch()
    found = module.training_step(batch, 0)

    def forward(side):
        positions = (side.is_token.long().cumsum(1) - 1).clamp(min=0)
        return module.backbone(
            input_ids=side.token_ids,
            attention_mask=side.is_token.long(),
            position_ids=positions,
            use_cache=False,
            output_hidden_states=True,
        )

    chosen, rejected = forward(batch.chosen), forward(batch.rejected)
    logps = chosen.logits.log_softmax(-1)
    nll = [
        -float(logps[row, column - 1, batch.chosen.token_ids[row, column]])
        for row, column in batch.chosen.is_target.nonzero().tolist()
    ]
    assert float(found["lm_loss"]) == pytest.approx(sum(nll) / len(nll), rel=1e-4)

    def rewards(output, side):
        last = [int(row.nonzero().max()) for row in side.is_token]
        hidden = output.hidden_states[-1]
        return torch.stack([module.reward_head.linear(hidden[r, c]) for r, c in enumerate(last)]).flatten()

    margin = rewards(chosen, batch.chosen)[:8] - rewards(rejected, batch.rejected)
    expected = -torch.nn.functional.logsigmoid(margin).mean()
    assert float(found["reward_loss"]) == pytest.approx(float(expected), rel=1e-4)
    total = float(found["lm_loss"]) + 0.5 * float(expected)
    assert float(found["loss"]) == pytest.approx(total, rel=1e-4)


def test_pairs_share_their_prompt_and_loaders_go_on_where_the_last_ended():
    _, datamodule = make_run()
    first, second = datamodule.next_batch(), datamodule.next_batch()
    assert not torch.equal(first.chosen.token_ids, second.chosen.token_ids)
    n_prompt = int((~first.chosen.is_target[0] & first.chosen.is_token[0]).sum())
    assert torch.equal(first.chosen.token_ids[:8, :n_prompt], first.rejected.token_ids[:, :n_prompt])
    _, again = make_run()
    again.load_state_dict({"n_batches": 1, "source": {"cursor": 16}})
    assert torch.equal(again.next_batch().rejected.token_ids, second.rejected.token_ids)


def test_more_pairs_than_rows_are_refused():
    with pytest.raises(ValueError, match="n_pairs=32 must be between 1 and batch_size=16"):
        make_run(n_pairs=32)
