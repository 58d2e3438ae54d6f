"""Trains under torchrun with TRL's GRPOTrainer and ours; what the test compares goes to FOLDER/found.json.

python -m torch.distributed.run --nproc-per-node 2 trl_ranks.py MODEL FOLDER
FOLDER/chat is a model for tools.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import distributed as dist

from tests.integrations.spelled import TURNS, Spelling, train_with_tools
from tests.integrations.trl_runs import KEEPS_ALL, Recorder, train, train_plain


def difference_of_ranks(trainer):
    """Return the largest difference of a weight from that of rank 0."""
    mine = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    first = mine.clone()
    dist.broadcast(first, 0)
    largest = (mine - first).abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def main():
    model, folder = sys.argv[1:]
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    recorder = Recorder()
    _, ours = train(model, folder, reward=recorder, **KEEPS_ALL | options)
    _, plain = train_plain(model, folder, recorder, **options)
    found = {"ours": ours, "plain": plain}
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    for name, more in {
        "evicting": {"beta": 0.1},
        "truncated": {"top_p": 0.8, "beta": 0.1},
        "distilled": {"distillation": "dense_student", "correction": "tis"},
        "lora": {"arguments": lora, "distillation": "sparse_student"},
    }.items():
        trainer, rows = train(model, folder, **options | more)
        found[name] = {"rows": rows, "difference": difference_of_ranks(trainer)}
    Spelling(pytest.MonkeyPatch(), TURNS[4:] if dist.get_rank() == 0 else TURNS[:1] * 4)  # without a call
    trainer, rows = train_with_tools(f"{folder}/chat", folder, per_device_train_batch_size=4)
    found["tools"] = {"rows": rows, "difference": difference_of_ranks(trainer)}
    if dist.get_rank() == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
