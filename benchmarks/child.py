"""One fresh process of a benchmark: `python -m benchmarks.child MODULE FUNCTION TOLD`."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Call the function, write down what it gives, and end at once."""
    module, function, told = sys.argv[1:]
    request = json.loads(told)
    result = getattr(import_module(f"benchmarks.{module}"), function)(**request["options"])
    Path(request["answer"]).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # a peer's exit handlers may wait for a server that is not there


if __name__ == "__main__":
    main()
