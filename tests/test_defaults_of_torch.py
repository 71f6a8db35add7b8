"""Numbers depend on nothing that a library may change for the whole process: tensors name their dtype, and random
numbers come from generators of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

TINY = ("retouch/tiny/", "retouch_glyphs/tiny/")
"""They train tiny bases in a process of their own, `retouch tiny build`, in which nothing else loads."""

MAKERS = {
    "tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "empty", "full", "eye", "arange", "linspace",
    "logspace", "rand", "randn", "randint", "randperm", "normal",
}  # fmt: skip
"""Functions of torch whose result has the default dtype, at least for Python's floats."""

KEEPS_ITS_DTYPE = {("retouch/algorithms/vlm_grpo/responses.py", "torch.as_tensor(value)")}
"""Of an array, whatever its dtype."""

DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}

DRAWN_INTO = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "multinomial"}

WEIGHTS_TO_BE_LOADED = {
    ("retouch/adapters/projections.py", "torch.randn(tokens, token_width, dtype=torch.float32)"),
    ("retouch/families/flux2/base.py", "vae.bn.running_mean.normal_(std=0.2)"),  # of tiny networks
    ("retouch/families/flux2/base.py", "vae.bn.running_var.uniform_(0.5, 2.0)"),
    ("retouch/families/z_image/model.py", "nn.init.normal_(transformer.x_pad_token)"),
    ("retouch/families/z_image/model.py", "nn.init.normal_(transformer.cap_pad_token)"),
    ("retouch_glyphs/glyph_structure.py", "nn.init.normal_(self.asked.weight, std=0.1)"),
}
"""Initial weights of networks: drawn before a run begins, under `fork_rng` or replaced by a file."""

OWN_GENERATORS = {"Random", "SystemRandom", "default_rng", "Generator", "RandomState", "SeedSequence"}

STATES = {("retouch/process/process_wide.py", name) for name in ("getstate", "setstate", "get_state", "set_state")}


def calls(of: str = "") -> Iterator[tuple[str, ast.Call]]:
    """(file, call) of every call in files with a text."""
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if of in text else ():
            if isinstance(node, ast.Call):
                yield path.relative_to(SOURCE).as_posix(), node


def dotted(node: ast.expr) -> str:
    """ "a.b.c" of a name or attribute; to write the text of every expression took most of the time of these tests."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def torch_function(call: ast.Call) -> str | None:
    """Name of the function of torch that is called."""
    function = call.func
    of_torch = isinstance(function, ast.Attribute) and dotted(function.value) == "torch"
    return function.attr if of_torch and isinstance(function, ast.Attribute) else None


def has(call: ast.Call, keyword: str) -> bool:
    return any(given.arg == keyword for given in call.keywords)


def test_every_tensor_is_made_with_a_dtype() -> None:
    found = set[str]()
    for file, call in calls("torch."):
        made = torch_function(call) in MAKERS and not has(call, "dtype") and not file.startswith(TINY)
        if made and (file, ast.unparse(call)) not in KEEPS_ITS_DTYPE:
            found.add(f"{file}:{call.lineno}: {ast.unparse(call)}")
        if torch_function(call) in ("Tensor", "FloatTensor", "set_default_dtype", "set_default_device"):
            found.add(f"{file}:{call.lineno}")
    assert not found


def test_no_number_comes_from_a_global_generator() -> None:
    """Its state is part of checkpoints: a resumed run must find the next numbers where an uninterrupted one does."""
    found = set[tuple[str, str]]()
    for file, call in calls():
        function = call.func
        if not isinstance(function, ast.Attribute):
            continue
        module = dotted(function.value)
        drawn = module in ("np.random", "numpy.random") or (module == "random" and imports_random(file))
        if drawn and function.attr not in OWN_GENERATORS and (file, function.attr) not in STATES:
            found.add((file, ast.unparse(call)))
        if (torch_function(call) in DRAWS or function.attr in DRAWN_INTO) and not has(call, "generator"):
            found.add((file, ast.unparse(call)))
        if dotted(function) in ("torch.manual_seed", "torch.seed", "torch.cuda.manual_seed_all"):
            assert "fork_rng" in (SOURCE / file).read_text(encoding="utf-8"), file
    assert not found - WEIGHTS_TO_BE_LOADED


def imports_random(file: str) -> bool:
    """Whether `random` is the module in a file, not a generator of its own."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return "random" in names


def test_no_function_of_a_global_generator_is_imported_by_name() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "random import" in text else ():
            if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random"):
                assert {alias.name for alias in node.names} <= OWN_GENERATORS, path


def test_no_image_processor_is_chosen_by_what_is_installed() -> None:
    """transformers takes torchvision's where it is installed, which makes other pixels than Pillow's."""
    for file, call in calls("ImageProcessor"):
        name = dotted(call.func).removesuffix(".from_pretrained").rpartition(".")[2]
        if name == "AutoImageProcessor":
            assert any(given.arg == "backend" and ast.unparse(given.value) == "'pil'" for given in call.keywords), file
        else:
            assert not name.endswith(("ImageProcessor", "ImageProcessorFast", "AutoProcessor")), file
