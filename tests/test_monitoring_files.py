"""Rules and dashboard in helm/tandem/files: tested by promtool, and against the exposed names."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.metric_table import OWNERS, by_series_name
from common.metrics import Metrics
from helm import dashboard
from tests.scrape import exposed_names, samples, text_of

FILES = dashboard.FILE.parent
RULES = ("alerts.yaml", "records.yaml")
WANTED = {"DraftDown", "AcceptanceCollapse", "BlocksExhausted", "QueueGrowing", "TargetStalled"}
FROM_SCRAPING = {"le", "instance", "job"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is missing; apt-get install prometheus, or brew install prometheus",
)


def _promtool(*args: str | Path) -> None:
    done = subprocess.run(["promtool", *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _rules() -> Iterator[dict[str, Any]]:
    for name in RULES:
        for group in yaml.safe_load((FILES / name).read_text())["groups"]:
            yield from group["rules"]


def _queries() -> list[str]:
    panels = dashboard.dashboard()["panels"]
    queries = [t["expr"] for p in panels for t in p.get("targets", ())]
    queries += [v["query"] for v in dashboard.dashboard()["templating"]["list"]]
    return [rule["expr"] for rule in _rules()] + queries


@needs_promtool
def test_rules_are_well_formed() -> None:
    _promtool("check", "rules", *(FILES / name for name in RULES))


@needs_promtool
@pytest.mark.parametrize("name", RULES)
def test_rules_do_what_their_tests_say(name: str) -> None:
    _promtool("test", "rules", FILES / "tests" / name)


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    tests = yaml.safe_load((FILES / "tests" / "alerts.yaml").read_text())["tests"]
    fired = {r["alertname"] for t in tests for r in t["alert_rule_test"] if r.get("exp_alerts")}
    alerts = [rule for rule in _rules() if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == fired
    assert {"Tandem" + name for name in WANTED} <= fired
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_every_record_is_tested() -> None:
    tests = yaml.safe_load((FILES / "tests" / "records.yaml").read_text())["tests"]
    asked = " ".join(e["expr"] for t in tests for e in t["promql_expr_test"])
    records = [rule["record"] for rule in _rules() if "record" in rule]
    assert records
    assert [name for name in records if name not in asked] == []


def test_the_dashboard_is_fresh() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "run python -m helm.dashboard"


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= dashboard.WIDTH
        taken |= cells


def test_every_name_is_exposed_by_its_owner_with_the_labels_that_are_asked_for() -> None:
    known = by_series_name()
    names: dict[str, set[str]] = {}
    for service in OWNERS:
        metrics = Metrics(service)
        metrics.of("m")
        names[service] = exposed_names(text_of(metrics))
        exposed = {s.name for s in samples(text_of(metrics))}
        assert exposed <= known.keys()
    records = {rule["record"]: rule["expr"] for rule in _rules() if "record" in rule}
    for query in _queries():
        used = re.findall(r"\btandem_\w+", query)
        recorded = re.findall(r"\btandem:[\w:]+", query)
        assert used or recorded or query == "prometheus", query
        assert set(recorded) <= records.keys(), query
        for name in used:
            assert name in known, f"{name} in {query}"
            owner = known[name].owner
            assert known[name].name in names[owner if owner in names else OWNERS[0]]
        labels = FROM_SCRAPING | {"model", "pool"}
        labels |= {label for name in used for label in known[name].label_names}
        for clause in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            assert set(re.findall(r"\w+", clause)) <= labels, query
