"""The house in numbers, read from syntax trees: layers, cycles, private names; and what an optimizer keeps.

``python tests/support/house.py`` prints them; ``tests/project/test_house.py`` holds them.
"""

import ast
import copy
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import torch
from torch.optim import SGD, Optimizer
from training import closure_of, make_loss, make_net

import sassha_fast
from sassha_fast import GSASSHA, MSASSHA, SAM, SASSHA, AdaHessian, SophiaH

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sassha_fast"
TOP = "__init__"  # how tables call the module ``sassha_fast`` itself
# From the ground up: nobody imports from a layer above. A package's name stands for all modules in it.
LAYERS = (
    {
        "checks",
        "variant",
        "schedules",
        "extras",
        "reference",
        "formats",
        "traffic",
        "stats",
        "casting",
        "memory",
        "_version",
    }
    | {"_passes.layout", "_passes.constants", "triton_kernels"},
    {"_passes"},
    {"backends"},
    {"_parallel"},
    {"_core"},
    {"sassha", "msassha", "relatives", "sam"},
    {"_measure", "sharpness", "plots", "log", "preflight", "suggestion"},
    {"integrations", TOP, "__main__"},
)
MOST_PARENTS = 2  # between a public optimizer and torch's
MOST_FIELDS = 8  # that an optimizer writes after its construction


# ---- syntax trees -------------------------------------------------------------------------------------------------


@cache
def modules():
    """The syntax tree of every module, by its name below ``sassha_fast``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if "triton_kernels" not in parts:
            name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
            found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


def is_package(module):
    return module == TOP or (PACKAGE / module.replace(".", "/") / "__init__.py").exists()


def imported(module):
    """What a module imports from the package, whenever it does: (module, names or None, line)."""
    here = () if module == TOP else tuple(module.split("."))
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                if first == "sassha_fast":
                    yield ".".join(rest) or TOP, None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            path = tuple((node.module or "").split(".")) if node.module else ()
            if node.level:
                up = node.level - 1 if is_package(module) else node.level
                base = here[: len(here) - up] + path
            elif path[:1] == ("sassha_fast",):
                base = path[1:]
            else:
                continue
            for alias in node.names:
                inner = ".".join((*base, alias.name))
                is_module = inner in modules() or inner.split(".")[0] == "triton_kernels"
                yield (inner, None, node.lineno) if is_module else (".".join(base) or TOP, alias.name, node.lineno)


def layer(module):
    parts = module.split(".")
    names = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    matches = [(len(name), level) for level, members in enumerate(LAYERS) for name in members & names]
    return max(matches)[1] if matches else None


def climbing_imports():
    """Imports from a layer above, and modules without a layer."""
    found = [f"{module} has no place in LAYERS" for module in modules() if layer(module) is None]
    for module in modules():
        for target, _, line in imported(module):
            if layer(module) is not None and layer(target) is not None and layer(target) > layer(module):
                found.append(f"{module}:{line} imports {target}, which is above it")
    return found


def cycles():
    """Groups of modules that all import each other, whether at once, later or for types alone."""
    edges = {module: {target for target, _, _ in imported(module) if target in modules()} for module in modules()}
    reach = {}
    for start in edges:
        seen, todo = set(), list(edges[start])
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += edges[module]
        reach[start] = seen
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in edges if a in reach[a]}
    return [sorted(group) for group in groups]


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_members():
    """Private names that classes define, each with the classes."""
    found = defaultdict(set)
    for tree in modules().values():
        for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
            for node in ast.walk(cls):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node in cls.body:
                    found[node.name].add(cls.name)
                elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in [t for group in targets for t in ast.walk(group)]:
                        if isinstance(target, ast.Name) and node in cls.body:
                            found[target.id].add(cls.name)
                        elif isinstance(target, ast.Attribute) and is_own(target.value, {cls.name}):
                            found[target.attr].add(cls.name)
    return {name: classes for name, classes in found.items() if is_private(name)}


def is_own(node, classes):
    """Whether an expression is ``self``, ``cls``, ``super()``, ``type(self)`` or a class around it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "super" or (node.func.id == "type" and is_own(node.args[0], classes))
    return isinstance(node, ast.Name) and (node.id in ("self", "cls") or node.id in classes)


def private_reads():
    """Reads and writes of private names of classes from outside of them."""
    members, found = private_members(), []

    def visit(node, classes, module):
        if isinstance(node, ast.ClassDef):
            classes = {*classes, node.name}
        if isinstance(node, ast.Attribute) and node.attr in members and not is_own(node.value, classes):
            owners = "/".join(sorted(members[node.attr]))
            found.append(f"{module}:{node.lineno} {ast.unparse(node)} of {owners}")
        for child in ast.iter_child_nodes(node):
            visit(child, classes, module)

    for module, tree in modules().items():
        visit(tree, set(), module)
    return found


def private_imports():
    """Private functions, classes and constants of modules that others take."""
    found = []
    for module, tree in modules().items():
        aliases = {}
        for target, name, line in imported(module):
            if name is not None and is_private(name):
                found.append(f"{module}:{line} imports {name} from {target}")
            elif name is None:
                aliases[target.split(".")[-1]] = target
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and is_private(node.attr):
                target = aliases.get(node.value.id)
                if target in modules() and f"{target}.{node.attr}" not in modules():
                    found.append(f"{module}:{node.lineno} reads {ast.unparse(node)}")
    return found


def empty_docstrings():
    """Docstrings that only say where to read on."""
    found = []
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                said = re.sub(r"(:\w+)?:`[^`]*`|``[^`]*``|\b(See|and|or|the|class|module)\b|\W", "", text)
                if text.startswith("See ") and not said:
                    found.append(f"{module}:{getattr(node, 'lineno', 1)} {text!r}")
    return found


# ---- objects ------------------------------------------------------------------------------------------------------


def parents():
    """Classes between each public optimizer and ``torch.optim.Optimizer``."""
    public = [getattr(sassha_fast, name) for name in sassha_fast.__all__]
    optimizers = [cls for cls in public if isinstance(cls, type) and issubclass(cls, Optimizer)]
    return {cls.__name__: [c.__name__ for c in cls.__mro__[1 : cls.__mro__.index(Optimizer)]] for cls in optimizers}


class Writes:
    """Notes which attributes of an optimizer, once it is constructed, are set by lines of the package."""

    def __enter__(self):
        self.watched, self.fields = {}, defaultdict(set)

        def noting(opt, name, value):
            if id(opt) in self.watched and PACKAGE in Path(sys._getframe(1).f_code.co_filename).parents:
                self.fields[type(opt).__name__].add(name)
            object.__setattr__(opt, name, value)

        Optimizer.__setattr__ = noting
        return self

    def __exit__(self, *error):
        del Optimizer.__setattr__

    def watch(self, opt):
        self.watched[id(opt)] = opt
        return opt


METHODS = {
    SASSHA: {"lr": 0.01, "rho": 0.05, "lazy_hessian": 2},
    GSASSHA: {"lr": 0.01, "rho": 0.05, "lazy_hessian": 2},
    MSASSHA: {"lr": 0.01, "rho": 0.05, "lazy_hessian": 2},
    AdaHessian: {"lr": 0.01},
    SophiaH: {"lr": 0.01, "lazy_hessian": 2},
    SAM: {"base_optimizer": SGD, "lr": 0.01, "momentum": 0.9},
}


def by_calls(opt, loss, backward=torch.Tensor.backward, step=None):
    with opt.replay_rng():
        if not isinstance(opt, MSASSHA):
            backward(loss())
            opt.perturb_weights()
        backward(loss(), create_graph=opt.hvp == "exact" and opt.hessian_due)
    for _ in range(opt.probes_due):
        opt.probe_weights()
        backward(loss())
    opt.take_products() if isinstance(opt, MSASSHA) else opt.unperturb()
    (step or opt.step)()
    opt.zero_grad()


def live(method, options, writes):
    """All that people do with an optimizer."""
    net = make_net()
    loss, opt = make_loss(net), writes.watch(method(net.parameters(), **options))
    opt.attach(net)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2)
    for step in range(5):
        by_calls(opt, loss) if step % 2 else opt.step(closure_of(opt, loss))
        schedule.step()
    opt.step([loss_and_backward(loss), loss_and_backward(loss)])
    opt.max_grad_norm = 1.0
    by_calls(opt, loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def scaled(value, **keywords):
        scaler.scale(value).backward(**keywords)

    by_calls(opt, loss, scaled, lambda: scaler.step(opt))
    scaler.update()
    opt.step(closure_of(opt, loss, scaled), scaler=scaler)
    failing = iter([loss(), None])
    try:
        opt.step(closure_of(opt, lambda: next(failing) + 0.0))
    except TypeError:
        opt.zero_grad()
    if method is MSASSHA:
        opt.eval()
        opt.train()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    other_net, other = copy.deepcopy((net, opt))
    by_calls(writes.watch(other), make_loss(other_net))
    opt.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    by_calls(opt, loss)


def loss_and_backward(loss):
    def closure():
        value = loss()
        value.backward()
        return value

    return closure


def fields():
    """Names that are written after construction, by class."""
    with Writes() as writes:
        for method, options in METHODS.items():
            live(method, options, writes)
            if method is not SAM:
                live(method, {**options, "hvp": "finite_difference"}, writes)
    return {name: sorted(written) for name, written in writes.fields.items()}


# ---- the table -----------------------------------------------------------------------------------------------------


def lines_of(folder):
    kinds = (".py", ".h", ".cpp", ".cu", ".cuh")
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*") if path.suffix in kinds)


def table():
    """The numbers, with what each may be at most."""
    return [
        ("imports from a layer above", len(climbing_imports()), 0),
        ("cycles of imports", len(cycles()), 0),
        ("modules in such cycles", sum(map(len, cycles())), 0),
        ("private names touched from outside their class", len(private_reads()), 0),
        ("private names taken from other modules", len(private_imports()), 0),
        ("docstrings that only point elsewhere", len(empty_docstrings()), 0),
        ("classes between an optimizer and torch's", max(map(len, parents().values())), MOST_PARENTS),
        ("fields written after construction", max(map(len, fields().values())), MOST_FIELDS),
        ("lines of sassha_fast/", lines_of("sassha_fast"), None),
        ("lines of csrc/", lines_of("csrc"), None),
    ]


if __name__ == "__main__":
    for what, number, most in table():
        print(f"{what:<50} {number:>6}" + ("" if most is None else f"   at most {most}"))
