"""Runs seeded scenarios of the host half: python -m tools.simulate --steps 1000000 [--seed S].

Seeds count up from S until that many engine steps have run.  A failing seed is printed and the
command ends with 1; `--seed X --steps 1` runs that one again.
"""

import argparse
import sys
import time
import traceback

from tests.simulation import scenario

PRINT_EVERY_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seed, steps, began = options.seed, 0, time.monotonic()
    printed = began
    while steps < options.steps:
        try:
            steps += scenario.run(seed)
        except AssertionError:
            traceback.print_exc()
            print(f"failing seed: {seed}")
            return 1
        seed += 1
        if time.monotonic() - printed > PRINT_EVERY_S:
            printed = time.monotonic()
            print(f"{steps} steps, seeds up to {seed - 1}", file=sys.stderr)
    took = time.monotonic() - began
    print(f"{steps} steps of {seed - options.seed} scenarios in {took:.0f} s: no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
