import sys

import pytest
from fit_process import fit


def before(code):
    """A program that reads the command instead of running it."""
    return (sys.executable, "-c", f"import sys; {code}")


def test_leftovers_of_an_unfinished_run_are_removed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "half").touch()
    assert not fit(tmp_path / "a", tmp_path, [], before("pass")).exists()


def test_a_run_that_failed_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"a ended with 3:\n1\n2\n3\n4\n5$"):
        fit(tmp_path / "a", tmp_path, [], before("print(*range(6), sep='\\n'); sys.exit(3)"))
