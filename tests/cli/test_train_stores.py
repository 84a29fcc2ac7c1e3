"""``--store``, ``--ttl`` and ``--metrics-port`` of ``dynamicemb train``."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb.cli.app import main
from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.cli.training.prometheus import serve_metrics
from dynamicemb.cli.training.run import Run
from dynamicemb.cli.training.stream import ClickStream

SMALL = (
    *("--days", "2", "--examples-per-day", "3000", "--batch-size", "200", "--new-ids", "300"),
    *("--window", "2000", "--log-every", "5", "--dim", "4", "--plain", "--no-report"),
)


def train(out: Path, *arguments: str) -> int:
    return main(["train", *SMALL, "--out", str(out), *arguments])


def last_point(out: Path) -> dict[str, Any]:
    point: dict[str, Any] = json.loads((out / "metrics.json").read_text())[-1]
    return point


def test_a_store_gives_the_numbers_of_a_table_that_has_room_for_all(tmp_path: Path) -> None:
    wide = ("--no-baseline", "--capacity", "16384")
    assert train(tmp_path / "memory", *wide) == 0
    narrow = ("--no-baseline", "--capacity", "1024", "--store", f"ssd:{tmp_path / 'rows'}")
    assert train(tmp_path / "ssd", *narrow) == 0
    memory, ssd = (last_point(tmp_path / name) for name in ("memory", "ssd"))
    assert memory["metrics"] == ssd["metrics"]
    for name, table in ssd["tables"].items():
        assert table["rows"] == memory["tables"][name]["rows"]
        assert table["rows"] > 1024  # more than memory holds
        assert list((tmp_path / "rows" / name).iterdir())


def test_rows_in_redis_and_a_password_that_is_shown_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("redis")
    from redis_servers import RedisServer

    server = RedisServer("--requirepass", "s3cret")
    try:
        url = server.url(user=":s3cret@")
        options = ("--no-baseline", "--capacity", "1024", "--report", "--days", "1")
        assert train(tmp_path / "redis", *options, "--store", url) == 0
        assert train(tmp_path / "memory", *options[:1], *options[3:]) == 0
        assert server.client(password="s3cret").dbsize() > 0
    finally:
        server.close()
    memory, redis = (last_point(tmp_path / name) for name in ("memory", "redis"))
    assert memory["metrics"] == redis["metrics"]
    said = capsys.readouterr()
    assert "s3cret" not in said.out + said.err
    for file in (tmp_path / "redis").rglob("*"):
        assert file.is_dir() or b"s3cret" not in file.read_bytes(), file


def test_a_run_over_a_store_goes_on_without_rows_that_came_after_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ("--no-baseline", "--capacity", "2048", "--store", f"ssd:{tmp_path / 'rows'}")
    assert train(tmp_path / "whole", *store) == 0
    expected = last_point(tmp_path / "whole")
    assert train(tmp_path / "other", *store) == 2
    assert "rows already; --fresh removes them" in capsys.readouterr().err
    assert train(tmp_path / "other", *store, "--fresh", "--max-examples", "2000") == 0
    saved = sorted((tmp_path / "other" / "checkpoints").iterdir())
    assert train(tmp_path / "other", *store, "--max-examples", "4000", "--keep", "9") == 0
    newest = sorted((tmp_path / "other" / "checkpoints").iterdir())[-1]
    assert newest not in saved
    newest.rename(tmp_path / "gone")  # as if the run had been killed before it
    assert train(tmp_path / "other", *store) == 0
    again = last_point(tmp_path / "other")
    assert again["metrics"] == expected["metrics"]
    assert again["tables"]["item"]["rows"] == expected["tables"]["item"]["rows"]


def test_rows_that_are_not_used_expire(tmp_path: Path) -> None:
    assert train(tmp_path / "kept", "--no-baseline") == 0
    assert train(tmp_path / "steps", "--no-baseline", "--ttl", "5steps") == 0
    kept, expired = (last_point(tmp_path / name)["tables"]["item"] for name in ("kept", "steps"))
    assert kept["evictions"] == 0
    assert expired["evictions"] > 0
    assert expired["rows"] < kept["rows"]
    assert train(tmp_path / "age", "--no-baseline", "--score", "timestamp", "--ttl", "9d") == 0
    assert last_point(tmp_path / "age")["tables"]["item"]["evictions"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ttl", "5steps", "--score", "lfu"), "STEP"),
        (("--ttl", "5s"), "TIMESTAMP"),
        (("--ttl", "soon"), "Nsteps"),
        (("--ttl", "5steps", "--store", "redis://:s3cret@localhost"), "rows in a store do not"),
        (("--store", "tape:x"), "ssd:FOLDER"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert train(tmp_path, *arguments) == 2
    assert said.lower() in capsys.readouterr().err.lower()


def test_metrics_are_served_on_the_loopback_address(tmp_path: Path) -> None:
    options = TrainOptions(out=str(tmp_path), batch_size=100, window=500, dim=4, log_every=2)
    stream = ClickStream(days=1, examples_per_day=400, new_ids=100, seed=0)
    run = Run(options, stream, torch.device("cpu"))
    with serve_metrics(run, 0) as address:
        assert address.startswith("http://127.0.0.1:")
        before = urllib.request.urlopen(address, timeout=60).read().decode()
        assert "dynamicemb_steps_total 0.0" in before
        run.train(on_step=lambda _: None)
        text = urllib.request.urlopen(address, timeout=60).read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(address + "x", timeout=60)
    assert "dynamicemb_examples_total 400.0" in text
    assert '# TYPE dynamicemb_window_auc gauge\ndynamicemb_window_auc{model="dynamic"} 0.' in text
    assert 'dynamicemb_table_inserts_total{table="item"} ' in text
    assert 'dynamicemb_table_load{table="user"} ' in text
    assert not [one for one in threading.enumerate() if one.name == "dynamicemb-http"]


def test_a_port_that_is_taken_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        port = str(other.server_address[1])
        assert train(tmp_path, "--metrics-port", port) == 2
    assert f"--metrics-port {port} cannot be used" in capsys.readouterr().err
