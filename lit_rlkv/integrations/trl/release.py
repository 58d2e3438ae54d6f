"""The releases of TRL whose trainers can be extended."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

SUPPORTED_TRL = ">=1.16,<1.17"
"""Releases of TRL whose private methods are known; the extra `trl` has the same range."""


def check_trl_version() -> None:
    """Check that TRL is installed in a supported release.

    Raises:
        ImportError: TRL is missing, or its release is outside of `SUPPORTED_TRL`.
    """
    try:
        found = version("trl")
    except PackageNotFoundError:
        found = "none"
    if found == "none" or not SpecifierSet(SUPPORTED_TRL).contains(found, prereleases=True):
        raise ImportError(
            f"lit_rlkv.integrations.trl must have trl{SUPPORTED_TRL}, found {found}; "
            "run: pip install -e '.[trl]'"
        )
