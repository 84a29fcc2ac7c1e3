"""Options: defaults, files, the command line, and mistakes with suggestions."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamicemb.cli.app import main
from dynamicemb.cli.yaml import read_yaml

Capture = pytest.CaptureFixture[str]


def failure(capsys: Capture, *arguments: str) -> str:
    """What a command line that must not be accepted says."""
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("dynamicemb: ")
    return said.err


def printed_config(capsys: Capture, *arguments: str) -> dict[str, object]:
    assert main(["train", *arguments, "--print-config"]) == 0
    return read_yaml(capsys.readouterr().out, "printed")


def test_the_printed_configuration_is_one_that_is_read(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    chosen = ["--model", "dcn", "--lr", "0.05", "--admission", "frequency:3", "--no-baseline"]
    main(["train", *chosen, "--print-config"])
    file.write_text(capsys.readouterr().out)
    config = printed_config(capsys, "--config", str(file))
    assert config == printed_config(capsys, *chosen)
    assert config["model"] == "dcn"
    assert config["baseline"] is False


def test_the_command_line_comes_before_the_file(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch-size: 100\ndim: 8\n")
    config = printed_config(capsys, "--config", str(file), "--dim", "4")
    assert (config["batch_size"], config["dim"]) == (100, 4)
    assert printed_config(capsys)["dim"] == 16


def test_unknown_names_are_errors_with_a_suggestion(capsys: Capture, tmp_path: Path) -> None:
    assert "did you mean train?" in failure(capsys, "trian")
    assert "unknown option --optimiser; did you mean --optimizer?" in failure(
        capsys, "train", "--optimiser", "sgd"
    )
    assert "did you mean dlrm?" in failure(capsys, "train", "--model", "dlmr")
    file = tmp_path / "run.yaml"
    file.write_text("capcity: 10\n")
    said = failure(capsys, "train", "--config", str(file))
    assert "unknown option 'capcity'" in said
    assert "did you mean capacity?" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dim", "0"], "--dim is 0; allowed: an integer from 1 to 1048576"),
        (["--dim", "many"], "--dim is 'many'; allowed: an integer"),
        (["--dim", "1.5"], "--dim is '1.5'"),
        (["--dim", "9999999999"], "--dim is 9999999999; allowed: an integer from 1 to 1048576"),
        (["--threads", "100000"], "an integer from 1 to 1024"),  # torch would crash
        (["--metrics-port", "70000"], "an integer from 0 to 65535"),
        (["--seed", "99999999999999999999"], "an integer from 0 to 9223372036854775807"),
        (["--lr", "-1"], "--lr"),
        (["--lr", "nan"], "--lr is nan"),
        (["--admission", "sometimes"], "frequency:N"),
        (["--admission", "probability:2"], "probability:P"),
        (["--device", "tpu"], "auto, cpu, cuda"),
        (["--score", "random"], "timestamp"),
        (["--model"], "expected one argument"),
        (["extra"], "unknown argument extra"),
        (["--config", "/does/not/exist"], "No such file"),
    ],
)
def test_wrong_values_name_the_option_and_what_is_allowed(
    capsys: Capture, arguments: list[str], said: str
) -> None:
    assert said in failure(capsys, "train", *arguments)


def test_wrong_values_in_a_file_name_the_file(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for line in ("dim: many", "baseline: 3", "model: mlp", "lr: -1"):
        file.write_text(line + "\n")
        assert f"{line.partition(':')[0]} in {file}" in failure(
            capsys, "train", "--config", str(file)
        )


def test_help_and_version(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dynamicemb 0.")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    assert "--checkpoint-minutes" in capsys.readouterr().out
    assert main([]) == 2
