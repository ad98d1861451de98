"""Objects against a CustomResourceDefinition: what kubectl would refuse is refused, the field named."""

import crds
import pytest
import yaml

from libra_jax.protocols import ConfigError, DataError

DEFINITION = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
spec:
  group: stable.example.com
  names: {kind: CronTab, plural: crontabs}
  versions:
  - name: v1
    served: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          apiVersion: {type: string}
          kind: {type: string}
          metadata: {type: object}
          spec:
            type: object
            required: [image]
            properties:
              image: {type: string}
              replicas: {type: integer, minimum: 1}
              port: {x-kubernetes-int-or-string: true}
              labels: {type: object, additionalProperties: {type: string}}
              free: {type: object, x-kubernetes-preserve-unknown-fields: true}
              pods: {type: array, items: {type: object, properties: {name: {type: string}}}}
              suspend: {type: boolean, nullable: true}
              template: {type: object, x-kubernetes-embedded-resource: true, properties: {spec: {type: object}}}
"""


@pytest.fixture
def definition(tmp_path):
    file = tmp_path / "crontabs.yaml"
    file.write_text(DEFINITION)
    return file


def crontab(**spec):
    metadata = {"name": "mine", "namespace": "team"}
    return {
        "apiVersion": "stable.example.com/v1",
        "kind": "CronTab",
        "metadata": metadata,
        "spec": {"image": "i", **spec},
    }


def test_what_the_definition_allows_is_taken(definition):
    template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {}}
    crds.check(crontab(replicas=2, labels={"a": "b"}, free={"x": {"y": 1}}), definition)
    crds.check(crontab(pods=[{"name": "a"}], suspend=None, template=template), definition)
    crds.check(crontab(port=80), definition)
    crds.check(crontab(port="http", suspend=True), definition)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"replica": 2}, "spec: .*'replica' was unexpected"),
        ({"pods": [{"names": "a"}]}, r"spec.pods\[0\]: .*'names' was unexpected"),
        ({"replicas": "2"}, "spec.replicas: '2' is not of type 'integer'"),
        ({"replicas": 0}, "spec.replicas: 0 is less than the minimum"),
        ({"labels": {"a": 1}}, "spec.labels.a: 1 is not of type 'string'"),
        ({"port": 1.5}, "spec.port: 1.5 is not valid"),
        ({"image": None}, "spec.image: None is not of type 'string'"),
        ({"template": {"spec": {"x": 1}}}, "spec.template.spec: .*'x' was unexpected"),
    ],
)
def test_what_it_does_not_allow_is_refused_by_name(spec, problem, definition):
    with pytest.raises(ConfigError, match=problem):
        crds.check(crontab(**spec), definition)


def test_a_definition_of_something_else_is_refused(definition):
    other = {**crontab(), "apiVersion": "ray.io/v1", "kind": "RayJob"}
    with pytest.raises(DataError, match=r"defines no RayJob of ray.io/v1; .*kubectl get crd rayjobs.ray.io -o yaml"):
        crds.check(other, definition)
    unserved = yaml.safe_load(DEFINITION)
    unserved["spec"]["versions"][0]["served"] = False
    definition.write_text(yaml.safe_dump(unserved))
    with pytest.raises(DataError, match="defines no CronTab"):
        crds.check(crontab(), definition)
    definition.write_text("a: [")
    with pytest.raises(DataError, match="cannot be read"):
        crds.check(crontab(), definition)
