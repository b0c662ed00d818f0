"""Pages from jinja templates: text in HTML is escaped, a name without a value is an error."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def fill_template(template: Path, filters: Mapping[str, Callable[..., Any]] = {}, **values: object) -> str:
    """Return the page that a template makes of values."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=template.suffix == ".html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template.name).render(values)
