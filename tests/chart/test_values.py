"""values.yaml: every value is described, known to the schema, and changes what is rendered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from common.config import ModelConfig, ServiceConfig
from draft_service.config import DraftConfig
from gateway.config import GatewayConfig
from helm import values_table
from target_service.config import TargetConfig
from tests.chart.rendering import CHART, template

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
BASES = ("minimal-cpu-values", "everything-on-values")  # a value has an effect on one of them
KEDA = {"enabled": True, "serverAddress": "http://prometheus:9090"}
OBJECTS = [{"name": "other", "value": "other"}]

# A value to change to, where the type alone does not tell one.
OTHER: dict[str, Any] = {
    "telemetry.otlpEndpoint": "http://other:4317",
    "telemetry.sampler": "always_on",
    "logging.level": "debug",
    "logging.format": "text",
    "image.pullPolicy": "Always",
    "image.pullSecrets": ["other"],
    "monitoring.podMonitor.interval": "7s",
    "gateway.service.type": "NodePort",
    "gateway.extraTargets": ["dns:other:1"],
    "gateway.extraDrafts": ["10.0.0.1:1"],
    "containerSecurityContext.capabilities.drop": ["NET_RAW"],
    "poolDefaults.drafter": "model",
    "poolDefaults.model.source": "hub",
    "poolDefaults.gpu.count": 1,
    "poolDefaults.device": "cuda",
    "poolDefaults.dtype": "float32",
}
for _tier in ("gateway", "poolDefaults"):
    OTHER |= {
        f"{_tier}.settings": {"other": 1},
        f"{_tier}.resources": {"limits": {"cpu": 7}},
        f"{_tier}.autoscaling.metrics": {"other": 1},
        f"{_tier}.extraArgs": ["--other"],
        f"{_tier}.terminationGracePeriodSeconds": 99,
    }

# What else must hold for a value to matter; the same on both sides of the comparison.
_GPU = {"poolDefaults": {"gpu": {"resource": "gpu", "count": 1}, "drafter": "model"}}
_HUB = {"source": "hub", "id": "a/b"}
CONTEXT: dict[str, Any] = {
    "poolDefaults.model.id": {
        "poolDefaults": {"drafter": "model", "model": {"source": "hub", "id": "a/b"}}
    },
    "poolDefaults.model.claim": {
        "poolDefaults": {"drafter": "model", "model": {"source": "pvc", "claim": "a"}}
    },
    "poolDefaults.model.path": {
        "poolDefaults": {"drafter": "model", "model": {"source": "pvc", "claim": "a"}}
    },
    "poolDefaults.model.source": {"poolDefaults": {"drafter": "model", "model": {"id": "a/b"}}},
    "poolDefaults.model.hubTokenSecret.name": {"poolDefaults": {"drafter": "model", "model": _HUB}},
    "poolDefaults.model.hubTokenSecret.key": {
        "poolDefaults": {"drafter": "model", "model": {**_HUB, "hubTokenSecret": {"name": "a"}}}
    },
    "poolDefaults.gpu.resource": _GPU,
    "poolDefaults.gpu.count": {"poolDefaults": {"gpu": {"resource": "gpu"}, "drafter": "model"}},
    "poolDefaults.device": _GPU | {"poolDefaults": {**_GPU["poolDefaults"], "device": "cuda:0"}},
    "serviceAccount.name": {"serviceAccount": {"create": False}},
    "poolDefaults.autoscaling.behavior": {"poolDefaults": {"autoscaling": {"keda": KEDA}}},
}
for _tier in ("gateway", "poolDefaults"):
    for _name in ("enabled", "pollingInterval"):
        CONTEXT[f"{_tier}.autoscaling.keda.{_name}"] = {
            _tier: {"autoscaling": {"keda": {**KEDA, "enabled": _name != "enabled"}}}
        }
    CONTEXT[f"{_tier}.autoscaling.keda.serverAddress"] = {_tier: {"autoscaling": {"keda": KEDA}}}


def _leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, values


LEAVES = dict(_leaves(VALUES))
OF_POOLS = ("targets.pools", "drafts.pools")


def _other(path: str) -> Any:
    """Another value for a leaf."""
    if path in OTHER:
        return OTHER[path]
    match LEAVES[path]:
        case bool(value):
            return not value
        case int(value):
            return value + 1
        case str(value):
            return value + "0" if value else "other"
        case dict():
            return {"other": "other"}
        case list():
            return OBJECTS
        case value:
            raise AssertionError(f"{path}: no other value than {value!r} is known")


def _merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merged(below.get(key), value) for key, value in above.items()}


@pytest.mark.parametrize("path", [path for path in LEAVES if path not in OF_POOLS])
def test_every_value_has_an_effect(path: str) -> None:
    change: Any = _other(path)
    for key in reversed(path.split(".")):
        change = {key: change}
    context = CONTEXT.get(path, {})
    before = yaml.safe_dump(context) if context else ""
    after = yaml.safe_dump(_merged(context, change))
    # A refusal is no effect: it fails the test.
    assert any(template(base, before) != template(base, after) for base in BASES)


def test_pools_have_an_effect() -> None:
    for tier in ("targets", "drafts"):
        values = yaml.safe_dump({tier: {"pools": {"other": {"replicas": 7}}}})
        assert "replicas: 7" in template(BASES[0], values)


def test_a_pool_may_say_all_that_its_defaults_say() -> None:
    """And what it says wins, falsehood and zero too."""
    own = {**VALUES["poolDefaults"], "replicas": 0, "preStopSeconds": 0, "pdb": {"enabled": False}}
    del own["drafter"]
    values = {
        "poolDefaults": {"replicas": 5, "preStopSeconds": 9, "pdb": {"enabled": True}},
        "targets": {"pools": {"main": own}},
    }
    objects = list(yaml.safe_load_all(template(BASES[0], yaml.safe_dump(values))))
    made = {o["kind"]: o for o in objects if o and o["metadata"]["name"] == "tandem-target-main"}
    assert made["Deployment"]["spec"]["replicas"] == 0
    (container,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert "lifecycle" not in container
    assert "PodDisruptionBudget" not in made


def test_every_value_is_described() -> None:
    rows = values_table.rows((CHART / "values.yaml").read_text())
    described = {row.path: row.meaning for row in rows}
    for path in LEAVES:
        on_a_line = path if path in described else path.rpartition(".")[0]  # {cpu: 500m, ...}
        assert described[on_a_line], f"{on_a_line} has no comment"


def test_the_table_is_fresh() -> None:
    text = values_table.README.read_text()
    assert values_table.BEGIN in text
    assert text == values_table.text(), "run python -m helm.values_table"


def test_the_schema_is_closed_and_has_nothing_that_values_lack() -> None:
    def check(schema: dict[str, Any], values: Any, path: str) -> None:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        if "properties" not in schema:
            return
        assert schema["additionalProperties"] is False, path
        if path in ("gateway.resources", "poolDefaults.resources"):
            return  # as Kubernetes has it
        assert schema["properties"].keys() - {"global"} == values.keys(), path
        for key, inner in schema["properties"].items():
            if key != "global":
                check(inner, values[key], f"{path}.{key}".lstrip("."))

    check(SCHEMA, VALUES, "")


def _choices(kind: type[Any], name: str) -> set[str]:
    return set(kind.__dataclass_fields__[name].metadata["choices"])


def test_the_schema_knows_the_choices_of_the_services() -> None:
    pool = SCHEMA["definitions"]["pool"]["properties"]
    logging = SCHEMA["properties"]["logging"]["properties"]
    assert set(pool["dtype"]["enum"]) == _choices(ModelConfig, "dtype")
    assert set(pool["drafter"]["enum"]) == _choices(DraftConfig, "drafter")
    assert set(logging["level"]["enum"]) == _choices(ServiceConfig, "log_level")
    assert set(logging["format"]["enum"]) == _choices(ServiceConfig, "log_format")


def test_ports_and_drain_are_the_services_own() -> None:
    for kind, port in ((GatewayConfig, 7070), (TargetConfig, 7071), (DraftConfig, 7072)):
        assert kind.__dataclass_fields__["port"].default == port
    drain = ServiceConfig.__dataclass_fields__["drain_seconds"].default
    assert LEAVES["gateway.drainSeconds"] == LEAVES["poolDefaults.drainSeconds"] == drain
