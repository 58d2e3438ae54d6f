"""Host time between rollouts with prompts from a file: problems, tokens, texts.

    python benchmarks/prompts.py [--prompts 512] [--group-size 8] [--new-tokens 512]

Rows of JSON lines in a chat template with a system message, tokenized by a BPE that is trained on the spot,
one thread; then as many completions of random tokens turned into text. Medians over rounds. Rows go to
benchmarks/results/prompts.jsonl.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import record
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_rlkv.data.prompts import PromptSource
from lit_rlkv.data.tokenizers import decode_completions, encode_prompts
from lit_rlkv.tasks import load_problems
from lit_rlkv.tasks.rows import EXAMPLES

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
N_ROWS, N_QUESTIONS = 2048, 4
"""In the file, and how many questions make a prompt of it."""
N_ROUNDS = 5


def questions() -> list[str]:
    lines = (EXAMPLES / "word_problems.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["question"] for line in lines]


def chat_tokenizer(texts: list[str]) -> PreTrainedTokenizerBase:
    bytewise = pre_tokenizers.ByteLevel()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = bytewise, decoders.ByteLevel()
    special = ["<pad>", "<eos>"]
    alphabet = bytewise.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def median_ms(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(N_ROUNDS):
        started_at = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_at)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--no-record", action="store_true", help="print alone")
    args = parser.parse_args()
    texts = questions()
    tokenizer = chat_tokenizer(texts)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        chosen = [[texts[(row + n) % len(texts)] for n in range(N_QUESTIONS)] for row in range(N_ROWS)]
        rows = [{"prompt": f"{row}. {' '.join(four)}", "answer": "1"} for row, four in enumerate(chosen)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        task = load_problems(str(path), system_prompt="Answer with a number.")
    source = PromptSource(task, split="train", seed=0)
    prompts = [problem.prompt for problem in source.take(args.prompts)]
    encoded = encode_prompts(tokenizer, prompts)
    shape = (args.prompts * args.group_size, args.new_tokens)
    sampled = torch.randint(2, len(tokenizer), shape, generator=torch.Generator().manual_seed(0))
    response_mask = torch.ones_like(sampled, dtype=torch.bool)
    found = {
        "problems_ms": median_ms(lambda: source.take(args.prompts)),
        "tokens_ms": median_ms(lambda: encode_prompts(tokenizer, prompts)),
        "texts_ms": median_ms(lambda: decode_completions(tokenizer, sampled, response_mask)),
    }
    longest = encoded.input_ids.shape[1]
    print(f"{args.prompts} prompts of up to {longest} tokens: {found['problems_ms']:.1f} ms to take them")
    print(f"{found['tokens_ms']:.0f} ms to tokenize, {found['tokens_ms'] / args.prompts:.2f} a prompt")
    print(f"{found['texts_ms']:.0f} ms for {shape[0]} completions of {shape[1]} tokens as text")
    if not args.no_record:
        sizes = {"n_prompts": args.prompts, "n_prompt_tokens": longest, "n_completions": shape[0]}
        record.append("prompts", {**sizes, "n_new_tokens": shape[1], **found})


if __name__ == "__main__":
    main()
