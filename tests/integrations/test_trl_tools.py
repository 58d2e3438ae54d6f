"""TRL's tools and environments under eviction: rows go on in their caches, and the learner replays them."""

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from lit_rlkv.integrations.trl import EvictingGRPOConfig, EvictingGRPOTrainer
from tests.chat_templates import trl_tokenizer
from tests.integrations.spelled import END, EVICTING, Spelling, call, chat_model
from tests.rollouts import moved
from tests.tiers import slow

LONG = 400
"""Tokens of a completion at most."""
AGAIN = f"again{END}"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def repeat(text: str, times: int) -> str:
    """Repeat a text.

    Args:
        text: the text.
        times: how often.
    """
    return text * times


ADD, REPEAT = call("add", a=2, b=3), call("repeat", text="ab", times=30).replace("'", '"')
TOO_LONG = call("repeat", text="ab", times=500).replace("'", '"')
TURNS = [
    [f"none at all{END}"],
    [ADD, f"it is 5{END}"],
    [ADD, REPEAT, f"that is it{END}"],
    [TOO_LONG],
    [ADD, f"it is 5{END}"],  # as the second row
    [call("unknown", a=1), f"oh{END}"],
    [REPEAT, ADD, ADD, "x" * LONG],  # which ends at the limit
    [TOO_LONG],
]
N_CALLS = [0, 1, 2, 0, 1, 1, 3, 0]
"""Results that each row gets."""


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat"))


def score(completions, **_):
    """A reward that differs within a group."""
    return [float(len(str(completion)) % 97) for completion in completions]


class Watched(EvictingGRPOTrainer):
    """Keeps what TRL got: turns, completions and batches."""

    def _generate_single_turn(self, *args, **options):
        found = super()._generate_single_turn(*args, **options)
        self.turns = [*getattr(self, "turns", []), [[*ids] for ids in found[0]]]
        return found

    def _generate(self, prompts):
        self.generated = super()._generate(prompts)
        return self.generated

    def _compute_loss(self, model, inputs):
        self.batches = [*getattr(self, "batches", []), inputs]
        return super()._compute_loss(model, inputs)


def build(model, folder, *, trainer=Watched, prompts=("2+3?", "repeat it"), **options):
    is_ours = issubclass(trainer, EvictingGRPOTrainer)
    arguments = {name: options.pop(name) for name in ("tools", "environment_factory") if name in options}
    defaults = {
        "output_dir": str(folder),
        "max_steps": 1,
        "logging_steps": 1.0,
        "report_to": "none",
        "save_strategy": "no",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": LONG,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-3,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        **(EVICTING if is_ours else {}),
    }
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
    return trainer(
        model,
        score,
        (EvictingGRPOConfig if is_ours else GRPOConfig)(**defaults | options),
        train_dataset=Dataset.from_list(rows),
        processing_class=trl_tokenizer("qwen3", END),
        **arguments or {"tools": [add, repeat]},
    )


def train(*args, **options):
    trainer = build(*args, **options)
    trainer.train()
    return trainer, [row for row in trainer.state.log_history if "loss" in row]


def results(trainer):
    """Return the results of tools in each completion."""
    completions = trainer.generated[3]
    return [[m["content"] for m in completion if m["role"] == "tool"] for completion in completions]


CASES = [
    {"cache_policy": "h2o", "cache_dtype": "int8"},
    slow({"cache_policy": "snapkv"}),
    slow({"cache_policy": "streaming", "top_k": 40}),
    {"cache_policy": "random", "temperature": 1.3},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_rows_with_no_call_and_several_replay_in_one_batch(chatty, tmp_path, monkeypatch, options):
    Spelling(monkeypatch, TURNS)
    trainer, rows = train(chatty, tmp_path, **options)
    print(rows, results(trainer))
