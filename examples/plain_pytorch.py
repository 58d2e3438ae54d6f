"""GRPO in a plain PyTorch loop: rollouts under a KV cache of fixed size, and their exact replay.

python examples/plain_pytorch.py                  a small random model, half a minute on a CPU
python examples/plain_pytorch.py --model MODEL    a folder, a GGUF file or a name on the hub
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_rlkv import CacheSpec, generate, prepare_backbone, replay_logps
from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.models.gguf import converted_gguf
from lit_rlkv.models.presets import tiny_qwen3

PROMPTS = ["2+3=", "40+2=", "7+8=", "1+1="]
GROUP, CLIP = 16, 0.2


def load(path):
    """Return model and tokenizer; without a path a random model that knows characters."""
    if path is not None:
        if path.endswith(".gguf"):
            path = converted_gguf(Path(path), Path(tempfile.gettempdir()) / "lit_rlkv_converted")
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return AutoModelForCausalLM.from_pretrained(path), tokenizer
    tokenizer = build_task_tokenizer()
    torch.manual_seed(0)
    return tiny_qwen3(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, 64), tokenizer


def reward(completion):
    """Share of digits in the text: something that a random model can learn in a few steps."""
    return sum(character.isdigit() for character in completion) / max(1, len(completion))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    model = prepare_backbone(model.eval())  # refuses, with the reason, what it cannot replay
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5 if args.model else 1e-3)
    generator = torch.Generator().manual_seed(0)
    prompts = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    for step in range(args.steps):
        rollout = generate(
            model, prompts.input_ids, prompts.attention_mask,
            cache=CacheSpec(policy="snapkv", budget=12, interval=4, sink=2, window=4),
            max_new_tokens=24, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
            generator=generator, num_return_sequences=GROUP,
        )  # fmt: skip
        texts = [
            tokenizer.decode(ids[mask], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids, mask in zip(rollout.input_ids, rollout.response_mask, strict=True)
        ]
        rewards = torch.tensor([reward(text) for text in texts]).view(-1, GROUP)
        advantages = rewards - rewards.mean(dim=1, keepdim=True)
        advantages = (advantages / (rewards.std(dim=1, keepdim=True) + 1e-4)).view(-1, 1)

        logps = replay_logps(model, rollout)  # under the keys that the sampler saw
        ratio = (logps - rollout.rollout_logps).exp()  # 1 up to float error: the rollout is on-policy
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss = -gain[rollout.response_mask].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        gap = (ratio - 1).abs().max().item()
        print(f"step {step + 1:3d}  reward {rewards.mean().item():.3f}  largest |ratio - 1| {gap:.1e}")


if __name__ == "__main__":
    main()
