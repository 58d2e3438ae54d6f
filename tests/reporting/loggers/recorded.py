"""A logger that keeps what it gets, and fails where it is told to."""

from lit_rlkv.reporting.loggers import RunLogger, RunStart


class KeepingLogger(RunLogger):
    """`calls` has the name and the arguments of each call, in order."""

    def __init__(self, fails_at=(), last_iteration=0, figures_every=None):
        self.fails_at = fails_at
        self.last_iteration = last_iteration
        self.figures_every = figures_every
        self.calls = []

    def _keep(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.fails_at:
            raise OSError("no space left on device")

    def open(self, start):
        self._keep("open", start)
        return "look here"

    def scalars(self, metrics, place):
        self._keep("scalars", dict(metrics), place)

    def table(self, name, headings, rows, place):
        self._keep("table", name, rows, place)

    def figures(self, pictures, place):
        self._keep("figures", list(pictures), place)

    def file(self, path, kind):
        self._keep("file", path, kind)

    def close(self, is_complete):
        self._keep("close", is_complete)
        return "upload it so"

    def named(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


def start_in(run_dir, resumed_at=0, **config):
    return RunStart(run_dir, config, {"python": "3.11"}, resumed_at)


def place(iteration):
    return {
        "iteration": float(iteration),
        "rollout/tokens": 100.0 * iteration,
        "time/wall_clock_s": 2.0 * iteration,
    }
