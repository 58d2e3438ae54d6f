"""The entry point for launchers that start a file: `fabric run --devices 8 scripts/fit.py key=value ...`."""

from lit_rlkv.fit import main

if __name__ == "__main__":
    main()
