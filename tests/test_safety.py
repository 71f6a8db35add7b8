"""Nothing in the package runs code that came in a file: found in the syntax tree, not by grep."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import retouch

SOURCE = Path(retouch.__file__).parent
FORBIDDEN_MODULES = {"marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
PICKLE_NAMES = {"UnpicklingError", "PicklingError"}  # to catch what torch raises, no more
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader"}


def unsafe(code: str) -> list[str]:
    """What in a module may run foreign code, with its line."""
    nodes = list(ast.walk(ast.parse(code)))
    own = {n.name for n in nodes if isinstance(n, ast.ClassDef) and SAFE_LOADERS & {_dotted(base) for base in n.bases}}
    problems = [(node, _problem(node, SAFE_LOADERS | own)) for node in nodes]
    return [f"{getattr(node, 'lineno', 0)}: {problem}" for node, problem in problems if problem]


def _problem(node: ast.AST, loaders: set[str]) -> str | None:
    if isinstance(node, ast.Import):
        names = [alias.asname or alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        renamed = [alias.asname for alias in node.names if alias.name in ("pickle", "torch", "yaml") and alias.asname]
        return next((f"import {name}" for name in names + renamed), None)  # renamed: out of sight of the checks below
    if isinstance(node, ast.ImportFrom):
        return _import_from(node.module or "", {alias.name for alias in node.names})
    if isinstance(node, ast.Attribute):
        return f"pickle.{node.attr}" if _dotted(node.value) == "pickle" and node.attr not in PICKLE_NAMES else None
    return _call(node, loaders) if isinstance(node, ast.Call) else None


def _import_from(module: str, names: set[str]) -> str | None:
    if module.split(".")[0] in FORBIDDEN_MODULES or (module == "pickle" and names - PICKLE_NAMES):
        return f"from {module} import"
    if module in ("torch", "yaml") and any("load" in name for name in names):
        return f"from {module} import load"
    return None


def _call(node: ast.Call, loaders: set[str]) -> str | None:
    name = _dotted(node.func)
    given = {k.arg: k.value for k in node.keywords}
    true = {option for option, value in given.items() if isinstance(value, ast.Constant) and value.value is True}
    if name == "torch.load" and "weights_only" not in true:
        return "torch.load without weights_only=True"
    if name in ("yaml.load", "yaml.load_all") and ("Loader" not in given or _dotted(given["Loader"]) not in loaders):
        return f"{name} without a SafeLoader"
    if name.startswith(("yaml.unsafe_load", "yaml.full_load")):
        return f"{name}, which builds objects"
    if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
        return f"{name}()"
    return next((f"{name}({o}=True)" for o in ("shell", "trust_remote_code", "allow_pickle") if o in true), None)


def _dotted(node: ast.expr) -> str:
    """ "a.b.c" of a name or attribute; "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_the_package_is_safe() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 50
    found = {str(file.relative_to(SOURCE)): unsafe(file.read_text(encoding="utf-8")) for file in files}
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\npickle.loads(b)",
        "import pickle as p, marshal",
        "from pickle import Unpickler",
        "import joblib.externals",
        "from dill import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "from torch import load",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "class L(yaml.Loader): ...\nyaml.load(text, Loader=L)",
        "import yaml as y",
        "yaml.unsafe_load(text)",
        "yaml.full_load_all(text)",
        "eval(text)",
        "os.system(command)",
        "subprocess.run(command, shell=True)",
        "np.load(file, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_check_sees(code: str) -> None:
    assert unsafe(code)


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(path, weights_only=True)",
        "yaml.safe_load(text)",
        "class L(yaml.SafeLoader): ...\nyaml.load(text, Loader=L)",
        "import pickle\ntry: f()\nexcept pickle.UnpicklingError: pass",
        "model.eval()",
        "subprocess.run(command)",
        "np.load(file)",
        "json.load(file)",
    ],
)
def test_the_check_passes(code: str) -> None:
    assert unsafe(code) == []
