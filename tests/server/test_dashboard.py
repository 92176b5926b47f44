"""dashboards/grafana.json uses only metrics and labels that the server has."""

import json
import re
from pathlib import Path

from .harness import Server

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "grafana.json"
METRIC = re.compile(r"(vllm:\w+)(\{[^}]*\})?")


def test_the_dashboard_asks_for_what_is_there(server: Server) -> None:
    server.complete(prompt="def f(", max_tokens=8)
    there: dict[str, set[str]] = {}
    for line in server.get("/metrics").body.decode().splitlines():
        if not line.startswith("#"):
            name, labels = re.match(r"([\w:]+)(.*) ", line).groups()  # type: ignore[union-attr]
            there.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [(target["expr"], target["legendFormat"]) for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [(item["query"]["query"], "") for item in dashboard["templating"]["list"] if item["type"] == "query"]
    assert len(queries) > 15
    for query, legend in queries:
        assert query.count("(") == query.count(")")
        names = METRIC.findall(query)
        assert names, query
        grouped = re.findall(r"by \((\w+)\)", query) + re.findall(r"{{(\w+)}}", legend)
        for name, selector in names:
            assert name in there, name
            for label in re.findall(r"(\w+)=", selector):
                assert label in there[name], (name, label)
        for label in grouped:
            assert any(label in there[name] for name, _ in names), (query, label)
