"""Four real processes with gloo: they agree, disagree, one has the feature off, one is slow, and two die."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from memreclaim import Reason, build_twin
from memreclaim.agree import Terms, prepare
from memreclaim.discover import discover

RANKS: Final = 4
KEPT: Final = {"a": "ranks_disagree", "b": "ranks_disagree"}
Told = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def told() -> Told:
    """What each rank printed, by scenario."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    script = str(Path(__file__).with_name("agree_rank.py"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    codes = [rank.returncode for rank in ranks]
    assert codes == [0, 0, 9, 0], "\n".join(error for _, error in outputs)
    lines = [[json.loads(line) for line in output.splitlines()] for output, _ in outputs]
    return [{line.pop("scenario"): line for line in rank} for rank in lines]


def decisions(told: Told, scenario: str) -> list[dict[str, Any]]:
    """What the ranks that took part were told."""
    return [rank[scenario] for rank in told if scenario in rank]


@pytest.mark.integration
def test_ranks_that_say_the_same_go(told: Told) -> None:
    """Nobody keeps anything."""
    assert decisions(told, "agree") == [{"go": True, "why": "", "kept": {}}] * RANKS


@pytest.mark.integration
def test_a_layer_that_one_rank_cannot_drop_stays_everywhere(told: Told) -> None:
    """The others keep that layer for the ranks' sake; the rank itself has its own reason."""
    kept = [one["kept"] for one in decisions(told, "verdict")]

    assert kept == [{"b": "ranks_disagree"}, {}, {"b": "ranks_disagree"}, {"b": "ranks_disagree"}]
    assert all(one["go"] for one in decisions(told, "verdict"))


@pytest.mark.integration
def test_ranks_of_different_versions_keep_everything_and_say_so(told: Told) -> None:
    """The reason names the field, and what each rank has."""
    why = "memreclaim differs: rank 0 has '1', rank 1 has '1', rank 2 has '1', rank 3 has '2'"

    assert decisions(told, "version") == [{"go": False, "why": why, "kept": KEPT}] * RANKS


@pytest.mark.integration
def test_reclaims_of_four_ranks_drop_the_same_layers(told: Told) -> None:
    """The rank with the mismatch says mismatch, the others that ranks disagree; rank 0 has all reports."""
    layers = [one["layers"] for one in decisions(told, "reclaim")]

    assert [one["layer0.wo_a"] for one in layers] == [["reclaimed", None]] * RANKS
    expected = [["kept", "ranks_disagree"]] * RANKS
    expected[2] = ["kept", "mismatch"]
    assert [one["layer1.wo_a"] for one in layers] == expected
    assert told[0]["reclaim"]["reports"] == [64 * 32 * 2] * RANKS


@pytest.mark.integration
@pytest.mark.parametrize(("scenario", "silent"), [("off", 1), ("slow", 3), ("dead", 2)])
def test_a_silent_rank_means_bf16_and_is_named(told: Told, scenario: str, silent: int) -> None:
    """Whether it is off, slow or dead, the others wait for a bounded time and then keep everything."""
    for one in decisions(told, scenario):
        assert one["go"] is False
        assert one["kept"] == KEPT
        assert f"rank {silent} did not answer" in one["why"]


@pytest.mark.integration
def test_a_slow_rank_obeys_what_the_others_decided(told: Told) -> None:
    """It finds all answers there when it comes, and keeps its weights all the same."""
    assert told[3]["slow"]["go"] is False


@pytest.mark.integration
def test_the_engines_group_still_works_afterwards(told: Told) -> None:
    """A collective of the engine runs on the very group after a rank had not taken part."""
    assert [one["sum"] for one in decisions(told, "engine")] == [4.0] * RANKS


@pytest.mark.integration
def test_a_lost_store_means_bf16(told: Told) -> None:
    """The rank that holds the store has died: nobody hangs, nothing is dropped."""
    for one in (told[1]["host"], told[3]["host"]):
        assert one["go"] is False
        assert one["kept"] == KEPT
        assert "cannot be reached" in one["why"] or "did not answer" in one["why"]


def layer(value: float = 0.5) -> torch.nn.Module:
    """A model with one layer ``wo_a`` of 64 x 32."""
    model = torch.nn.Module()
    model.n_local_groups = 2
    model.wo_a = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
    torch.nn.init.constant_(model.wo_a.weight, value)
    return model


@pytest.mark.cpu
def test_prepare_proves_and_keeps_nothing() -> None:
    """A verdict for each layer: refusals first, then the proof, then the check of its readers."""
    exact, bad = layer(), layer()
    with torch.no_grad():
        bad.wo_a.weight[0, 0] = 1.0078125

    assert prepare(discover(exact), {}) == {"wo_a": None}
    assert prepare(discover(bad), {}) == {"wo_a": Reason.MISMATCH}
    assert prepare(discover(exact), {"wo_a": Reason.POLICY}) == {"wo_a": Reason.POLICY}
    assert prepare(discover(exact), {}, lambda *_: Reason.UNKNOWN_READER) == {"wo_a": Reason.UNKNOWN_READER}


@pytest.mark.cpu
def test_new_bytes_go_where_graphs_hold_the_old_twin() -> None:
    """The memory of an old twin of the same shape takes a new one."""
    old, new = (build_twin(layer(value).wo_a.weight, groups=2) for value in (0.5, 0.25))
    address = old.packed.data_ptr()

    placed = Terms(storage={"wo_a": old}).place("wo_a", new)

    assert placed is old
    assert placed.packed.data_ptr() == address
    assert torch.equal(placed.dequantize(), new.dequantize())
    assert Terms(storage={"other": old}).place("wo_a", new) is new
