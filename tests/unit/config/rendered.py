"""The ConfigMap that Cilium's chart rendered."""

from __future__ import annotations

from pathlib import Path

import yaml

CHART = yaml.safe_load((Path(__file__).parent / "chart_default.yaml").read_text(encoding="utf-8"))
