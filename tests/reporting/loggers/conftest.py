import pytest


@pytest.fixture
def wandb_home(tmp_path, monkeypatch):
    """An account-less home for wandb: what it caches there goes with the test, and no service is asked."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return tmp_path
