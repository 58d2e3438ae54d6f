"""Human-readable sizes, durations and long texts."""


def shortened(text: str, most: int, n_last: int) -> str:
    """Return a text of at most about `most` characters, without its middle if it is longer.

    Args:
        n_last: characters of the end that are kept, which in an error say what to do.
    """
    return text if len(text) <= most else f"{text[: most - n_last]} ... {text[-n_last:]}"


def human_bytes(n_bytes: int) -> str:
    """Format bytes with three digits and a binary unit, such as 1.50 KiB."""
    size, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        # 1023.5 and more would be rounded to four digits
        if size < 1023.5:
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{n_bytes} B"
    n_decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{n_decimals}f} {unit}"


def human_seconds(seconds: float | int) -> str:
    """Format seconds as 7.1 s, 1:35 or 2:03:04."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"
