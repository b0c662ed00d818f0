"""Finds the methods that a configuration names, and builds them."""

import difflib
import importlib
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence

from common.config.division import refuse
from common.config.names import find_methods
from common.config.schema import RunConfig, Strict
from common.config.validation import validate
from common.errors import UserError, name_error, nearest
from common.repository import explain_machine_fault, module_file
from common.training.method import Method

NO_HOOKS = {"__init__", "refuse", "dropped_from"}
LIKE_HOOKS = ("on_", "after_", "before_")  # hooks of other libraries begin so


def kind_of(name: str, module: str) -> type[Method]:
    """Return the class in a method's file. Raises UserError where the file cannot be loaded or has none."""
    file, class_name = module_file(module), name.title().replace("_", "")
    try:
        kind: type[Method] | None = getattr(importlib.import_module(module), class_name, None)
    except Exception as error:
        if explain_machine_fault(error):
            raise
        raise UserError(f"cannot be imported: {name_error(error)}", where=file) from error
    if kind is None:
        hint = "a method's class has the name of its file, in CamelCase"
        raise UserError(f"has no class {class_name}", where=file, hint=hint)
    if not issubclass(kind, Method) or not issubclass(kind.Config, Strict):
        hint = "from common.training.method import Method; from common.config.schema import Strict"
        what = f"{class_name} has to be a Method, and its Config a Strict"
        raise UserError(what, where=file, hint=hint)
    hooks, functions = (
        {name for name, value in vars(one).items() if inspect.isfunction(value)} - NO_HOOKS
        for one in (Method, kind)
    )
    for function in sorted(functions - hooks):
        if function.startswith(LIKE_HOOKS) or difflib.get_close_matches(function, hooks, cutoff=0.8):
            raise UserError(f"`{function}` is no hook of a method", where=file, hint=nearest(function, hooks))
    return kind


def build_methods(config: RunConfig, origins: dict[tuple[str, ...], str] | None = None) -> list[Method]:
    """Build the methods of a configuration in their order, settings checked."""
    modules = find_methods(config, origins or {})
    methods = []
    for name, values in config.methods.items():
        kind = kind_of(name, modules[name])
        method = kind(name, validate(kind.Config, values, origins or {}, ("methods", name)))
        method.config = config
        methods.append(method)
    return methods


def refuse_compiled(config: RunConfig, name: str) -> None:
    """Raise UserError when the model is compiled; steps of the method `name` differ in their graph."""
    for method in build_methods(config):
        if method.compiles:
            raise UserError(
                "its steps differ in what they compute, so they cannot be compiled",
                where=f"methods.{name}",
                hint=f"--set methods.{method.name}=false",
            )


def refuse_process_wide(configs: Sequence[RunConfig]) -> None:
    """Raise UserError for a method that acts on the process which all share, unless all have it."""
    methods = [method for config in configs for method in build_methods(config) if method.is_process_wide]
    for name, count in Counter(method.name for method in methods).items():
        if count < len(configs):
            what = "acts on the whole process, and so on every configuration that is timed in it"
            raise UserError(what, where=name, hint="ttt compare --steps times each in a process of its own")


def check_division(
    config: RunConfig, methods: Sequence[Method], origins: Mapping[tuple[str, ...], str]
) -> None:
    """Raise UserError for a method that the closed division forbids, in a configuration of it."""
    for method in methods:
        is_allowed = method.is_exact or method.is_of_reference or method.is_approved
        if config.submission.division == "closed" and not is_allowed:
            asks = "methods that change nothing but rounding, and the reference's"
            refuse(config, origins, f"methods.{method.name}", asks, "Graph Execution")
