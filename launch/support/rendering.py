"""Fills the templates of launch/templates. No value can end its line or its text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import yaml

Manifest = Mapping[str, object]
"""An object of Kubernetes, as YAML has it."""

TEMPLATES = Path(__file__).parents[1] / "templates"


def shell(template: str, **values: object) -> str:
    """Returns a script; in its template, `value | quote` is one word for a shell."""
    environment = _environment()
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(template).render(values)


def manifests(template: str, **values: object) -> list[Manifest]:
    """Returns the objects of a YAML template, in which every value is written as JSON, a subset of YAML."""
    markup = markupsafe.Markup
    environment = _environment(
        # Marks the result of a macro, so that `finalize` does not write it twice.
        autoescape=True,
        finalize=lambda value: value if isinstance(value, markup) else markup(json.dumps(value, default=dict)),
    )
    return [entry for entry in yaml.safe_load_all(environment.get_template(template).render(values)) if entry]


def _environment(**options: Any) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )


def dump(objects: Sequence[Manifest]) -> str:
    """Returns the objects as YAML with sorted keys, so that a diff shows only real differences."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=True, explicit_start=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and every object in full, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
