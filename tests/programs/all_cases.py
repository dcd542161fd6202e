"""The whole catalogue."""

from __future__ import annotations

import cases_aggregate
import cases_classification
import cases_values

CASES = {**cases_aggregate.CASES, **cases_classification.CASES, **cases_values.CASES}
