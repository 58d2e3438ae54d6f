"""The command line of the audit: its answer, its picture, and bad input."""

import json
import sys

import pytest
import torch

from lit_rlkv import prepare_backbone
from lit_rlkv.audit import main, parse
from lit_rlkv.auditing.causes import Audit
from lit_rlkv.auditing.engine_rows import read_log
from lit_rlkv.config import ConfigError
from lit_rlkv.reporting.audit_screen import MAX_LABEL, as_values, picture
from lit_rlkv.settings import Sampling
from lit_rlkv.types import NEVER
from tests.auditing.logs import SPEC, model, rows_of, sampled
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


def test_the_labels_of_the_bars_are_short(folder):
    rows, _, _ = read_log(folder / "log.jsonl")
    figure = picture(Audit(prepare_backbone(model()), rows, Sampling()))
    labels = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert 0 < max(map(len, labels)) <= MAX_LABEL
    assert len(labels) > 2


def test_values_for_programs_agree_for_a_right_log(folder, monkeypatch, capsys):
    run(monkeypatch, folder, "temperature=0.8", "rows=2", "--json")
    values = json.loads(capsys.readouterr().out)
    assert values["rows"] == 2
    assert values["gap"]["max"] < 1e-4
    assert values["found"] is None


def test_rows_that_the_model_cannot_replay_are_named_and_the_others_compared(folder, monkeypatch, capsys):
    lines = (folder / "log.jsonl").read_text().splitlines()[:4]
    rows = [json.loads(line) for line in lines]
    rows[1]["response_ids"][3] = 10_000
    rows[2]["evicted_at"] = [[[NEVER] * (len(rows[2]["prompt_ids"]) + len(rows[2]["response_ids"]))]] * 9
    (folder / "odd.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run(monkeypatch, folder, f"log={folder}/odd.jsonl", "temperature=0.8", "--json")
    values = json.loads(capsys.readouterr().out)
    assert values["rows"] == 2
    assert values["gap"]["max"] < 1e-4
    (token, layers) = values["left_out"]
    assert "odd.jsonl:2: input_ids must be 0 to" in token
    assert "odd.jsonl:3: evicted_at must be whole numbers" in layers


def test_many_broken_rows_are_named_and_the_others_counted_by_reason(folder, monkeypatch, capsys):
    row = json.loads((folder / "log.jsonl").read_text().splitlines()[0])
    broken = [row | {"response_ids": None}] * 25 + [row | {"logps": row["logps"][:n]} for n in range(1, 5)]
    lines = [json.dumps(each) for each in (row, *broken)]
    (folder / "many.jsonl").write_text("\n".join([*lines, "{"]))
    run(monkeypatch, folder, f"log={folder}/many.jsonl", "temperature=0.8")  # and no exit status but 0
    said = capsys.readouterr().out.splitlines()
    named = [line for line in said if "many.jsonl:" in line]
    assert [line.split()[:2] for line in named[20:]] == [["and", "5"], ["and", "4"], ["and", "1"]]
    assert "many.jsonl:2: no response: response_ids is null" in named[0]
    assert named[21].endswith(f"many.jsonl:27: 1 log-probs for {len(row['logps'])} tokens of the response")
    (folder / "none.jsonl").write_text("\n".join(lines[1:6]))
    with pytest.raises(SystemExit, match=r"no row can be compared: .*; and 2 more"):
        run(monkeypatch, folder, f"log={folder}/none.jsonl")
    capsys.readouterr()
    with pytest.raises(SystemExit, match="no row can be compared"):
        run(monkeypatch, folder, f"log={folder}/none.jsonl", "--json")
    values = json.loads(capsys.readouterr().out)
    assert (values["rows"], len(values["left_out"])) == (0, 5)


def test_rows_are_spread_over_those_that_fit(folder, monkeypatch, capsys):
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()[:4]]
    long = {name: part * 200 if name != "prompt_ids" else part for name, part in rows[0].items()}
    lines = [json.dumps(each) for each in (long, rows[0], rows[1], long, rows[2], rows[3])]
    (folder / "long.jsonl").write_text("\n".join(lines))
    places = []
    monkeypatch.setattr(
        "lit_rlkv.reporting.audit_screen.as_values",
        lambda found, chosen, broken: places.extend(chosen) or as_values(found, chosen, broken),
    )
    run(monkeypatch, folder, f"log={folder}/long.jsonl", "temperature=0.8", "rows=2", "--json")
    values = json.loads(capsys.readouterr().out)
    assert values["rows"] == 2
    assert [place.rpartition(":")[2] for place in places] == ["2", "5"]
    assert [each.partition(": ")[0].rpartition(":")[2] for each in values["left_out"]] == ["1", "4"]


def test_rows_without_a_record_are_counted_and_asked_for(folder, monkeypatch, capsys):
    rows = rows_of(sampled(model(), SPEC), has_record=True)
    (folder / "mixed.jsonl").write_text(
        "\n".join(json.dumps(row | ({} if place else {"evicted_at": None})) for place, row in enumerate(rows))
    )
    run(monkeypatch, folder, f"log={folder}/mixed.jsonl")
    said = capsys.readouterr().out
    assert "evictions replayed (none logged in 1 of 4 rows): mean" in said
    assert "in the rows without evictions, as under eviction; log when keys were evicted" in said
    run(monkeypatch, folder, f"log={folder}/mixed.jsonl", "--json")
    assert json.loads(capsys.readouterr().out)["rows_without_evictions"] == 1


def test_a_file_without_rows_is_refused(folder, monkeypatch, capsys):
    (folder / "empty.jsonl").write_text("")
    with pytest.raises(SystemExit, match=r"empty\.jsonl' must have rows, got none"):
        run(monkeypatch, folder, f"log={folder}/empty.jsonl")


def test_an_adapter_is_loaded_and_named_where_the_sampler_had_none(folder, monkeypatch, capsys):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    adapted = peft.get_peft_model(
        model(), peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )
    adapted.save_pretrained(folder / "adapter")
    given = f"adapter={folder}/adapter", "--json"
    run(monkeypatch, folder, "temperature=0.8", *given)
    assert json.loads(capsys.readouterr().out)["found"] == "of the model without its adapter"
    rows = rows_of(sampled(prepare_backbone(adapted.merge_and_unload()), SPEC), has_record=True)
    (folder / "adapted.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run(monkeypatch, folder, f"log={folder}/adapted.jsonl", *given)
    assert json.loads(capsys.readouterr().out)["gap"]["max"] < 1e-4


BAD = {
    "needs model=PATH and log=FILE": ["model=x"],
    "unknown argument modle": ["modle=x"],
    "temperature must be a number": ["model=x", "log=x", "temperature=warm"],
    "top_p must be a number above 0": ["model=x", "log=x", "top_p=0"],
    "is no file": ["model=x", "log=nowhere.jsonl"],
}


@pytest.mark.parametrize("said", BAD)
def test_bad_arguments_are_refused_before_a_model_is_loaded(said):
    with pytest.raises(ConfigError, match=said):
        parse(BAD[said])
