"""Steps of TRL's GRPOTrainer on demand; runs in TRL's environment, without this package.

With a `cache` in peers.json the trainer is the EvictingGRPOTrainer of this package.

    python trl_steps.py FOLDER     FOLDER holds the model, its tokenizer and peers.json

Each line on stdin runs one step, and one line of JSON on stdout gives its seconds on the processor.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from reward import share_of_digits
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Steps(TrainerCallback):
    """Waits for a line before each step, and writes the step's seconds after it.

    `generate` is the time in the trainer's `_generate_single_turn`; `score` lasts from there to the end of
    the reward function; `update` is the rest: advantages, forward, backward, clipping and optimizer.
    """

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.generate_s = 0.0
        self.scored_at = 0.0
        self.started_at = 0.0
        self.n_tokens = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.started_at = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        ended_at = time.process_time()
        seconds = {
            "generate": self.generate_s,
            "score": self.scored_at - self.started_at - self.generate_s,
            "update": ended_at - self.scored_at,
            "total": ended_at - self.started_at,
        }
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.say(seconds=seconds, n_tokens=self.n_tokens, peak_mib=peak_kib // 1024)

    def timed_generate(self, generate: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            started_at = time.process_time()
            out = generate(*args, **kwargs)
            self.generate_s = time.process_time() - started_at
            return out

        return call

    def reward(self, completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        rewards = [share_of_digits(completion) for completion in completions]
        self.n_tokens = sum(map(len, completion_ids))
        self.scored_at = time.process_time()
        return rewards

    def say(self, **fields: Any) -> None:
        self.answers.write(json.dumps(fields) + "\n")
        self.answers.flush()


def main(folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the trainer prints is no answer
    settings = json.loads((Path(folder) / "peers.json").read_text())
    torch.set_num_threads(settings["n_threads"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    steps = Steps(answers)
    trainer_class, config_class, cache = GRPOTrainer, GRPOConfig, settings["cache"]
    if cache:
        from lit_rlkv.integrations.trl import EvictingGRPOConfig, EvictingGRPOTrainer

        trainer_class, config_class = EvictingGRPOTrainer, EvictingGRPOConfig
    n_responses = settings["n_prompts"] * settings["group_size"]
    config = config_class(
        output_dir=str(Path(folder) / "trl"),
        per_device_train_batch_size=n_responses,
        num_generations=settings["group_size"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["n_steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta1=settings["betas"][0],
        adam_beta2=settings["betas"][1],
        max_grad_norm=settings["max_grad_norm"],
        loss_type="grpo",
        epsilon=settings["clip"],
        temperature=1.0,
        beta=0.0,
        # TRL's defaults are bfloat16 and checkpointing, which are slower on a CPU.
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=settings["n_steps"],
        **cache,
    )
    trainer = trainer_class(
        model=model,
        reward_funcs=steps.reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in settings["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[steps],
    )
    trainer._generate_single_turn = steps.timed_generate(trainer._generate_single_turn)
    n_trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    steps.say(version=trl.__version__, n_trained=n_trained)
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
