"""A process that renders a stranger's chat template under limits of time, memory and length.

Its status is 0 if all chats end within the limits; other errors are left to whoever renders in earnest. This
file is run by its path.
"""

import json
import resource
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from jinja2 import DictLoader, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """The tag of transformers around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    """Render the chats of the JSON object on the input."""
    job = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (job["limit_s"],) * 2)
    with suppress(OSError):  # Linux alone has this file, and keeps this limit
        n_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes + job["limit_bytes"],) * 2)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        loader=DictLoader({"chat": job["template"]}),
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value)
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.globals["raise_exception"] = json.loads  # raises, too
    for given in job["chats"]:
        n_left = job["limit_characters"]
        try:
            for part in environment.get_template("chat").generate(given | job["variables"]):
                n_left -= len(part)
                if n_left < 0:
                    sys.exit("its text is too long")
        except MemoryError:
            sys.exit("it needs too much memory")
        except Exception:  # as of a template that takes no second turn
            continue


if __name__ == "__main__":
    main()
