"""TRL's GRPOTrainer with rollouts under a KV cache of fixed size, replayed exactly.

pip install trl datasets
python examples/trl_grpo.py                  a small random model, less than a minute on a CPU
python examples/trl_grpo.py --model MODEL    a folder or a name on the hub

Two public hooks do it, and TRL stays as it is: `rollout_func` samples, and a forward pre-hook of PyTorch adds
the recorded evictions to every forward of the learner. TRL calls `rollout_func` experimental; this was run
with TRL 1.16. One process, no vLLM, no gradient checkpointing, no reference model (beta=0, TRL's default).
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from plain_pytorch import PROMPTS, load, reward
from trl import GRPOConfig, GRPOTrainer

from lit_rlkv import CacheSpec, generate, prepare_backbone
from lit_rlkv.types import NEVER


class Replay:
    """Samples for TRL, and keeps the evictions of each sequence for the learner.

    Sequences are found again by their tokens. The policy must evict the same in two equal sequences, as all
    but `random` do.
    """

    def __init__(self, model, tokenizer, cache):
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.evictions = {}
        self.largest_gap = 0.0
        model.base_model.register_forward_pre_hook(self.add_evictions, with_kwargs=True)

    def rollout(self, prompts, trainer):
        """TRL's `rollout_func`: a completion for every prompt of the list, which repeats each of a group."""
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        batch = batch.to(self.model.device)
        rollout = generate(
            self.model, batch.input_ids, batch.attention_mask, cache=self.cache,
            max_new_tokens=trainer.args.max_completion_length, eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id, temperature=trainer.args.temperature,
        )  # fmt: skip
        self.evictions = {}
        found = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for row in range(len(prompts)):
            is_token, is_response = rollout.attention_mask[row], rollout.response_mask[row]
            ids, first = rollout.input_ids[row], int(is_token.int().argmax())
            evicted_at = rollout.evicted_at[row][..., is_token]
            evicted_at = torch.where(
                evicted_at == NEVER, NEVER, evicted_at - first
            )  # counted from the first token
            self.evictions[tuple(ids[is_token].tolist())] = evicted_at
            found["prompt_ids"].append(ids[is_token & ~is_response].tolist())
            found["completion_ids"].append(ids[is_response].tolist())
            found["logprobs"].append(rollout.rollout_logps[row][is_response].tolist())
        self.measure(rollout, trainer.args.temperature)
        return found

    def add_evictions(self, module, args, kwargs):
        """Add evictions and positions to a forward of the learner; those of `generate` pass as they are."""
        if kwargs.get("slot_cache") is not None:
            return args, kwargs
        is_token = kwargs["attention_mask"].bool()
        tables = []
        for ids, mask in zip(kwargs["input_ids"], is_token, strict=True):
            known = self.evictions[tuple(ids[mask].tolist())]
            table = known.new_zeros(*known.shape[:2], len(ids))  # padding is seen by no query
            first = int(mask.int().argmax())
            table[..., mask] = torch.where(known == NEVER, NEVER, known + first)
            tables.append(table)
        positions = (is_token.cumsum(dim=1) - 1).clamp(min=0)
        return args, kwargs | {"evicted_at": torch.stack(tables), "position_ids": positions}

    @torch.no_grad()
    def measure(self, rollout, temperature):
        """Compare the learner's log-probs, computed as TRL computes them, with the sampler's."""
        logits = self.model(input_ids=rollout.input_ids, attention_mask=rollout.attention_mask).logits
        logps = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)
        logps = logps.gather(-1, rollout.input_ids[:, 1:, None]).squeeze(-1)
        gap = (logps - rollout.rollout_logps[:, 1:])[rollout.response_mask[:, 1:]].abs().max().item()
        self.largest_gap = max(self.largest_gap, gap)


def share_of_digits(completions, **_):
    return [reward(text) for text in completions]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    model = prepare_backbone(model.eval())
    replay = Replay(model, tokenizer, CacheSpec("snapkv", budget=12, interval=4, sink=2, window=4))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=share_of_digits,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * args.steps}),
            rollout_func=replay.rollout,
            args=GRPOConfig(
                output_dir=folder, max_steps=args.steps, logging_steps=1, report_to="none",
                save_strategy="no", per_device_train_batch_size=32, num_generations=8,
                max_completion_length=24, learning_rate=1e-5 if args.model else 1e-3,
                lr_scheduler_type="constant", gradient_checkpointing=False, bf16=False,
                use_cpu=not torch.cuda.is_available(),
            ),
        )  # fmt: skip
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    gap = f"largest gap between sampler and learner {replay.largest_gap:.1e} nats"
    print(f"reward {rewards[0]:.3f} to {rewards[-1]:.3f}, {gap}")


if __name__ == "__main__":
    main()
