"""Time and memory of checking a user's rows before a run: read every line, then count its tokens.

    python benchmarks/data_check.py [--rows 1000000] [--tokenizer characters]

Each tokenizer has a process of its own, for its peak of memory: `characters` is that of the native tasks,
`chat` the one of `benchmarks/prompts.py` with a chat template. The floor is `json.loads` of every line and
nothing else. One thread; seconds are of the processor, which other programs hardly change. Rows go to
benchmarks/results/data_check.jsonl.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import command_line

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import record
from prompts import chat_tokenizer, questions

from lit_rlkv.data.tokenizers import build_task_tokenizer
from lit_rlkv.data.validation import measure
from lit_rlkv.tasks import JsonlTask

TOKENIZERS = ("characters", "chat")


def write_rows(path: Path, n_rows: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in range(n_rows):
            line = {"prompt": f"{row}+{row % 97}=", "answer": str(row + row % 97)}
            file.write(json.dumps(line) + "\n")


def parse_seconds(path: Path) -> float:
    """Return the seconds of json.loads of every line, the floor of reading."""
    started_at = time.process_time()
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
    return time.process_time() - started_at


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def used_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def check(path: Path, name: str) -> dict[str, float]:
    """Read and count all rows once, and return the seconds and the peak memory above the start."""
    tokenizer = build_task_tokenizer() if name == "characters" else chat_tokenizer(questions())
    floor_s, before_mib = parse_seconds(path), used_mib()
    started_at = time.process_time()
    task = JsonlTask(path)
    read_at = time.process_time()
    sizes = measure(task, tokenizer, seed=0, needs_eval_split=True)
    counted_at = time.process_time()
    return {
        "n_rows": len(sizes.prompts),
        "n_tokens": sum(sizes.prompts) + sum(sizes.solutions),
        "read_s": read_at - started_at,
        "count_s": counted_at - read_at,
        "seconds": counted_at - started_at,
        "parse_s": floor_s,
        "peak_mib": peak_mib() - before_mib,
    }


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokenizer", choices=TOKENIZERS, help="one alone, in this process")
    parser.add_argument("--no-record", action="store_true", help="print alone")
    args = parser.parse_args()
    if args.tokenizer is None:
        for name in TOKENIZERS:
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--tokenizer", name], check=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write_rows(path, args.rows)
        found = check(path, args.tokenizer)
    per_s = found["n_rows"] / found["seconds"]
    print(f"{args.tokenizer}: {found['n_rows']:,} rows in {found['seconds']:.1f} s, {per_s:,.0f} rows/s")
    print(f"  {found['read_s']:.1f} s to read (json.loads alone {found['parse_s']:.1f} s)", end=", ")
    print(f"{found['count_s']:.1f} s to count tokens, {found['peak_mib']:.0f} MiB more at the peak")
    if not args.no_record:
        record.append("data_check", {"tokenizer": args.tokenizer, **found})


if __name__ == "__main__":
    main()
