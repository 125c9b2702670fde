"""What the chart refuses, each with a sentence that says what to do."""

from __future__ import annotations

import pytest

from tests.chart.rendering import RefusedError, template

TARGET = "targets: {pools: {main: {%s}}}"
DRAFT = "drafts: {pools: {ngram: {%s}}}"
HUB = "drafter: model, model: {source: hub}"

REFUSED = {
    "unknown key": ("gatway: {replicas: 1}", "additional properties 'gatway' not allowed"),
    "unknown key of a pool": (
        TARGET % "replcas: 2",
        "at '/targets/pools/main': additional properties 'replcas' not allowed",
    ),
    "unknown key of a group": (TARGET % "gpu: {number: 2}", "additional properties 'number'"),
    "wrong type": (TARGET % "replicas: two", "at '/targets/pools/main/replicas': got string"),
    "wrong choice": ("telemetry: {sampler: some}", "must be one of 'always_on'"),
    "endpoint without a port": (
        "telemetry: {otlpEndpoint: 'http://collector'}",
        "at '/telemetry/otlpEndpoint': 'http://collector' does not match pattern",
    ),
    "registry with a scheme": (
        "image: {registry: 'https://registry.example.com'}",
        "at '/image/registry': 'https://registry.example.com' does not match pattern",
    ),
    "cores that are no number": (
        TARGET % "resources: {limits: {cpu: abc}}",
        'targets.pools.main.resources: cpu is "abc", must be a number of cores, such as 2 or 500m.',
    ),
    "the chart's port as a variable": (
        TARGET % "extraEnv: [{name: TANDEM_PORT, value: '9'}]",
        "targets.pools.main.extraEnv: TANDEM_PORT belongs to the chart: probes",
    ),
    "both autoscalers": (
        TARGET % "autoscaling: {hpa: {enabled: true}, keda: {enabled: true, serverAddress: a}}",
        "targets.pools.main.autoscaling has both hpa and keda enabled: they would undo each"
        " other's scaling. Enable one of them.",
    ),
    "both autoscalers of the gateway": (
        "gateway: {autoscaling: {hpa: {enabled: true}, keda: {enabled: true}}}",
        "gateway.autoscaling has both hpa and keda enabled",
    ),
    "keda without Prometheus": (
        TARGET % "autoscaling: {keda: {enabled: true}}",
        "targets.pools.main.autoscaling.keda.serverAddress is empty: KEDA asks Prometheus; name it",
    ),
    "fewer at most than at least": (
        "gateway: {autoscaling: {maxReplicas: 1}}",
        "gateway.autoscaling.maxReplicas is 1, must be minReplicas (2) or more",
    ),
    "short grace": (
        DRAFT % "drainSeconds: 60",
        "drafts.pools.ngram.terminationGracePeriodSeconds is 45, must be above 70: preStopSeconds"
        " (5) + drainSeconds (60) + 5 s to flush spans and close. Raise it, or lower one",
    ),
    "short grace of the gateway": (
        "gateway: {terminationGracePeriodSeconds: 40}",
        "gateway.terminationGracePeriodSeconds is 40, must be above 40",
    ),
    "GPU without a resource name": (
        TARGET % "gpu: {count: 1}",
        "targets.pools.main.gpu.resource is empty, but the pool wants a GPU (gpu.count 1, device"
        ' ""): say what the device plugin calls it, such as nvidia.com/gpu.',
    ),
    "CUDA without a resource name": (
        TARGET % "device: cuda",
        "targets.pools.main.gpu.resource is empty",
    ),
    "CUDA without a GPU": (
        TARGET % "device: cuda, gpu: {resource: nvidia.com/gpu}",
        "targets.pools.main.device is cuda, but gpu.count is 0: raise gpu.count",
    ),
    "idle GPU": (
        TARGET % "device: cpu, gpu: {resource: nvidia.com/gpu, count: 1}",
        "the GPU would be idle. Set gpu.count to 0",
    ),
    "n-grams of a model": (
        DRAFT % "model: {source: pvc, claim: models}",
        "drafts.pools.ngram.drafter is ngram, which uses neither model nor GPU (model.source is"
        " pvc, gpu.count 0): set drafter to model, or leave those out.",
    ),
    "target with a drafter": (TARGET % "drafter: model", "only drafts have one. Remove it"),
    "hub without an id": (DRAFT % HUB, "drafts.pools.ngram.model.id is empty, but model.source"),
    "volume without a claim": (
        TARGET % "model: {source: pvc}",
        "targets.pools.main.model.claim is empty, but model.source is pvc: name the",
    ),
    "no pool": (
        "targets: {pools: {main: null}}",
        "targets.pools is empty: nothing would decide tokens. Name a pool",
    ),
    "name of a pool": (
        "targets: {pools: {Main_One: {}}}",
        "targets.pools.Main_One: a pool's name is a part of DNS names. Use 1 to 20 lower-case",
    ),
    "setting of the chart": (
        TARGET % "settings: {drain_seconds: 5}",
        "targets.pools.main.settings.drain_seconds belongs to the chart: use drainSeconds.",
    ),
    "setting as a flag": (
        TARGET % "settings: {max-rows: 5}",
        'targets.pools.main.settings: "max-rows" is no TOML name of a setting; write it with'
        " underscores",
    ),
    "nothing replaced": (
        "gateway: {strategy: {maxSurge: 0%}}",
        "gateway.strategy has maxSurge and maxUnavailable both 0: no pod could ever be replaced.",
    ),
    "name that names no Service": (
        "fullnameOverride: 1st",
        'the release is called "1st", which names no Service: set fullnameOverride to',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_a_sentence_that_helps(name: str) -> None:
    values, sentence = REFUSED[name]
    with pytest.raises(RefusedError) as refused:
        template("minimal-cpu-values", values)
    assert sentence in str(refused.value)


def test_the_chart_alone_says_where_to_begin() -> None:
    with pytest.raises(RefusedError, match=r"start from one of ci/\*-values.yaml"):
        template()


def test_an_older_kubernetes_is_refused() -> None:
    template("minimal-cpu-values", "", "tandem", "--kube-version=1.30.0")
    with pytest.raises(RefusedError, match=r"requires kubeVersion: >=1.30.0-0"):
        template("minimal-cpu-values", "", "tandem", "--kube-version=1.29.9")
