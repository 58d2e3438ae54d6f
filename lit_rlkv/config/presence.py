"""Rules on what must be there before anything else can be looked at."""

from omegaconf import DictConfig, OmegaConf

from lit_rlkv.config.building import require


def check_folders(cfg: DictConfig) -> None:
    """Where a run lies, and which one it goes on with.

    Raises:
        ConfigError: what is given is no folder.
    """
    runs_dir, resume = cfg.get("runs_dir"), cfg.get("resume")
    require(
        isinstance(runs_dir, str) and runs_dir != "",
        f"runs_dir={runs_dir} is no folder; give one, such as runs_dir=runs",
    )
    require(
        resume is None or (isinstance(resume, str) and resume != ""),
        f"resume={resume} is no folder of a run; give resume=runs/NAME, or resume=auto",
    )


def check_given(cfg: DictConfig) -> None:
    """What has no default must be given.

    Raises:
        ConfigError: naming what is not.
    """
    missing = sorted(OmegaConf.missing_keys(cfg))
    is_or_are = "is" if len(missing) == 1 else "are"
    require(
        not missing,
        f"{', '.join(missing)} {is_or_are} not given; add {' '.join(f'{name}=...' for name in missing)}",
    )
