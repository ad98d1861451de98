"""JSON schemas that others wrote, applied to values that others wrote, on the event loop: neither may hold it up.

Patterns are matched by RE2, whose time grows with the text alone. References are followed a limited number of times.
"""

from __future__ import annotations

import contextvars
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import re2
import referencing
import referencing.exceptions
import referencing.jsonschema

MOST_REFERENCES = 10_000
"""References followed for one value. A few definitions that refer to each other twice would else take for ever."""

_PATTERN_BYTES = 2**20
"""Memory of a compiled pattern, which bounds the time that it takes for a character."""

_NOTHING_ELSE: referencing.Registry[Any] = referencing.Registry()
"""Schemas that a `$ref` may lead to besides its own. Without the list, jsonschema would fetch addresses of others."""

_followed: contextvars.ContextVar[list[int]] = contextvars.ContextVar("followed")
_whole: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("whole")


class _TooMany(Exception):
    """`MOST_REFERENCES` were followed."""


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    """The pattern; None where RE2 does not know it, such as one that looks ahead."""
    options = re2.Options()
    options.max_mem = _PATTERN_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error:
        return None


def _pattern(validator: Any, pattern: str, instance: object, schema: object) -> Iterator[Any]:
    del schema
    if validator.is_type(instance, "string"):
        compiled = _compiled(pattern)
        if compiled is not None and compiled.search(instance) is None:
            yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: object) -> Iterator[Any]:
    del schema
    if validator.is_type(instance, "object"):
        for pattern, within in patterns.items():
            compiled = _compiled(pattern)
            for name, value in instance.items():
                if compiled is not None and compiled.search(name):
                    yield from validator.descend(value, within, path=name, schema_path=pattern)


def _additional_properties(validator: Any, others: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    patterns = [_compiled(pattern) for pattern in schema.get("patternProperties", ())]
    if None in patterns:
        return
    extras = [
        name
        for name in instance
        if name not in schema.get("properties", {}) and not any(pattern.search(name) for pattern in patterns)
    ]
    for name in extras:
        if validator.is_type(others, "object"):
            yield from validator.descend(instance[name], others, path=name)
        elif not others:
            yield jsonschema.ValidationError(f"Additional properties are not allowed ({name!r} was unexpected)")


def _unevaluated_properties(validator: Any, others: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    """Looks only where no pattern decides what was evaluated: jsonschema would match it by Python's `re`."""
    if "patternProperties" not in json.dumps(_whole.get()):
        yield from jsonschema.Draft202012Validator.VALIDATORS["unevaluatedProperties"](
            validator, others, instance, schema
        )


def _counted(keyword: str) -> Any:
    follow = jsonschema.Draft202012Validator.VALIDATORS[keyword]

    def counted(validator: Any, reference: str, instance: object, schema: object) -> Iterator[Any]:
        left = _followed.get()
        left[0] -= 1
        if left[0] < 0:
            raise _TooMany
        yield from follow(validator, reference, instance, schema) or ()

    return counted


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
        "unevaluatedProperties": _unevaluated_properties,
        "$ref": _counted("$ref"),
        "$dynamicRef": _counted("$dynamicRef"),
    },
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    ),
)
"""Of JSON schema draft 2020-12, but for 1.0, which is no integer to tools that are Python."""


@functools.lru_cache(maxsize=1024)  # each attempt has a toolbox, and a check takes a millisecond
def problem_of(text: str) -> str:
    """Returns what keeps the JSON text from being a JSON schema; empty: nothing."""
    try:
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
    except jsonschema.SchemaError as error:
        return f"{error.json_path}: {error.message}"
    resource = referencing.jsonschema.DRAFT202012.create_resource(json.loads(text))
    return _lost_reference(resource, _NOTHING_ELSE.resolver_with_root(resource))


def _lost_reference(resource: referencing.Resource[Any], resolver: Any) -> str:
    """Returns the problem of a reference in a schema or in those within it; empty if there is none."""
    contents = resource.contents
    for key in ("$ref", "$dynamicRef"):
        if not isinstance(contents, Mapping) or key not in contents:
            continue
        try:
            found: object = resolver.lookup(contents[key]).contents
        except (referencing.exceptions.Unresolvable, ValueError, TypeError):  # two of a pointer's odd ways
            found = None
        if not isinstance(found, Mapping | bool):
            return f"its {key} {contents[key]!r} leads to no schema within it, and none is fetched"
    lost = (_lost_reference(inner, resolver.in_subresource(inner)) for inner in resource.subresources())
    return next(filter(None, lost), "")


def mismatch(value: object, schema: Mapping[str, Any], name: str) -> str:
    """Returns what keeps a value from being as a JSON schema says, in a few words; empty: nothing.

    A pattern that RE2 does not know counts as matched: who offers the schema looks at the value again.

    Args:
      value: of JSON's kinds.
      schema: one without a `problem_of` it.
      name: of the value, for the words.
    """
    _followed.set([MOST_REFERENCES])
    _whole.set(schema)
    try:
        validator = _Validator(schema, registry=_NOTHING_ELSE)
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except RecursionError:
        return f"the {name} are nested too deeply"
    except _TooMany:
        return f"the {name} cannot be checked: their schema's references lead on and on"
    except Exception as odd:  # of a part that only a reference makes a schema, which nobody has checked
        return f"the tool's own schema cannot be applied to the {name} ({type(odd).__name__})"
    return "" if error is None else f"{name}{error.json_path.removeprefix('$')}: {error.message}"
