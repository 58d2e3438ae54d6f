"""How many processes a run has, by the config and by what a launcher says."""

import pytest
from omegaconf import OmegaConf

from lit_rlkv.config import ConfigError
from lit_rlkv.stages.launching import make_fabric, started_processes

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0",
    "GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost",
    "SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_NODE": "4",
}  # fmt: skip


def config(**settings):
    defaults = {"accelerator": "cpu", "devices": "auto", "num_nodes": 1, "strategy": "auto"}
    return OmegaConf.create({"fabric": {**defaults, "precision": "32-true", **settings}})


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_alone_there_is_one_process_or_as_many_as_asked_for():
    assert make_fabric(config()).world_size == 1
    assert make_fabric(config(devices=2)).world_size == 2


@pytest.mark.parametrize(("variables", "n_ranks"), [(TORCHRUN, 4), (SLURM, 8)])
def test_a_launcher_decides(monkeypatch, variables, n_ranks):
    set_all(monkeypatch, variables)
    assert make_fabric(config()).world_size == n_ranks
    with pytest.raises(ConfigError, match=r"fabric\.devices=3, but the launcher has started"):
        make_fabric(config(devices=3))


def test_what_would_wait_for_ever_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="by srun or torchrun"):
        make_fabric(config(num_nodes=2))
    set_all(monkeypatch, {**SLURM, "SLURM_NTASKS": "7"})
    with pytest.raises(ConfigError, match="7 tasks on 2 nodes; give --ntasks-per-node"):
        started_processes()
    set_all(monkeypatch, SLURM)
    monkeypatch.delenv("SLURM_STEP_ID")
    with pytest.raises(ConfigError, match="start the run by srun"):
        started_processes()


def test_a_device_that_is_not_there_is_one_clear_error():
    with pytest.raises(ConfigError, match="fabric: "):
        make_fabric(config(accelerator="tpu"))
