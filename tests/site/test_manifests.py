"""The manifests in the documentation fit Kubernetes's own schemas, without unknown fields."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

JOB = yaml.safe_load(Path(__file__).parents[2].joinpath("docs", "kubernetes", "mpijob.yaml").read_text())
ROLES = JOB["spec"]["mpiReplicaSpecs"]


def validate(spec):
    # The schema of an MPIJob is not part of Kubernetes, but that of the pods that it makes is.
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("role", ROLES)
def test_pods_fit_the_schema(role):
    validate(ROLES[role]["template"]["spec"])


def test_a_field_with_a_mistake_does_not():
    spec = ROLES["Worker"]["template"]["spec"]
    with pytest.raises(kubernetes_validate.ValidationError, match="'readynessProbe' was unexpected"):
        validate({**spec, "containers": [{**spec["containers"][0], "readynessProbe": {}}]})
