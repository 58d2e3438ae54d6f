"""The SFT model that runs on one process and on two start from."""

import pytest


@pytest.fixture(scope="session")
def sft_model(tmp_path_factory, share_sft_model):
    from tests.distributed.rank_runs import SETTINGS  # the package comes after jaxtyping's hook
    from tests.whole_runs import config

    return share_sft_model(config(tmp_path_factory.mktemp("runs"), *SETTINGS))


@pytest.fixture(scope="session")
def folder(sft_model):
    """A folder of runs, which start from the SFT model in it."""
    return sft_model.parents[1]
