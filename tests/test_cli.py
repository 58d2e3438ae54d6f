from pathlib import Path

import pytest

from lit_rlkv.cli import exit_in_one_line, import_slow_modules
from lit_rlkv.config import ConfigError

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


def test_a_name_that_is_too_long_for_a_file_is_one_line():
    says = r"error: the name x+\.\.\. is too long for a file"
    with pytest.raises(SystemExit, match=says), exit_in_one_line(ConfigError):
        Path("x" * 300).exists()
    with pytest.raises(FileNotFoundError), exit_in_one_line(ConfigError):
        Path("nothing/there").stat()


def test_an_error_that_repeats_a_long_value_keeps_its_beginning_and_its_end():
    with pytest.raises(SystemExit) as ended, exit_in_one_line(ConfigError):
        raise ConfigError(f"a={'x' * 10_000} is wrong; give another")
    said = str(ended.value)
    assert said.startswith("error: a=xxx")
    assert said.endswith("x is wrong; give another")
    assert len(said) < 3100
