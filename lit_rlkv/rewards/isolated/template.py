"""A process that renders a stranger's chat template, under limits of time, memory and length.

Its input is a JSON object: `template`, `variables`, `chats` to render, and the limits. Its status is 0 if all
end within the limits; else it says what they exceed, or a signal ends it. Other errors are left to whoever
renders the template in earnest. This file is run by its path.
"""

import json
import resource
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
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
    """Render each chat with and without a generation prompt."""
    job = json.load(sys.stdin)
    used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])) + 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + job["limit_s"],) * 2)
    with suppress(OSError):  # Linux alone has this file, and keeps this limit
        n_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes + job["limit_bytes"],) * 2)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value)
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.globals["raise_exception"] = _refuse
    try:
        template = environment.from_string(job["template"])
        for chat in job["chats"]:
            for adds in (False, True):
                _render(template, chat, adds, job)
    except MemoryError:
        sys.exit("it needs too much memory")
    except Exception:
        return  # it is no template


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _render(template: Template, chat: list[dict[str, str]], adds: bool, job: dict[str, Any]) -> None:
    n_left = job["limit_characters"]
    try:
        given = {"messages": chat, "add_generation_prompt": adds, "tools": None, "documents": None}
        for part in template.generate(given | job["variables"]):
            n_left -= len(part)
            if n_left < 0:
                sys.exit("its text is too long")
    except MemoryError:
        raise
    except Exception:
        return  # as of a template that takes no second turn


if __name__ == "__main__":
    main()
