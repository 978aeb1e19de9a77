"""What `shoal status` and `shoal plan` show."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from deployments.plan_view import render_plan, render_refusal
from deployments.status_view import render_status, status_json
from tests.run_directory_builder import RunDirectoryBuilder, host_names, play_disturbed_run, topology_of
from trainer.history import RunHistory
from trainer.planning.footprint import Footprint, LeafSpec
from trainer.planning.topology import Refusal


def shown(renderable: RenderableType, *, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectoryBuilder:
    return play_disturbed_run(tmp_path_factory.mktemp("runs") / "quickstart")


# The documented keys: scripts rely on them. Adding one is fine; renaming or dropping one breaks somebody.
STATUS_KEYS = {
    "run_name", "location", "state", "message", "step", "steps", "loss", "tokens_per_second", "hosts", "mesh",
    "incarnation", "committed_step", "goodput", "badput_seconds", "elapsed_seconds", "seconds_left",
    "abandoned_steps", "incidents", "pool", "growth_held", "problems",
}  # fmt: skip
INCIDENT_KEYS = {
    "index", "planned", "cause", "hosts", "time", "step", "resumed_from", "steps_lost", "from_hosts", "to_hosts",
    "down_seconds", "phases", "part_of", "message",
}  # fmt: skip


def test_status_json_has_its_documented_keys_and_is_plain_json(disturbed: RunDirectoryBuilder) -> None:
    status = status_json(RunHistory.load(disturbed.store))
    assert set(status) == STATUS_KEYS
    assert all(set(incident) == INCIDENT_KEYS for incident in status["incidents"])
    assert json.loads(json.dumps(status, allow_nan=False)) == status
    assert status_json.__doc__ is not None
    assert all(f"`{key}`" in status_json.__doc__ for key in STATUS_KEYS)


def test_status_json_tells_what_happened(disturbed: RunDirectoryBuilder) -> None:
    status = status_json(RunHistory.load(disturbed.store))
    assert (status["state"], status["step"], status["steps"], status["committed_step"]) == ("complete", 300, 300, 300)
    assert status["hosts"] == ["host-0", "host-1", "host-2"]
    assert status["mesh"] == {"dcn_data": 3, "dcn_fsdp": 1, "ici_fsdp": 2, "ici_tensor": 1}
    assert [incident["steps_lost"] for incident in status["incidents"]] == [18, 0, 20]
    assert 0.7 < status["goodput"] < 0.9


def test_status_json_of_an_empty_directory_has_the_same_keys(tmp_path: Path) -> None:
    status = status_json(RunHistory.load(RunDirectoryBuilder(tmp_path / "nothing").store))
    assert set(status) == STATUS_KEYS
    assert (status["state"], status["step"], status["loss"], status["hosts"]) == ("dead", 0, None, [])
    json.dumps(status, allow_nan=False)


def test_what_the_controller_says_takes_precedence_over_the_directory(disturbed: RunDirectoryBuilder) -> None:
    live = {"step": 299, "loss": float("nan"), "hosts": [{"host_id": "host-7", "state": "starting"}]}
    history = RunHistory.load(disturbed.store)
    status = status_json(history, live)
    assert (status["step"], status["loss"], status["pool"]) == (299, None, live["hosts"])
    text = shown(render_status(history, live))
    assert "299 of 300" in text
    assert "not finite" in text
    assert "host-7 starting" in text


def test_status_shows_the_facts_of_a_living_run(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "quickstart", steps=100)
    run.open()
    run.start_group(4)
    run.train(40)
    run.checkpoint()
    run.train(60)
    text = shown(render_status(RunHistory.load(run.store, living_at=run.clock)))
    for fact in (
        "quickstart  running",
        "60 of 100",
        "(step 60 alone; a unigram model of the same bytes has 4.6100)",
        "8,192 tokens/s",
        "4: host-0, host-1, host-2, host-3",
        "dcn_data=4 × ici_fsdp=2",
        "step 40",
        "about 10.0 s",
    ):
        assert fact in text
    assert "".join(text.split()).endswith("".join(str(run.store.root).split()))


def test_status_of_a_dead_run_promises_no_time(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "quickstart")
    run.open()
    run.start_group(4)
    run.train(40)
    text = shown(render_status(RunHistory.load(run.store)))
    assert "dead" in text
    assert "time left" not in text


def test_status_shows_the_newest_five_interruptions(tmp_path: Path) -> None:
    run = RunDirectoryBuilder(tmp_path / "quickstart")
    run.open()
    run.start_group(8)
    for host in range(7, 0, -1):
        run.train(run.step + 5)
        run.lose_host(f"host-{host}")
        run.continue_on(host, cause="host_lost", planned=False, from_step=run.step)
    text = shown(render_status(RunHistory.load(run.store)))
    assert "newest 5 of 7" in text
    assert [f"host-{host} lost" in text for host in range(7, 0, -1)] == [False, False, True, True, True, True, True]


def test_status_names_damage(tmp_path: Path) -> None:
    run = play_disturbed_run(tmp_path / "quickstart")
    run.break_json("segments/2.json")
    assert "could not read: segments/2.json" in shown(render_status(RunHistory.load(run.store)))


FOOTPRINT = Footprint(
    leaves=(
        LeafSpec(path="w", shape=(1000, 500), itemsize=4, axes=("embed", "mlp"), kind="params"),
        LeafSpec(path="mu", shape=(1000, 500), itemsize=4, axes=("embed", "mlp"), kind="optimizer"),
    ),
    axis_rules={},
    flops_per_row=1e9,
    activation_bytes_per_row={"none": 4, "dots": 2, "full": 1},
    activation_tensor_fraction=0,
    tensor_reduce_bytes_per_row=0,
    remat_flops_factor={"none": 1.0, "dots": 1.1, "full": 1.33},
)


def test_a_plan_shows_its_mesh_its_padding_and_its_memory() -> None:
    text = shown(render_plan(topology_of(host_names(3)), FOOTPRINT))
    for fact in (
        "dcn_data=3 × ici_fsdp=2",
        "3: host-0, host-1, host-2, 2 devices each",
        "1 of 18 rows: 18 rows, 2 of them padding",
        "500,000 parameters, 1.6e+10 FLOPs",
        "250.0 ms",
        "185.0 MB",
        "2.0 GB",
        "note: 2 of 18 rows are padding",
    ):
        assert fact in text
    assert "9.2%" in text


def test_a_plan_names_what_idles() -> None:
    plan = topology_of(host_names(2)).model_copy(update={"idle_hosts": ("host-2",), "idle_devices_per_host": 1})
    (idle,) = [line for line in shown(render_plan(plan, FOOTPRINT)).splitlines() if line.startswith("idle")]
    assert "host-2, 1 device of each used host" in idle


def test_a_plan_without_a_memory_limit_shows_no_share() -> None:
    plan = topology_of(host_names(2))
    unlimited = plan.model_copy(update={"memory": plan.memory.model_copy(update={"limit_bytes": None})})
    text = shown(render_plan(unlimited, FOOTPRINT))
    assert "unknown" in text
    assert "%" not in text


def test_a_refusal_says_why_and_what_would_be_needed() -> None:
    text = shown(render_refusal(Refusal(reason="9.1 GB do not fit into 2.0 GB", needed="5 hosts")))
    assert text.splitlines() == ["refused: 9.1 GB do not fit into 2.0 GB", "needed:  5 hosts"]
