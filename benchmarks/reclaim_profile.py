"""Where the time of a warm reclaim of 43 layers goes: cProfile by own time."""

from __future__ import annotations

import cProfile
import pstats

from reclaim import model_of

import memreclaim as mr


def main() -> None:
    """Reclaim once to load kernels, then under the profiler."""
    for _ in range(2):
        mr.Reclaimer().reclaim(model_of(2, 2, "cuda"))
    model = model_of(43, 2, "cuda")
    profile = cProfile.Profile()
    profile.runcall(mr.Reclaimer().reclaim, model)
    pstats.Stats(profile).sort_stats("tottime").print_stats(28)


if __name__ == "__main__":
    main()
