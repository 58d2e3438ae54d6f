"""Signals that ask a run to stop."""

import os
import shlex
import signal

import pytest
import torch
from lightning.fabric import Fabric
from omegaconf import OmegaConf, open_dict, read_write

from lit_rlkv.config import composed
from lit_rlkv.interrupts import SIGNALS, InterruptedRunError, Interruption
from lit_rlkv.runs.resume import INTERRUPTED, end_of_run, has_lost_checkpoints, mark_interrupted

FABRIC = Fabric(accelerator="cpu")
NAN, FINE = torch.tensor(torch.nan), torch.tensor(1.0)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_run_at_once(number):
    before = signal.getsignal(number)
    with (
        pytest.raises(InterruptedRunError, match=signal.Signals(number).name),
        Interruption().handle_signals(),
    ):
        send(number)
    assert signal.getsignal(number) is before


def test_a_deferred_signal_waits_for_the_end_of_the_block():
    done = []
    with Interruption().handle_signals() as interruption:
        with interruption.deferred():
            interruption.raise_if_agreed()
            send(signal.SIGTERM)
            done.append("step")
            interruption.raise_if_agreed()  # nobody has been asked whether they were
            assert interruption.is_requested(FABRIC)
        with pytest.raises(InterruptedRunError, match="SIGTERM"):
            interruption.raise_if_agreed()
    assert done == ["step"]


@pytest.mark.usefixtures("own_ctrl_c")
def test_ctrl_c_does_not_wait_for_the_end_of_an_iteration():
    with (
        pytest.raises(InterruptedRunError, match=r"^interrupted$") as error,
        Interruption().handle_signals() as interruption,
        interruption.deferred(),
    ):
        send(signal.SIGINT)
    assert error.value.is_ctrl_c


@pytest.mark.usefixtures("own_ctrl_c")
def test_ctrl_c_on_one_of_several_ranks_waits_until_all_have_agreed(capfd):
    done = []
    with Interruption().handle_signals() as interruption, interruption.together(2):
        with interruption.deferred():
            send(signal.SIGINT)
            done.append("step")
        with pytest.raises(InterruptedRunError, match="interrupted"):
            interruption.raise_if_requested(FABRIC)
    assert done == ["step"]
    assert "Ctrl-C again ends them at once" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "has_config", "says", "code"),
    [
        (signal.SIGINT, True, "why; resume with python -m lit_rlkv.fit resume=runs/mine", 130),
        (signal.SIGINT, False, "why; there is nothing to resume", 130),
        (signal.SIGTERM, True, "why: saved, exit code 75", 75),
        (
            signal.SIGTERM,
            False,
            "why: nothing was saved yet, exit code 75",
            75,
        ),
    ],
)
def test_an_interrupted_run_says_how_to_resume_it(tmp_path, monkeypatch, number, has_config, says, code):
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    if has_config:
        (run_dir / "config.yaml").touch()
    assert end_of_run(InterruptedRunError("why", number), run_dir) == (says, code)


def test_the_command_that_resumes_a_run_trusts_its_modules_again(tmp_path):
    (tmp_path / "config.yaml").touch()
    error = InterruptedRunError("why", signal.SIGINT)
    message, _ = end_of_run(error, tmp_path, ["seed=1", "trusted_modules=[mine]"])
    assert shlex.split(message)[-1] == "trusted_modules=[mine]"
    assert "seed" not in message
    given = ["+trusted_modules=[mine]", "logger=tensorboard", "++logger.save_dir=elsewhere"]
    assert shlex.split(end_of_run(error, tmp_path, given)[0])[-3:] == given


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.usefixtures("own_ctrl_c")
def test_a_signal_after_the_report_says_that_the_run_is_finished(tmp_path, number, code):
    (tmp_path / "config.yaml").touch()
    before = {each: signal.getsignal(each) for each in SIGNALS}
    interruption = Interruption()
    interruption.is_finished = True
    with (
        pytest.raises(InterruptedRunError) as caught,
        interruption.handle_signals(),
        mark_interrupted(tmp_path, is_rank_zero=True),
    ):
        send(number)
    message, found = end_of_run(caught.value, tmp_path)
    assert (message.partition(": ")[2], found) == ("the run is finished", code)
    assert not (tmp_path / INTERRUPTED).exists()
    for each in SIGNALS:  # until the process has ended
        assert signal.getsignal(each) is not before[each]
        signal.signal(each, before[each])


@pytest.mark.parametrize(
    ("n_rows", "every", "left", "can_resume"),
    [
        (1, 1, [], True),  # ended between the row of an iteration and its checkpoint
        (2, 1, [], False),
        (2, 3, [], True),
        (3, 3, [], True),
        (3, 3, ["report.html"], False),
        (4, 3, [], False),
        (4, 3, ["checkpoints/iteration-000003/state.json"], True),
    ],
)
def test_a_resume_is_named_where_it_works(tmp_path, n_rows, every, left, can_resume):
    cfg = composed("config", [f"callbacks.checkpoint_every={every}"])
    with read_write(cfg), open_dict(cfg):
        del cfg["hydra"]
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    (tmp_path / "metrics.csv").write_text("iteration\n" + "".join(f"{n + 1}\n" for n in range(n_rows)))
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert has_lost_checkpoints(tmp_path, cfg) is not can_resume
    said = end_of_run(InterruptedRunError("why", signal.SIGINT), tmp_path)[0]
    assert ("resume with" in said, "nothing can be resumed" in said) == (can_resume, not can_resume)


@pytest.mark.usefixtures("own_ctrl_c")
def test_a_sigterm_that_follows_ctrl_c_changes_nothing():
    interruption = Interruption()
    with interruption.handle_signals():
        with pytest.raises(InterruptedRunError) as first:
            send(signal.SIGINT)
        send(signal.SIGTERM)
    assert first.value.is_ctrl_c
    assert interruption.signal == signal.SIGINT


def test_a_folder_with_odd_characters_is_quoted_for_the_shell_and_for_hydra(tmp_path):
    run_dir = tmp_path / "a run=1"
    run_dir.mkdir()
    (run_dir / "config.yaml").touch()
    command = end_of_run(InterruptedRunError("why", signal.SIGINT), run_dir)[0].partition("resume with ")[2]
    override = shlex.split(command)[-1]
    assert composed("config", [override]).resume == str(run_dir)


@pytest.mark.parametrize(("number", "is_marked"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_only_a_scheduler_leaves_the_mark_to_start_the_run_again(tmp_path, number, is_marked):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(InterruptedRunError), mark_interrupted(tmp_path, is_rank_zero=True):
        raise InterruptedRunError("why", number)
    assert (tmp_path / INTERRUPTED).exists() == is_marked


def test_except_exception_does_not_catch_an_interruption():
    assert not issubclass(InterruptedRunError, Exception)


def test_without_a_signal_nothing_ends():
    interruption = Interruption()
    assert not interruption.is_requested(FABRIC)
    interruption.raise_if_agreed()
    interruption.raise_if_requested(FABRIC)


def test_a_requested_end_is_raised_at_the_next_check():
    with Interruption().handle_signals() as interruption, interruption.deferred():
        send(signal.SIGTERM)
        with pytest.raises(InterruptedRunError, match="SIGTERM"):
            interruption.raise_if_requested(FABRIC)


def test_inside_deferred_an_immediate_block_is_broken_off():
    with Interruption().handle_signals() as interruption, interruption.deferred():
        with interruption.immediate(False):
            send(signal.SIGTERM)  # held all the same
        with pytest.raises(InterruptedRunError), interruption.immediate(True):
            pytest.fail("a signal that came before it ends it")
    with (
        Interruption().handle_signals() as interruption,
        interruption.deferred(),
        pytest.raises(InterruptedRunError),
        interruption.immediate(True),
    ):
        send(signal.SIGTERM)
