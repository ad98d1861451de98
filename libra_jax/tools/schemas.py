"""Checks untrusted values against untrusted JSON schemas. It runs on the event loop, so its time is bounded.

RE2 matches the patterns, in time linear in the text. The number of followed references is limited.
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
"""References followed for one value. Without a limit, a few definitions that refer to each other twice never end."""

_PATTERN_BYTES = 2**20
"""Memory of a compiled pattern in bytes. It also bounds the matching time per character."""

_NOTHING_ELSE: referencing.Registry[Any] = referencing.Registry()
"""Schemas outside its own that a `$ref` may lead to: none. Without this registry, jsonschema would fetch URLs."""

_reference_budget: contextvars.ContextVar[list[int]] = contextvars.ContextVar("reference_budget")
_root_schema: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("root_schema")


class _TooMany(Exception):
    """More than `MOST_REFERENCES` references were followed."""


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    """Returns the compiled pattern. None if RE2 does not support it, as with a pattern that looks ahead."""
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
        # RE2 takes linear time. Python's own engine may take forever on a text that a policy wrote.
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


def _additional_properties(validator: Any, subschema: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    patterns = [_compiled(pattern) for pattern in schema.get("patternProperties", ())]
    # Without one of the patterns, no one can say which properties are additional: accept them all.
    if None in patterns:
        return
    extras = [
        name
        for name in instance
        if name not in schema.get("properties", {}) and not any(pattern.search(name) for pattern in patterns)
    ]
    for name in extras:
        if validator.is_type(subschema, "object"):
            yield from validator.descend(instance[name], subschema, path=name)
        elif not subschema:
            yield jsonschema.ValidationError(f"Additional properties are not allowed ({name!r} was unexpected)")


def _unevaluated_properties(validator: Any, subschema: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    """Checks only schemas without `patternProperties`. jsonschema would match others with the unbounded `re`."""
    if "patternProperties" not in json.dumps(_root_schema.get()):
        yield from jsonschema.Draft202012Validator.VALIDATORS["unevaluatedProperties"](
            validator, subschema, instance, schema
        )


def _counted(keyword: str) -> Any:
    follow = jsonschema.Draft202012Validator.VALIDATORS[keyword]

    def counted(validator: Any, reference: str, instance: object, schema: object) -> Iterator[Any]:
        # Counted in a context variable, because all values share the validators.
        budget = _reference_budget.get()
        budget[0] -= 1
        if budget[0] < 0:
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
"""Validator of JSON schema draft 2020-12. One difference: 1.0 is not an integer, because tools are Python code."""


@functools.lru_cache(maxsize=1024)  # each rollout makes a toolbox, and a check takes a millisecond
def problem_of(text: str) -> str:
    """Returns why the JSON text is not a valid JSON schema. Empty if it is valid."""
    try:
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
    except jsonschema.SchemaError as error:
        return f"{error.json_path}: {error.message}"
    resource = referencing.jsonschema.DRAFT202012.create_resource(json.loads(text))
    return _lost_reference(resource, _NOTHING_ELSE.resolver_with_root(resource))


def _lost_reference(resource: referencing.Resource[Any], resolver: Any) -> str:
    """Returns the problem of a reference in a schema or in a schema inside it. Empty if there is none."""
    contents = resource.contents
    for key in ("$ref", "$dynamicRef"):
        if not isinstance(contents, Mapping) or key not in contents:
            continue
        try:
            target: object = resolver.lookup(contents[key]).contents
        except (referencing.exceptions.Unresolvable, ValueError, TypeError):  # the last two: ill-formed pointers
            target = None
        if not isinstance(target, Mapping | bool):
            return f"its {key} {contents[key]!r} leads to no schema within it, and none is fetched"
    lost = (_lost_reference(inner, resolver.in_subresource(inner)) for inner in resource.subresources())
    return next(filter(None, lost), "")


def mismatch(value: object, schema: Mapping[str, Any], name: str) -> str:
    """Returns why a value does not match a JSON schema, in a few words. Empty if it matches.

    A pattern that RE2 does not support counts as matched. The tool that offers the schema checks its arguments itself.

    Args:
      value: A value of JSON's types.
      schema: A schema for which `problem_of` is empty.
      name: Name of the value, for the message.
    """
    # A list, so that the validators can count down in place.
    _reference_budget.set([MOST_REFERENCES])
    _root_schema.set(schema)
    try:
        validator = _Validator(schema, registry=_NOTHING_ELSE)
        error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except RecursionError:
        return f"the {name} are nested too deeply"
    except _TooMany:
        return f"the {name} cannot be checked: their schema's references lead on and on"
    except Exception as odd:  # in a part that is a schema only through a reference, which `problem_of` does not check
        return f"the tool's own schema cannot be applied to the {name} ({type(odd).__name__})"
    return "" if error is None else f"{name}{error.json_path.removeprefix('$')}: {error.message}"
