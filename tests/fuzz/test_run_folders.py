"""Random damage to the folder of a run: it is resumed, scored, exported and reported, or refused in one line.

Nothing outside of the folder changes, and no code in it is run.
"""

import os
import pickle
import re
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import BytesIO
from pathlib import Path
from shutil import copytree

import pytest
import torch
from hypothesis import strategies as st

from tests.fuzz.harness import outcome_of, run_cases
from tests.tiers import slow
from tests.whole_runs import run

pytestmark = pytest.mark.usefixtures("_as_users_run_it")

OPTIONS = ["diagnostics=light", "evaluation.budgets=[]", "evaluation.n_prompts=2", "evaluation.n_mismatch=2"]
LIMIT_S = 60.0
HUGE = 6 << 30
"""Bytes of a file without blocks, more than a case may reserve."""
BACKBONE = [
    "config.json", "generation_config.json", "model.safetensors", "reward_head.safetensors", "sft.json",
    "tokenizer.json", "tokenizer_config.json",
]  # fmt: skip
CHECKPOINT = ["optimizer.pt", "state.json", "trainable.safetensors"]
PATHS = [
    "config.yaml", "config.yaml", "diagnostics.jsonl", "environment.json", "evaluation.json",
    "evictions.json", "metrics.csv", "report.html", "samples.jsonl", "sft_metrics.csv", "backbone",
    "checkpoints", "checkpoints/iteration-000001", "checkpoints/iteration-000002",
    *(f"backbone/{name}" for name in BACKBONE),
    *(f"checkpoints/iteration-000002/{name}" for name in CHECKPOINT),
]  # fmt: skip
VALUES = [b"-1", b"0", b"1e999", b"NaN", b"null", b'"x"', b"[]", b"{}", b"99999999999", b"true", b"os.system"]


class Code:
    """A pickle of it makes a folder when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("code-was-run",)


def _saved_by_torch() -> bytes:
    file = BytesIO()
    torch.save({"state": Code()}, file)
    return file.getvalue()


CONTENTS = {
    "empty": b"", "list": b"[1]\n[2]\n", "binary": b"\xff\x00\n\xfe\n", "deep": b"[" * 100_000 + b"\n",
    "pickle": pickle.dumps(Code()), "torch": _saved_by_torch(), "object": b"{}\n",
    "yaml code": b"a: !!python/object/apply:os.mkdir [code-was-run]\n",
    "target": b"task: {_target_: os.mkdir, path: code-was-run}\n",
    "auto map": b'{"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"}}',
}  # fmt: skip


@dataclass(frozen=True)
class Damage:
    """One change in a run's folder."""

    path: str
    kind: str
    at: float
    data: bytes

    def __call__(self, folder: Path, outside: Path) -> None:
        path = folder / self.path
        is_whole_read = self.kind == "huge" and self.path.startswith("backbone/")  # by transformers
        is_elsewhere = self.kind == "inner" and path.is_dir()  # a link to a folder is as good as one
        if not os.path.lexists(path) or is_whole_read or is_elsewhere:
            return
        is_small = path.is_file() and path.stat().st_size < HUGE
        content = path.read_bytes() if is_small else b""
        place = int(self.at * len(content))
        changed = {
            "cut": content[:place],
            "flip": content[:place]
            + bytes([b ^ 1 << place % 8 for b in content[place : place + 1]])
            + content[place + 1 :],
            "insert": content[:place] + self.data + content[place:],
            "value": self._with_another_value(content),
            **CONTENTS,
        }
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if self.kind in changed:
            path.write_bytes(changed[self.kind])
        elif self.kind == "folder":
            (path / "inner").mkdir(parents=True)
        elif self.kind == "pipe":
            os.mkfifo(path)
        elif self.kind == "huge":
            with path.open("wb") as file:
                file.truncate(HUGE)
        elif self.kind != "delete":
            targets = {"loop": path, "nowhere": folder / "nowhere", "zeros": Path("/dev/zero")}
            path.symlink_to(targets.get(self.kind, outside / self.kind))

    def _with_another_value(self, content: bytes) -> bytes:
        """Replace one number or word by another value."""
        found = list(re.finditer(rb"(?<=[ :\[,])[\w.+-]+(?=[\n,\]} ])", content))
        if not found:
            return content + self.data
        one = found[int(self.at * len(found))]
        return content[: one.start()] + self.data + content[one.end() :]


LINKS = ["file", "inner", "loop", "nowhere", "zeros"]
KINDS = ["delete", "cut", "flip", "insert", *["value"] * 8, "folder", "pipe", "huge", *CONTENTS, *LINKS]
damages = st.lists(
    st.builds(
        Damage,
        st.sampled_from(PATHS),
        st.sampled_from(KINDS),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(VALUES),
    ),
    min_size=1,
    max_size=2,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with runs/whole, a run of two iterations, and with files outside of it."""
    root = tmp_path_factory.mktemp("root")
    (root / "runs").mkdir()
    run(root / "runs", "whole", *OPTIONS)
    (root / "outside" / "inner").mkdir(parents=True)
    for path in (root / "outside" / "file", root / "outside" / "inner" / "file"):
        path.write_text("[1]\n")
    for name in ("reporting.comparison", "reporting.pictures", "stages.export", "runs.open_run"):
        import_module(f"lit_rlkv.{name}")  # once, and not in every fork
    return root


def entered(command: str, folder: Path, root: Path) -> None:
    """Run a command line on a run's folder, with its output in a file."""
    os.chdir(root / "outside")
    output = os.open(root / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    arguments = {
        "fit": [f"resume={folder}"],
        "evaluate": [f"ckpt={folder}"],
        "export": [f"ckpt={folder}", f"to={root / 'exported'}"],
        "report": [str(folder)],
    }
    sys.argv = [command, *arguments[command]]
    import_module(f"lit_rlkv.{command}").main()


def outside_of(root: Path) -> dict[str, bytes | None]:
    """Return what lies outside of the runs, with its content."""
    paths = [*(root / "outside").rglob("*"), *(root / "runs" / "whole").rglob("*")]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def check(root: Path, command: str, damage: list[Damage]) -> None:
    folder, exported = root / "runs" / "damaged", root / "exported"
    for old in (folder, exported):
        shutil.rmtree(old, ignore_errors=True)
    copytree(root / "runs" / "whole", folder)
    for change in damage:
        change(folder, root / "outside")
    before = outside_of(root)
    found = outcome_of(lambda: entered(command, folder, root), limit_s=LIMIT_S)
    said = (root / "output").read_text(errors="replace")
    found.check_one_line("SystemExit")
    assert "Traceback" not in said, said[-3000:]
    after = outside_of(root)
    assert [name for name in before | after if after.get(name) != before.get(name)] == []
    assert not list(folder.rglob("code-was-run"))


@pytest.mark.parametrize("n_cases", [3, *[slow(15)] * 5])  # 5 parts, so that all workers share the 75 cases
def test_a_damaged_run_is_used_or_refused_in_one_line(root, n_cases):
    commands = st.sampled_from(["fit", "evaluate", "export", "report"])
    run_cases(n_cases, partial(check, root), n_fixed=3, command=commands, damage=damages)
