"""`prepare` on a Ray cluster of two nodes of this machine: the shards of one machine, also when a node is lost."""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cramming.config import UserError
from data_prep import prepare_config, task_grid
from data_prep.readers import source
from tests.data_prep.calls import main

CUT = {
    "shard_tokens": 3000,
    "filters": {"max_words": 40, "min_words": 2},
    "near_duplicates": {"enabled": True},
}


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For Ray's files, among them the address that `auto` finds; its sockets' names must not be long."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield folder


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, short_folder: str) -> Iterator[Any]:
    """A head and a second node, one core each; every task goes there."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setattr(source, "TASK_SIZE", 1 << 12)
    monkeypatch.setenv("RAY_TMPDIR", short_folder)
    memory = {"object_store_memory": 100 << 20, "num_cpus": 1}
    nodes = Cluster(initialize_head=True, head_node_args={**memory, "include_dashboard": False})
    nodes.add_node(**memory)
    nodes.wait_for_nodes(timeout=120)  # on a busy machine
    yield nodes
    nodes.shutdown()


def test_the_missing_package_is_named(
    text_file: Path, text_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        prepare_config.importlib.util, "find_spec", lambda name: None if name == "ray" else True
    )
    with pytest.raises(
        UserError, match=r"data\.ray needs the package ray: pip install 'cramming\[ray\]'"
    ):
        main(text_config(text_file, ray="auto"))


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs ray")
def test_no_cluster_at_the_address_is_said(
    tmp_path: Path,
    text_file: Path,
    text_config: Any,
    short_folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", short_folder)
    with pytest.raises(UserError, match=r"data\.ray=auto: no Ray cluster there .*`ray start`"):
        main(text_config(text_file, corpus=str(tmp_path / "c"), ray="auto"))
    assert not (tmp_path / "c" / task_grid.UNFINISHED).exists()


@pytest.mark.slow
def test_a_corpus_of_two_nodes_is_that_of_one_machine_even_when_one_is_lost(
    tmp_path: Path,
    text_file: Path,
    text_config: Any,
    run: Any,
    contents: Any,
    cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, whole, broken = (
        text_config(text_file, corpus=str(tmp_path / n), **CUT) for n in ("here", "whole", "broken")
    )
    run(here)
    for config in (whole, broken):
        config["data"]["ray"] = cluster.address
    nodes = {node.node_id for node in cluster.list_all_nodes()}
    assert (
        nodes == worked(tmp_path / "nodes of whole", monkeypatch, lambda: run(whole))
        and len(nodes) == 2
    )
    assert (
        contents(tmp_path / "whole") == contents(tmp_path / "here")
        and len(contents(tmp_path / "here")) > 10
    )
    parts, killed = task_grid.TaskGrid.parts, []

    def kill_a_node(*arguments: Any) -> Iterator[Any]:
        for part in parts(*arguments):
            yield part
            if not killed:
                killed.append(cluster.list_all_nodes()[-1])
                cluster.remove_node(killed[0], allow_graceful=False)

    monkeypatch.setattr(task_grid.TaskGrid, "parts", kill_a_node)
    assert nodes == worked(tmp_path / "nodes of broken", monkeypatch, lambda: run(broken))
    assert len(killed) == 1 and contents(tmp_path / "broken") == contents(tmp_path / "here")


def worked(notes: Path, monkeypatch: pytest.MonkeyPatch, prepared: Callable[[], Any]) -> set[str]:
    """The nodes that did a task of this preparation. Each one's first task ends only when the other one has one too,
    so that a node whose process starts late on a busy machine is not left without any."""
    call = task_grid.call_on_node
    notes.mkdir()

    def noted(*task: Any) -> Any:
        import ray

        (notes / ray.get_runtime_context().get_node_id()).touch()
        until = time.monotonic() + 120
        while len(list(notes.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        return call(*task)

    with monkeypatch.context() as patch:
        patch.setattr(task_grid, "call_on_node", noted)
        prepared()
    return {path.name for path in notes.iterdir()}


@pytest.mark.slow
def test_an_error_in_a_task_is_the_callers_error(cluster: Any) -> None:
    with pytest.raises(UserError, match="cannot read x"):
        list(task_grid.map_tasks(refuse, ["x"], None, cluster.address))


def refuse(text: str) -> None:
    raise UserError(f"cannot read {text}")
