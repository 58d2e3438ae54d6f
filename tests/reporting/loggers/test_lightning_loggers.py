import csv
import time

import numpy as np
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from matplotlib.image import imread

from lit_rlkv.reporting.loggers import lightning_loggers
from lit_rlkv.reporting.loggers.lightning_loggers import TensorBoard, as_run_logger
from lit_rlkv.reporting.pictures import Picture
from tests.reporting.loggers.recorded import KeepingLogger, place, start_in


def test_lightnings_csv_logger_gets_config_and_metrics_over_iterations_in_a_file_for_each_start(tmp_path):
    for resumed_at in (0, 1):
        logger = as_run_logger(CSVLogger(tmp_path, name="csv"))
        logger.open(start_in(tmp_path, resumed_at, seed=3))
        assert logger.last_iteration == resumed_at
        logger.scalars({"reward": 0.5}, place(resumed_at + 1))
        folder = tmp_path / "csv" / f"version_{resumed_at}"
        with (folder / "metrics.csv").open(newline="") as file:  # before the next row
            (row,) = csv.DictReader(file)
        tokens = 100.0 * (resumed_at + 1)
        assert (row["step"], row["reward"], row["rollout/tokens"]) == (
            f"{resumed_at + 1}",
            "0.5",
            f"{tokens}",
        )
        logger.close(is_complete=False)
        noted = yaml.safe_load((folder / "hparams.yaml").read_text())
        assert noted == {"seed": 3, "environment": {"python": "3.11"}}


def test_an_object_that_is_not_a_logger_is_refused():
    logger = KeepingLogger()
    assert as_run_logger(logger) is logger
    with pytest.raises(TypeError, match="logger must be a RunLogger or a Lightning logger, got dict"):
        as_run_logger({})


pytest.importorskip("tensorboard")


def events(run_dir):
    """Return TensorBoard's view of a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir / lightning_loggers.FOLDER))
    found.Reload()
    return found


def wait_for_the_next_second():
    """Let the next file sort after this one; within a second a counter decides, and 10 sorts before 9."""
    time.sleep(1 - time.time() % 1)


def opened(run_dir, resumed_at=0):
    logger = TensorBoard()
    logger.open(start_in(run_dir, resumed_at, seed=3, cache={"policy": "snapkv", "budget": 16}))
    return logger


def test_all_that_tensorboard_was_sent_is_in_the_folder_of_the_run(tmp_path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logger = opened(tmp_path)
    for iteration in (1, 2):
        logger.scalars({"reward": iteration / 2}, place(iteration))
        assert len(events(tmp_path).Scalars("reward")) == iteration  # while the run goes on
    logger.table("samples", ["prompt", "reward"], [["1+1=", 0.5]], place(4))
    logger.figures([Picture(Figure(figsize=(2, 1)), "Reward", "how good")], place(4))
    logger.close(is_complete=True)

    found = events(tmp_path)
    assert [(event.step, event.value) for event in found.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    assert [event.value for event in found.Scalars("rollout/tokens")] == [100, 200]
    (text,) = found.Tensors("environment/text_summary")
    assert b'"python": "3.11"' in text.tensor_proto.string_val[0]
    assert "seed: 3" in (tmp_path / lightning_loggers.FOLDER / "hparams.yaml").read_text()
    (text,) = found.Tensors("samples/text_summary")
    assert (text.step, b"| 1+1= | 0.5 |" in text.tensor_proto.string_val[0]) == (4, True)
    (image,) = found.Images("figures/reward")
    assert (image.step, image.width, image.height) == (4, 300, 150)
    (tmp_path / "image.png").write_bytes(image.encoded_image_string)
    assert np.all(imread(tmp_path / "image.png")[..., :3] == 1)  # an empty figure, on white
    # The settings stand beside the outcome in the HPARAMS tab.
    parsed = {
        name: HParamsPluginData.FromString(data.plugin_data.content)
        for name, data in found.summary_metadata.items()
        if data.plugin_data.plugin_name == "hparams"
    }
    settings = parsed["_hparams_/session_start_info"].session_start_info.hparams
    assert settings["cache/budget"].number_value == 16
    assert settings["cache/policy"].string_value == "snapkv"
    compared = parsed["_hparams_/experiment"].experiment.metric_infos
    assert [info.name.tag for info in compared] == ["hparams/reward"]


def test_the_event_files_are_in_a_folder_of_the_given_name(tmp_path):
    logger = TensorBoard(name="smd-seed0")
    said = logger.open(start_in(tmp_path))
    logger.close(is_complete=True)
    (file,) = (tmp_path / lightning_loggers.FOLDER / "smd-seed0").glob("events.*")
    assert said == f"to watch: tensorboard --logdir {file.parent}"


def test_a_resumed_run_hides_what_was_done_after_its_checkpoint(tmp_path):
    first = opened(tmp_path)
    for iteration in (1, 2, 3):
        first.scalars({"reward": iteration / 10}, place(iteration))
    first.close(is_complete=False)
    wait_for_the_next_second()
    again = opened(tmp_path, resumed_at=2)
    assert again.last_iteration == 2
    again.scalars({"reward": 0.9}, place(3))
    again.close(is_complete=False)
    seen = [(event.step, event.value) for event in events(tmp_path).Scalars("reward")]
    assert seen == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2)), (3, pytest.approx(0.9))]


@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "a/b"}, "must be the name of a folder, got 'a/b'"),
        *[({"figures_every": n}, "must be a whole number of at least 1") for n in (0, -1, True)],
    ],
)
def test_invalid_settings_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        TensorBoard(**settings)
