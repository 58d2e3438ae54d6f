"""Fixtures for tests of datasets."""

import pytest


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, with its cache beside the data and no progress bars."""
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    package.disable_progress_bars()
    yield package
    package.enable_progress_bars()
