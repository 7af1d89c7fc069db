"""A rank of the tiny engine as a process, to be killed: ``rank_process.py CHECKPOINT TP_RANK PORT [planted]``.

Prints its URL. SIGUSR1 mends the planted layer and reclaims again, SIGUSR2 flips a bit of a served twin, SIGTERM ends
it.
"""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import replace

import torch
from observed import QUIET, Engine, plant

from memreclaim.rebuild import checkpoint_source
from memreclaim.service.demo import SteadyLoad, first_weight


def main(path: str, tp_rank: str, port: str, *planted: str) -> None:
    """Serve until told to stop."""
    torch.set_num_threads(1)
    settings = replace(QUIET, port=int(port), probe_seconds=2.0, audit_seconds=5.0)
    made = Engine(path, settings, source=checkpoint_source(path), tp_rank=int(tp_rank))
    if planted:
        plant(made.model)
    made.service.rank.ranks = 2
    # On a busy machine even the tiny twin takes longer than a probe may by default, and nothing would be sampled.
    made.service.probe._longest = 10.0
    made.service.probe.baseline(*first_weight(made.model))
    made.service.reclaim_at_start()
    load = SteadyLoad(made.server, 0.5)
    stop = threading.Event()

    def mend(*_: object) -> None:
        plant(made.model)  # the same bit once more
        made.service.desk.submit("reclaim")

    def damage(*_: object) -> None:
        backing = made.reclaimer.ledger.entries()[0].backing
        assert backing is not None
        assert backing.twin is not None
        backing.twin.packed.view(-1)[77] ^= 4

    signal.signal(signal.SIGUSR1, mend)
    signal.signal(signal.SIGUSR2, damage)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with made.server:
        load.start()
        print(made.service.url, flush=True)  # noqa: T201  how the test learns the port
        stop.wait()
        load.close()
    made.service.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
