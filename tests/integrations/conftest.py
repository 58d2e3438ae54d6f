import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a toy model with several likely tokens at most positions."""
    pytest.importorskip("trl")
    from tests.integrations.trl_runs import save_model  # the package, which comes after jaxtyping's hook

    return save_model(tmp_path_factory.mktemp("model"))
