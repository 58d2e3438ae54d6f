"""The hot operations, one folder each: the plain definition, and the Triton kernel that computes the same."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from lit_rlkv.kernels.interpreter import accept_numpy_2_5

    accept_numpy_2_5()
