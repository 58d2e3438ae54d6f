"""Speed on a CPU beside the libraries' own: decoding against transformers.generate, an update against peft.

    python benchmarks/cpu_speed.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf [--threads 1] [--rounds 3]
                                   [--only decode16 decode64 long update] [--record]

In each round both sides run after each other on the same weights, prompts and number of tokens; the ratio is
the median over rounds of theirs / ours, so above 1 ours is faster. Prompts are random tokens, and no token
ends a response. `--model qwen3_5` is a random Qwen3.5 of 8 layers, 6 of them recurrent, and width 512.

decode16, decode64   prompts of 64 tokens, 64 more, at batch 16 and 64: all keys, and 64 keys of h2o
long                 the same at batch 16 with 1,024 more tokens
update               forward, backward and AdamW step of LoRA adapters (rank 32, all linear layers) on 32 rows
                     of 64 + 64 tokens: replay of 64 keys, against a dense forward that needs only the logits
                     of the response
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import command_line
import record
import torch
from peft import LoraConfig, get_peft_model
from sampled import sample
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from lit_rlkv import CacheSpec, prepare_backbone, replay_logps
from lit_rlkv.config import find_gguf
from lit_rlkv.models.adapters import LoraSpec, add_adapter, lora_layers, use_adapter
from lit_rlkv.models.gguf import converted_gguf

NAME = "cpu_speed"
N_PROMPT, N_SHORT, N_LONG = 64, 64, 1024
DENSE = CacheSpec.dense()
EVICTING = CacheSpec(policy="h2o", budget=64, interval=16, sink=4, window=8)
DECODES = {
    "decode16": [(16, N_SHORT, DENSE), (16, N_SHORT, EVICTING)],
    "decode64": [(64, N_SHORT, DENSE), (64, N_SHORT, EVICTING)],
    "long": [(16, N_LONG, EVICTING)],
}
HYBRID = "qwen3_5"
LORA = LoraSpec(rank=32, alpha=64, target_modules="all-linear")


def save_hybrid(folder: Path) -> Path:
    """Save a random Qwen3.5, whose every fourth layer has attention."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=32_768,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1536,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load(path: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def random_prompts(model: PreTrainedModel, n_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (n_rows, N_PROMPT), generator=generator)


def sample_theirs(model: PreTrainedModel, prompts: Tensor, n_new: int) -> None:
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=n_new,
        min_new_tokens=n_new,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(
    what: str, ours: Callable[[], object], theirs: Callable[[], object], n_tokens: int, n_rounds: int
) -> dict:
    """Time both in turn, and return a row with tokens per second and the median ratio."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(n_rounds)]
    ratio = statistics.median(theirs_s / ours_s for ours_s, theirs_s in pairs)
    found = [n_tokens / statistics.median(side) for side in zip(*pairs, strict=True)]
    print(f"{what:34} ours {found[0]:8.1f}  theirs {found[1]:8.1f} tokens/s  ratio {ratio:.2f}", flush=True)
    return {
        "what": what,
        "ours_tokens_per_second": round(found[0], 1),
        "theirs_tokens_per_second": round(found[1], 1),
        "ratio": round(ratio, 3),
        "seconds": [[round(s, 3) for s in pair] for pair in pairs],
    }


def decode_rows(path: str, names: list[str], n_rounds: int) -> list[dict]:
    """Decode with both, on weights of their own."""
    if not names:
        return []
    ours, theirs = prepare_backbone(load(path)), load(path)
    rows = []
    for name in names:
        for n_rows, n_new, cache in DECODES[name]:
            prompts = random_prompts(ours, n_rows)
            sample(ours, prompts, cache, 2)
            sample_theirs(theirs, prompts, 2)
            kept = "all keys" if cache.is_dense else f"{cache.policy} {cache.budget}+{cache.interval}"
            rows.append(
                compare(
                    f"decode {n_rows} × {n_new}, {kept}",
                    lambda p=prompts, c=cache, n=n_new: sample(ours, p, c, n),
                    lambda p=prompts, n=n_new: sample_theirs(theirs, p, n),
                    n_rows * n_new,
                    n_rounds,
                )
            )
    return rows


def update_row(path: str, n_rounds: int) -> dict:
    """One optimizer step of adapters on the same tokens: under replay, and dense in plain PyTorch."""
    ours = prepare_backbone(load(path))
    rollout = sample(ours, random_prompts(ours, 32), EVICTING, N_SHORT)
    for parameter in ours.parameters():
        parameter.requires_grad_(False)
    add_adapter(ours, "policy", LORA)
    layers = lora_layers(ours)
    config = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear")
    theirs = get_peft_model(load(path), config)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        for model in (ours, theirs)
    ]

    def step_ours() -> None:
        with use_adapter(layers, "policy"):
            (-replay_logps(ours, rollout).sum() / rollout.response_mask.sum()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()

    def step_theirs() -> None:
        targets = rollout.input_ids[:, N_PROMPT:]
        logits = theirs(input_ids=rollout.input_ids, logits_to_keep=N_SHORT + 1).logits[:, :-1]
        (torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    step_ours()
    step_theirs()
    return compare(
        "update 32 × (64 + 64), replay", step_ours, step_theirs, rollout.input_ids.numel(), n_rounds
    )


def main() -> None:
    parser = command_line.Parser(__doc__, NAME)
    parser.add_argument("--model", required=True, help="checkpoint folder, GGUF file, or qwen3_5")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*DECODES, "update"], default=[*DECODES, "update"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        given = str(save_hybrid(Path(folder))) if args.model == HYBRID else args.model
        file = find_gguf(given)
        path = given if file is None else str(converted_gguf(file, Path(folder)))
        rows = decode_rows(path, [name for name in args.only if name in DECODES], args.rounds)
        if "update" in args.only:
            rows.append(update_row(path, args.rounds))
    for row in rows:
        record.append(NAME, {"model": Path(args.model).name, **row})


if __name__ == "__main__":
    main()
