"""The command line of the audit: its answer, its picture, and bad input."""

import json
import sys

import pytest

from lit_rlkv.audit import main, parse
from lit_rlkv.config import ConfigError
from tests.auditing.logs import model, rows_of, sampled
from tests.saved_models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds a model, and a log that it sampled at temperature 0.8, whose last line is broken."""
    folder = tmp_path_factory.mktemp("audit")
    backbone = model()
    save_model(folder / "model", backbone)
    rows = rows_of(sampled(backbone, temperature=0.8))
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "{")
    return folder


def run(monkeypatch, folder, *arguments):
    monkeypatch.setattr(
        sys, "argv", ["audit", f"model={folder}/model", f"log={folder}/log.jsonl", *arguments]
    )
    main()


def test_the_screen_names_cause_and_broken_row_and_the_picture_is_drawn(folder, monkeypatch, capsys):
    run(monkeypatch, folder, f"to={folder}/audit.png")
    said = capsys.readouterr().out
    assert "most likely: the log-probs are those at temperature 0.8, not 1" in said
    assert "log.jsonl:5: not JSON" in said
    assert (folder / "audit.png").stat().st_size > 10_000


def test_values_for_programs_agree_for_a_right_log(folder, monkeypatch, capsys):
    run(monkeypatch, folder, "temperature=0.8", "rows=2", "--json")
    values = json.loads(capsys.readouterr().out)
    assert values["rows"] == 2
    assert values["gap"]["max"] < 1e-4
    assert values["found"] is None


BAD = {
    "needs model=PATH and log=FILE": ["model=x"],
    "unknown argument modle": ["modle=x"],
    "temperature must be a number": ["model=x", "log=x", "temperature=warm"],
    "top_p must be above 0": ["model=x", "log=x", "top_p=0"],
    "is no file": ["model=x", "log=nowhere.jsonl"],
}


@pytest.mark.parametrize("said", BAD)
def test_bad_arguments_are_refused_before_a_model_is_loaded(said):
    with pytest.raises(ConfigError, match=said):
        parse(BAD[said])
