"""Makes dry runs of `benchmarks/activation_bytes.py` in a process of its own and prints their results as a JSON list.

python dry_run_activations.py '[{"num_layers": 2, ...}, ...]'
"""

import json
import sys
from dataclasses import asdict

from activation_bytes import Case, dry_run


def main(cases: str) -> None:
    print(json.dumps([asdict(dry_run(Case(**case))) for case in json.loads(cases)]))


if __name__ == "__main__":
    main(sys.argv[1])
