"""A figure as an image, for what shows no matplotlib figures."""

import io

import numpy as np
from jaxtyping import UInt8
from matplotlib.figure import Figure
from matplotlib.image import imread

PIXELS_PER_INCH = 150


def pixels(figure: Figure) -> UInt8[np.ndarray, "height width 3"]:
    """The figure on white, in red, green and blue."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PIXELS_PER_INCH, facecolor="white")
    buffer.seek(0)
    return np.round(imread(buffer)[..., :3] * 255).astype(np.uint8)
