"""The count of a pass beside the live tensors of a real one."""

import pass_bytes
import pytest

from lit_rlkv.models import activations
from tests.tiers import short_tier

CASES = [
    (family, trains_all, keeps)
    for family in pass_bytes.FAMILIES
    for trains_all in (False, True)
    for keeps in pass_bytes.WAYS
]


@pytest.mark.parametrize(
    ("family", "trains_all", "keeps"),
    short_tier(CASES, [("qwen3", False, False), ("qwen3", False, "host"), ("qwen3_next", True, True)]),
)
def test_the_count_is_within_15_percent(monkeypatch, family, trains_all, keeps):
    monkeypatch.setattr(activations, "TILE", pass_bytes.TILE)
    measured, count = pass_bytes.counted(family, trains_all=trains_all, keeps=keeps, n_tokens=1024)
    assert count == pytest.approx(measured, rel=0.15)


def test_longer_sequences_fit_with_less_kept(capsys, monkeypatch):
    monkeypatch.setattr(pass_bytes, "CASES", {"small": (pass_bytes.QWEN3_4B, 2, 23.6)})
    monkeypatch.setattr(pass_bytes, "HEADS", pass_bytes.HEADS | {"num_hidden_layers": 2})
    monkeypatch.setattr(activations, "TILE", 4096)
    pass_bytes.print_longest()
    row = capsys.readouterr().out.strip().splitlines()[-1].split()
    checkpoints, host, _, tiles = (int(number.replace(",", "")) for number in row[-4:])
    assert checkpoints <= host < tiles
