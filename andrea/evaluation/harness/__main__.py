"""The command line of lm-eval with our model: python -m andrea.evaluation.harness run --model andrea --model_args checkpoint=…

The command `lm_eval` knows only the models that lm-eval itself registers: version 0.4 has no plug-in point for others.
This module registers ours, adds the folder of our tasks, and hands everything else over unchanged.
"""

import sys

from andrea.config import UserError
from andrea.evaluation.tasks import TASKS
from andrea.runtime.shared_cores import limit_spins


def main() -> None:
    if "run" in sys.argv[1:2] and "--include_path" not in sys.argv:
        sys.argv += ["--include_path", str(TASKS)]
    limit_spins()  # before torch is imported

    from lm_eval.__main__ import cli_evaluate

    from andrea.evaluation.harness import model  # noqa: F401 (registers `andrea`)

    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
