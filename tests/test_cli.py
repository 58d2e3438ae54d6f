import pytest

from lit_rlkv.cli import import_slow_modules

RANKS = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


@pytest.mark.parametrize(
    ("environment", "is_announced"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"RANK": "2", "LOCAL_RANK": "0"}, False),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"SLURM_PROCID": "3"}, False),
    ],
)
def test_the_first_process_alone_announces_slow_imports(monkeypatch, capsys, environment, is_announced):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    import_slow_modules("json")
    assert capsys.readouterr().err == "loading torch and transformers\n" * is_announced
