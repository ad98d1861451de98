"""Objects against the schema of a CustomResourceDefinition, as strictly as `kubectl apply`: no unknown field.

The definition is the cluster's own: `kubectl get crd rayjobs.ray.io -o yaml`. Rules in CEL (x-kubernetes-validations)
are left to the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from libra_jax.protocols import ConfigError, DataError

SHOWN = 3
"""Problems named in an error, of those there are."""


def check(manifest: Mapping[str, Any], definition: Path) -> None:
    """Raises unless the object is as the definition has it.

    Raises:
      DataError: the file is no definition of the object's kind and version.
      ConfigError: the object is not valid; the fields are named.
    """
    validator = jsonschema.Draft202012Validator(strict(_schema(manifest, definition)))
    problems = sorted(validator.iter_errors(manifest), key=lambda error: error.json_path)
    if problems:
        named = "; ".join(f"{error.json_path.removeprefix('$.')}: {error.message}" for error in problems[:SHOWN])
        more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
        raise ConfigError(f"{definition}: the {manifest['kind']} is not as this definition has it: {named}{more}")


def strict(schema: Any) -> Any:
    """A structural schema as JSON schema that refuses unknown fields, but where the definition keeps them."""
    if isinstance(schema, list):
        return [strict(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: strict(value) for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    if "properties" in schema:
        found["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
        found["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("x-kubernetes-embedded-resource"):
        found["properties"] = {**_META, **found.get("properties", {})}
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and not keeps:
        found["additionalProperties"] = False
    if schema.get("nullable"):
        found.pop("nullable")
        return {"anyOf": [found, {"type": "null"}]}
    return found


_META: dict[str, Any] = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}
"""Every object has them; what metadata may hold is Kubernetes' own."""


def _schema(manifest: Mapping[str, Any], definition: Path) -> dict[str, Any]:
    group, _, version = manifest["apiVersion"].partition("/")
    try:
        documents = list(yaml.load_all(definition.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{definition}: cannot be read ({error})") from error
    for spec in (entry.get("spec", {}) for entry in documents if isinstance(entry, Mapping)):
        if spec.get("group") != group or spec.get("names", {}).get("kind") != manifest["kind"]:
            continue
        for offered in spec["versions"]:
            if offered["name"] == version and offered.get("served", True):
                schema: dict[str, Any] = dict(offered["schema"]["openAPIV3Schema"])
                schema["properties"] = {**schema.get("properties", {}), **_META}
                return schema
    raise DataError(
        f"{definition}: defines no {manifest['kind']} of {manifest['apiVersion']}; get the cluster's with: "
        f"kubectl get crd {manifest['kind'].lower()}s.{group} -o yaml"
    )
