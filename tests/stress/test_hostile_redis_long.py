"""Every operation against every reply that Redis does not give, on every kind of connection: typed,
within (retries + 1) times the timeout and the pauses, at most 64 MB."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("redis")

sys.path.append(str(Path(__file__).parent.parent / "remote"))
from hostile_redis import (
    BEHAVIOURS,
    CLUSTERS,
    HONEST,
    HONEST_OF_CLUSTER,
    HONEST_OF_CLUSTERS,
    HostileRedis,
    check,
    of_a_cluster,
    tried,
)

pytestmark = pytest.mark.stress

OPTIONS = "timeout=1s&&retry_limit=1"
#: Two attempts, the pause between them, and what a busy machine adds.
BOUND_S = 2 * 1.0 + 0.05 + 1.0


@pytest.mark.parametrize("kind", ["", "password", "cluster", "sentinel"])
def test_hostile_from_the_first_command_on(kind: str) -> None:
    url = {
        "": "redis://127.0.0.1:PORT/?",
        "password": "redis://bob:secret@127.0.0.1:PORT/3?",
        "cluster": "redis+cluster://127.0.0.1:PORT/?",
        "sentinel": "redis+sentinel://127.0.0.1:PORT/name?",
    }[kind]
    outcomes = tried(
        {
            name: (url + OPTIONS, HostileRedis(behaviour, honest_start=False))
            for name, behaviour in BEHAVIOURS.items()
        }
    )
    check(outcomes, BOUND_S)
    assert not any("secret" in outcome["what"] for outcome in outcomes.values())


@pytest.mark.parametrize("cluster", [False, True])
def test_hostile_when_rows_are_asked_for(cluster: bool) -> None:
    url = f"redis{'+cluster' if cluster else ''}://127.0.0.1:PORT/?{OPTIONS}"
    outcomes = tried(
        {
            name: (url, HostileRedis(of_a_cluster(behaviour) if cluster else behaviour))
            for name, behaviour in BEHAVIOURS.items()
        }
    )
    assert len(outcomes) > 400
    check(outcomes, BOUND_S, HONEST_OF_CLUSTER if cluster else HONEST)


def test_clusters_that_describe_themselves_as_none_is() -> None:
    url = f"redis+cluster://127.0.0.1:PORT/?{OPTIONS}"
    outcomes = tried({name: (url, HostileRedis(behaviour)) for name, behaviour in CLUSTERS.items()})
    check(outcomes, BOUND_S, HONEST_OF_CLUSTERS)
