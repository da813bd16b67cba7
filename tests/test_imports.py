"""Imports beyond the contracts of pyproject.toml: no circles, and what runs without torch or before the first step.

The source is read, not run: an import inside a function counts as well. `cramming/verbs.py` names the entry modules as
text, in its table of verbs, and is the only module that may.
"""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cramming", "data_prep", "eval")

TORCH_FREE = """
    cramming.config cramming.files cramming.record cramming.record_schema cramming.environment
    cramming.plan.cards cramming.budget cramming.runlog cramming.scores cramming.resume
    cramming.launch cramming.schedule
    cramming.hub cramming.progress cramming.tokenizer_config
    cramming.process_pool cramming.overrides cramming.cli cramming.data.manifest cramming.data.corpus
    cramming.data.task_files cramming.data.inspect cramming.objectives eval.rules.table eval.report.main
    cramming.verbs
    eval.report.page eval.plots eval.report.submission eval.report.references eval.report.model_card
    eval.extras.study
    eval.diagnose.main eval.diagnose.table eval.diagnose.run_facts
""".split()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports_of(module: str, *, at_import_time: bool = False) -> Iterator[str]:
    """Modules that `module` imports; `from a import b` gives `a.b` where that is a module, else `a`."""
    tree = parsed(module)
    nodes = _outside_functions(tree) if at_import_time else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Relative imports: in cramming/model alone, whose files go into exported folders as they are.
            assert node.level == 0 or module.startswith("cramming.model."), (
                f"{module}: relative import"
            )
            source = ".".join(filter(None, ("cramming.model" if node.level else None, node.module)))
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield full if full in MODULES else source


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _outside_functions(child)


@functools.cache
def project_imports(module: str) -> set[str]:
    """Return the imports of `module` from this project's packages."""
    return {name for name in imports_of(module) if name.split(".")[0] in PACKAGES}


def test_only_the_table_of_verbs_names_entry_modules() -> None:
    entries = {
        "cramming.plan.main",
        "cramming.bench.main",
        "cramming.data.inspect",
        "cramming.replay",
    }
    entries |= {
        "data_prep.prepare",
        "eval.glue",
        "eval.report.main",
        "eval.export",
        "eval.submit",
        "eval.verify",
        "eval.extras.study",
        "eval.duel.main",
        "eval.diagnose.main",
        "eval.adapt.main",
        "eval.own_tasks.main",
    }
    trains = {"cramming.pretrain"}  # whose loop is what a replay repeats
    for module in MODULES:
        others = entries | (
            trains if module not in ("cramming.replay", "cramming.launch") else set()
        )
        if module == "eval.verify":  # of a folder that is no run's: one verb for both
            others -= {"cramming.data.inspect"}
        assert not others & project_imports(module), f"{module} imports an entry module"
        if module != "cramming.verbs":
            text = MODULES[module].read_text(encoding="utf-8")
            assert not [e for e in entries | trains if f'"{e}"' in text], module


def test_no_circles() -> None:
    graph = {module: (project_imports(module) & set(MODULES)) - {module} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_only_the_mesh_reads_the_launchers_variables() -> None:
    for module, path in MODULES.items():
        if module not in ("cramming.parallel.mesh", "cramming.launch"):  # launch: before torch
            text = path.read_text(encoding="utf-8")
            assert not [v for v in ('"RANK"', '"WORLD_SIZE"', '"LOCAL_RANK"') if v in text], module


def test_the_torch_free_modules_import_without_torch() -> None:
    """In a process where importing torch or transformers fails; all of data_prep too."""
    names = [*TORCH_FREE, *(m for m in MODULES if m.startswith("data_prep"))]
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Blocked())
import importlib
for name in {names!r}:
    importlib.import_module(name)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_line_answers_before_anything_heavy_is_imported() -> None:
    """`cramming`, `--help` and a typing mistake need no more than four small modules; Hydra comes with the verb."""
    code = """
import sys
import cramming.cli
print(*[m for m in sys.modules if m.split(".")[0] in ("cramming", "torch", "hydra", "omegaconf", "numpy", "rich")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert set(done.stdout.split()) == {
        "cramming",
        *(
            f"cramming.{m}"
            for m in ("cli", "children", "config", "files", "invocation", "overrides")
        ),
    }


def test_nothing_heavy_is_imported_by_the_library_modules_on_the_clock() -> None:
    """transformers and datasets take seconds: `pretrain` loads neither before its deadline."""
    seen, waiting = set[str](), ["cramming.pretrain"]
    while waiting:
        module = waiting.pop()
        if module in MODULES and module not in seen:
            seen.add(module)
            names = list(imports_of(module, at_import_time=True))
            heavy = [
                n
                for n in names
                if n.split(".")[0]
                in ("transformers", "datasets", "evaluate", "sklearn", "matplotlib")
            ]
            assert not heavy, f"{module} imports {heavy}"
            waiting += names


READ_BEFORE_TRAINING = """
import ast, json, sys
from pathlib import Path
from cramming import launch
from cramming.invocation import Invocation

class FirstStep(BaseException):
    pass

def stop(*_):
    raise FirstStep

from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(stop)
try:
    launch.main(json.loads(sys.argv[1]), Invocation("first", Path(sys.argv[2]), device="cpu"))
except FirstStep:
    pass
packages = ("cramming", "data_prep", "eval")
files = [m.__file__ for name, m in sys.modules.items() if name.split(".")[0] in packages]
trees = [ast.parse(Path(file).read_text()) for file in files]
nodes = [sum(isinstance(node, ast.stmt | ast.expr) for node in ast.walk(tree)) for tree in trees]
counted = [count for count in nodes if count > 1]  # a package's docstring is nothing to read
print(len(counted), sum(counted))
"""
# What a newcomer must read before the first training step, in files and syntax nodes.
MAX_FILES, MAX_NODES = 49, 38_600


def test_little_is_read_before_the_first_training_step(
    tmp_path: Path,
    compose: Callable[..., dict[str, Any]],
    tiny_overrides: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Files of this project that the default run loads; what only a chosen trick or the end needs is loaded then."""
    settings = json.dumps(compose(*tiny_overrides))
    command = [sys.executable, "-c", READ_BEFORE_TRAINING, settings, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files, nodes = map(int, done.stdout.splitlines()[-1].split())
    with capsys.disabled():
        print(f" [{files} files, {nodes} nodes before the first training step]", end="")
    assert files <= MAX_FILES and nodes <= MAX_NODES
