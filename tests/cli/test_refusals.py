"""What a person reads who asks for something that cannot be: one line, the documented exit code, nothing done.

World: one command in an empty folder; no run ever starts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import CommandLine, Finished
from trainer.errors import DataError, RefusedError, StorageError, UserCodeError

REFUSED, USER, STORAGE = RefusedError.exit_code, UserCodeError.exit_code, StorageError.exit_code


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts)


def assert_refused(finished: Finished, exit_code: int, *parts: str) -> None:
    lines = finished.stderr.splitlines()
    assert finished.exit_code == exit_code, finished.stderr
    assert len(lines) == 1, finished.stderr
    assert lines[0].startswith("shoal: ")
    for part in parts:
        assert part in lines[0]
    assert finished.left_behind == ()


def assert_refused_by_looking(finished: Finished, exit_code: int, *parts: str) -> None:
    """As `assert_refused`, and so early that neither Prefect nor JAX was touched by anybody."""
    assert_refused(finished, exit_code, *parts)
    assert (finished.num_processes, finished.heavy) == (1, frozenset())


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run_name=my first run", ["run_name: allowed: letters, digits", '"my first run"']),
        ("run_name=größer", ["run_name: allowed: letters, digits", '"größer"']),
        ("run_name=../x", ["run_name: allowed: letters, digits", '"../x"']),
        ('run_name=""', ["run_name: allowed: letters, digits", 'given: ""']),
        ("run_name=2024-12-25", ["run_name: a text is needed", "in quotes"]),
        ("run_name=2024-13-45", ["--set run_name=2024-13-45", "not valid YAML"]),
        ("stepz=5", ["unknown key 'stepz'", "did you mean 'steps'?"]),
        ("num_hosts.maks=5", ["unknown key 'num_hosts.maks'", "did you mean 'num_hosts.max'?"]),
        ("keep_last_n=5", ["unknown key 'keep_last_n'", "did you mean 'checkpoint.keep_last_n'?"]),
        ("steps=-3", ["steps", "greater than or equal to 1", "given: -3"]),
        ("optimizer.learning_rate=-0.1", ["optimizer.learning_rate", "greater than 0", "given: -0.1"]),
        ("steps=many", ["steps", "valid integer", 'given: "many"']),
        ("steps=1.5", ["steps", "valid integer", "given: 1.5"]),
        ("steps=yes", ["steps", "true and false are no values of this setting", "given: true"]),
        ("checkpoint.async_save=7", ["checkpoint.async_save", "valid boolean", "given: 7"]),
        ("num_hosts=3", ["num_hosts: this is a group of settings: min, max", "given: 3"]),
        ("elastic.wait_for_capacity_seconds=.inf", ["elastic.wait_for_capacity_seconds", "finite number"]),
        ("engine.hosts_per_slice=2", ["num_hosts.max (1)", "engine.hosts_per_slice (2)"]),
        ("storage=gs://bucket/runs", ["storage: gs:// is not supported in this version", "a local path"]),
        ("storage=s3://bucket/runs", ["storage: s3:// is not supported in this version", "a local path"]),
        ("storage=~no-such-user/runs", ["~no-such-user/runs", "no home directory"]),
        ("steps", ["--set takes key=value", "--set steps=100", "'steps'"]),
        ("=5", ["--set takes key=value", "'=5'"]),
        ("steps.more=5", ["--set steps.more=5", "'steps' is not a group of settings"]),
        ("steps=[1", ["--set steps=[1", "not valid YAML"]),
    ],
)
def test_a_bad_setting_is_refused_in_one_line_before_prefect_or_jax_is_touched(
    shoal: CommandLine, override: str, parts: list[str]
) -> None:
    before = listing(shoal.folder)
    assert_refused_by_looking(shoal("train", "config.yaml", "--set", override), REFUSED, *parts)
    assert listing(shoal.folder) == before


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"steps: [1", ["config.yaml is neither YAML nor JSON", "line 1"]),
        (b"steps: 5\n\trun_name: x\n", ["config.yaml is neither YAML nor JSON", "line 2"]),
        (b"run_name: 2024-13-45\n", ["config.yaml is neither YAML nor JSON", "month"]),
        (b"- steps\n", ["config.yaml holds a list"]),
        (b"", ["run_name is missing"]),
        (bytes(range(256)), ["cannot read the config file 'config.yaml'", "not UTF-8 text"]),
        (b"\x7fELF\x02\x01\x01\x00\x00", ["config.yaml is neither YAML nor JSON", "#x007f"]),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(
    shoal: CommandLine, content: bytes, parts: list[str]
) -> None:
    (shoal.folder / "config.yaml").write_bytes(content)
    finished = shoal("train", "config.yaml", "--set", "steps=5")
    assert_refused_by_looking(finished, REFUSED, *parts)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("absent.yaml", ["'absent.yaml'", "No such file or directory"]),
        (".", ["'.'", "Is a directory"]),
        ("text.txt/config.yaml", ["'text.txt/config.yaml'", "Not a directory"]),
    ],
)
def test_a_configuration_that_is_not_there_is_refused_by_name(shoal: CommandLine, path: str, parts: list[str]) -> None:
    assert_refused_by_looking(shoal("plan", path), REFUSED, "cannot read the config file", *parts)


def test_each_problem_of_a_configuration_has_a_line_of_its_own(shoal: CommandLine) -> None:
    finished = shoal("train", "config.yaml", "--set", "steps=0", "--set", "sede=1")
    assert finished.exit_code == REFUSED
    assert sorted(line.split(":")[:2] for line in finished.stderr.splitlines()) == [
        ["shoal", " steps"],
        ["shoal", " unknown key 'sede'"],
    ]


@pytest.mark.parametrize(
    "arguments", [["nope"], ["train"], ["train", "config.yaml", "--nope"], ["plan", "config.yaml", "--hosts", "0"]]
)
def test_a_command_line_that_cannot_be_understood_is_refused_with_its_usage(
    shoal: CommandLine, arguments: list[str]
) -> None:
    finished = shoal(*arguments)
    assert (finished.exit_code, finished.stdout) == (REFUSED, "")
    assert finished.stderr.startswith("Usage: shoal")
    assert finished.heavy == frozenset()


# --- the storage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "parts"),
    [
        ("text.txt/runs", ["text.txt is not a directory"]),
        ("/dev/null/runs", ["/dev/null is not a directory"]),
        ("/proc/runs", ["nothing can be created in /proc"]),
        ("a" * 300, ["File name too long"]),
        ("loop/runs", ["symbolic links"]),
    ],
)
def test_a_storage_that_cannot_be_written_is_refused_before_prefect_or_jax_is_touched(
    shoal: CommandLine, storage: str, parts: list[str]
) -> None:
    (shoal.folder / "loop").symlink_to("loop")
    before = listing(shoal.folder)
    finished = shoal("train", "config.yaml", "--set", f"storage={storage}")
    assert_refused_by_looking(finished, STORAGE, "first", *parts)
    assert listing(shoal.folder) == before


def test_a_run_record_that_cannot_be_read_is_named_and_left_alone(shoal: CommandLine) -> None:
    record = shoal.folder / "storage" / "first" / "run.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"schema_version": 1, "conf')
    assert_refused_by_looking(shoal("train", "config.yaml"), STORAGE, str(record), "cannot be read")
    assert record.read_text() == '{"schema_version": 1, "conf'


# --- the job ---------------------------------------------------------------------------------------------------------

JOBS = """
class NoJob:
    pass


thing = 3
"""


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["job=resnet"], ["job: 'resnet' is not known", "'lm' or 'package.module:Class'"]),
        (["job=absent:Job"], ["job 'absent:Job'", "no module 'absent'", "start from the directory that holds it"]),
        (["job=jobs:Absent"], ["job 'jobs:Absent'", "module 'jobs' has no 'Absent'"]),
        (["job=jobs:thing"], ["job 'jobs:thing'", "not a class"]),
        (["job=jobs:NoJob"], ["job 'jobs:NoJob' is not a TrainingJob", "missing", "loss"]),
        (["job_params.seq_lem=8"], ["unknown key 'job_params.seq_lem'", "did you mean 'job_params.seq_len'?"]),
        (["job_params.dropout=7"], ["job_params.dropout", "given: 7"]),
        (["engine.device_memory_bytes=1000"], ["does not fit on 1 host", "1000 bytes", "a smaller model"]),
    ],
)
def test_a_job_that_cannot_be_made_is_refused_in_one_line(
    shoal: CommandLine, overrides: list[str], parts: list[str]
) -> None:
    (shoal.folder / "jobs.py").write_text(JOBS)
    before = listing(shoal.folder)
    sets = [argument for override in overrides for argument in ("--set", override)]
    assert_refused(shoal("train", "config.yaml", *sets), REFUSED, *parts)
    assert listing(shoal.folder) == before


def test_a_job_whose_module_raises_shows_the_users_traceback_above_the_one_line(shoal: CommandLine) -> None:
    (shoal.folder / "broken.py").write_text("def helper():\n    raise ValueError('mine')\n\nhelper()\n")
    finished = shoal("train", "config.yaml", "--set", "job=broken:Job")
    *traceback, line = finished.stderr.splitlines()
    assert finished.exit_code == USER
    assert line == "shoal: job 'broken:Job': importing 'broken' failed: ValueError: mine"
    assert traceback[-1] == "ValueError: mine"
    assert any("broken.py" in text and "in helper" in text for text in traceback)
    assert finished.left_behind == ()
    assert not (shoal.folder / "storage").exists()


def test_a_plan_that_cannot_be_made_says_why_on_stderr_or_as_json_on_stdout(shoal: CommandLine) -> None:
    too_little = ["--set", "engine.device_memory_bytes=1000"]
    finished = shoal("plan", "config.yaml", *too_little)
    assert (finished.exit_code, finished.stdout) == (REFUSED, "")
    assert "refused: the model does not fit on 1 host" in finished.stderr
    assert "prefect" not in finished.heavy


# --- the data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.path=absent.txt"], ["data.path 'absent.txt' cannot be read", "No such file"]),
        (["data.path=empty.txt"], ["data.path 'empty.txt'", "0 bytes"]),
        (["data.path=empty"], ["data.path 'empty' holds no files"]),
        (["data.path=short.txt"], ["data.path 'short.txt'", "5 bytes", "one sample needs 17"]),
        (["global_batch_size=300"], ["has 260 samples", "one batch needs 300", "a smaller batch"]),
    ],
)
def test_data_that_cannot_fill_a_batch_is_refused_in_one_line(
    shoal: CommandLine, overrides: list[str], parts: list[str]
) -> None:
    (shoal.folder / "empty.txt").touch()
    (shoal.folder / "empty").mkdir()
    (shoal.folder / "short.txt").write_text("short")
    before = listing(shoal.folder)
    sets = [argument for override in overrides for argument in ("--set", override)]
    assert_refused(shoal("train", "config.yaml", *sets), DataError.exit_code, *parts)
    assert listing(shoal.folder) == before


# --- the Prefect server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/api", "not-a-url"])
def test_a_prefect_server_that_does_not_answer_is_named_before_any_work(shoal: CommandLine, url: str) -> None:
    finished = shoal("train", "config.yaml", environment={"PREFECT_API_URL": url})
    assert_refused_by_looking(finished, REFUSED, f"PREFECT_API_URL={url}", "unset PREFECT_API_URL")
    assert not (shoal.folder / "storage").exists()


# --- a run that is none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["status"], ["hosts"], ["report"], ["capacity", "--hosts", "2"]])
@pytest.mark.parametrize(
    ("run", "part"),
    [("absent", "no run.json (a run that was just started"), (".", "no run.json"), ("gs://a/b", "local paths")],
)
def test_a_directory_that_is_no_run_is_refused_by_every_command_that_looks_at_one(
    shoal: CommandLine, arguments: list[str], run: str, part: str
) -> None:
    before = listing(shoal.folder)
    assert_refused_by_looking(shoal(*arguments, run), REFUSED, run, part)
    assert listing(shoal.folder) == before
