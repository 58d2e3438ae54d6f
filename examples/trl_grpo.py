"""TRL's GRPOTrainer with rollouts under a KV cache of fixed size, replayed exactly.

pip install -e '.[trl]'
python examples/trl_grpo.py                  a small random model, less than a minute on a CPU
python examples/trl_grpo.py --model MODEL    a folder, a GGUF file or a name on the hub
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from plain_pytorch import PROMPTS, load, reward

from lit_rlkv.integrations.trl import EvictingGRPOConfig, EvictingGRPOTrainer


def share_of_digits(completions, **_):
    return [reward(text) for text in completions]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--correction", default="shadow")
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    with tempfile.TemporaryDirectory() as folder:
        config = EvictingGRPOConfig(
            output_dir=folder, max_steps=args.steps, logging_steps=1, report_to="none", save_strategy="no",
            per_device_train_batch_size=32, num_generations=8, max_completion_length=24, bf16=False,
            learning_rate=1e-5 if args.model else 1e-3, lr_scheduler_type="constant",
            use_cpu=not torch.cuda.is_available(), correction=args.correction,
            cache_policy="snapkv", cache_budget=12, cache_interval=4, cache_sink=2, cache_window=4,
        )  # fmt: skip
        dataset = Dataset.from_dict({"prompt": PROMPTS * args.steps})
        trainer = EvictingGRPOTrainer(
            model, share_of_digits, config, train_dataset=dataset, processing_class=tokenizer
        )
        trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    gap = f"largest gap between sampler and learner {max(row['kv/replay_gap'] for row in rows):.1e} nats"
    print(f"{args.steps} steps in {trainer.state.log_history[-1]['train_runtime']:.0f} s")
    print(f"reward {rows[0]['reward']:.3f} to {rows[-1]['reward']:.3f}, {gap}")


if __name__ == "__main__":
    main()
