"""Run a program of the package on a disk that is full from some file on.

    python -m tests.full_disk PROGRAM PLACE N_BYTES [ARGUMENT ...]

Once a file or folder is written whose path has PLACE in it, no file can grow beyond N_BYTES.
"""

import resource
import sys
from importlib import import_module

from lit_rlkv import files

beside = files._beside
program, place, n_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])


def beside_or_full(path, ending):
    if place and place in str(path):
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return beside(path, ending)


if __name__ == "__main__":
    files._beside = beside_or_full
    sys.argv = [program, *sys.argv[4:]]
    import_module(program).main()
