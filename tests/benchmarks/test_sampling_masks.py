"""Decoding with and without the record samples the same, and the sets that are replayed have their sizes."""

import argparse

import pytest
import torch
from sampling_masks import SETS, TRUNCATIONS, Unrecorded, decode, decode_rows, make_model, replay_rows

from lit_rlkv.rollout import decoder
from lit_rlkv.rollout.mask_record import MaskRecord

SIZES = argparse.Namespace(rows=2, tokens=6, vocab=4096, positions=8, rounds=1)


@pytest.fixture(autouse=True)
def _with_the_record_of_the_package(monkeypatch):
    monkeypatch.setattr(decoder, "MaskRecord", MaskRecord)


def test_the_record_changes_no_token():
    model = make_model(SIZES.vocab)
    Unrecorded.n_tokens = SIZES.tokens
    without, recorded = (
        decode(model, SIZES, kind, TRUNCATIONS["top_p=0.9"])[1] for kind in (Unrecorded, MaskRecord)
    )
    assert torch.equal(without.input_ids, recorded.input_ids)
    assert len(without.sampling_masks.token_ids) == 0
    assert len(recorded.sampling_masks.token_ids) >= 2 * 6


def test_a_row_for_each_way_of_sampling_and_each_size_of_sets():
    rows = {row["sampling"]: row for row in decode_rows(SIZES)}
    assert rows.keys() == TRUNCATIONS.keys()
    assert rows["top_k=50"]["kept_per_token"] == 50
    # 4 bytes for each id, and 4 for each of 12 + 6 columns
    assert rows["top_k=50"]["bytes_per_token"] == 4 * 50 + 4 * 18 / 6
    assert rows["whole vocabulary"]["bytes_per_token"] == 0
    assert {row["sets"] for row in replay_rows(SIZES)} == SETS.keys()
