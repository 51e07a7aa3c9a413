"""Every small change that this suite tries on a module, as syntax trees. Pure: reads source, changes nothing on disk.

A mutation is one edit of one node: a comparison moved by one, a condition turned round, a number that is off by one, a
statement left out. What only words things is left alone: strings, f-strings, annotations, docstrings, log calls.
Assertions are left alone too: they state our own invariants, and taking one out changes nothing in correct code.

A mutation is named by what it does and where, without a line number (``registry:Registry.pin: a -> b``), so that the
checked-in list of explained survivors outlives edits elsewhere in the file.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_SHOWN = 90  # characters of source in a name
LEFT_OUT = "(left out)"

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
WORDS = {"reason", "detail", "why", "message"}  # names that hold sentences for people

Path_ = tuple[tuple[str, int | None], ...]  # the way from a tree's root to a node: field names and list positions


@dataclass(frozen=True, slots=True)
class Mutation:
    """One edit. ``path`` leads to the node, ``make`` gives what takes its place."""

    module: str
    scope: str
    line: int
    before: str
    after: str
    serial: int  # tells apart equal edits in one scope
    source: str  # digest of the function around it, or of all that is outside of functions
    path: Path_
    make: Callable[[ast.AST], ast.AST]

    @property
    def name(self) -> str:
        suffix = f" #{self.serial}" if self.serial > 1 else ""
        return f"{self.module}:{self.scope}: {self.before} -> {self.after}{suffix}"

    def applied(self, tree: ast.Module) -> ast.Module:
        """A copy of the tree with this edit in it."""
        changed = copy.deepcopy(tree)
        owner: ast.AST = changed
        for field, index in self.path[:-1]:
            owner = getattr(owner, field) if index is None else getattr(owner, field)[index]
        field, index = self.path[-1]
        if index is None:
            setattr(owner, field, self._made(getattr(owner, field)))
        else:
            getattr(owner, field)[index] = self._made(getattr(owner, field)[index])
        return ast.fix_missing_locations(changed)

    def _made(self, node: ast.AST) -> ast.AST:
        made = self.make(node)
        return ast.copy_location(made, node) if hasattr(node, "lineno") else made


def mutations_of(path: Path, module: str) -> list[Mutation]:
    """All mutations of a file, in the order of its lines."""
    found: list[Mutation] = []
    seen: Counter[tuple[str, str, str]] = Counter()
    tree = ast.parse(path.read_text())
    outside = _digest(_without_bodies(tree))
    digests = {node: _digest(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for scope, way, node in _walk(tree, "", ()):
        source = next((digests[part] for part in _on_the_way(tree, way) if part in digests), outside)
        for make in _edits(node, scope):
            made = make(copy.deepcopy(node))
            before, after = getattr(make, "shown", None) or (_shown(node), _shown(made))
            if before == after:
                continue
            seen[scope, before, after] += 1
            line = next(part.lineno for part in ast.walk(node) if hasattr(part, "lineno"))  # not every node has one
            found.append(Mutation(module, scope, line, before, after, seen[scope, before, after], source, way, make))
    return sorted(found, key=lambda mutation: mutation.line)


def _on_the_way(tree: ast.Module, way: Path_) -> Iterator[ast.AST]:
    node: ast.AST = tree
    for field, index in way:
        node = getattr(node, field) if index is None else getattr(node, field)[index]
        yield node


def _without_bodies(tree: ast.Module) -> ast.Module:
    outside = copy.deepcopy(tree)
    for node in ast.walk(outside):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Pass()]
    return outside


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]


def _walk(node: ast.AST, scope: str, way: Path_) -> Iterator[tuple[str, Path_, ast.AST]]:
    """Every node that may be mutated, with the dotted name of the function or class around it."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params", "msg"):
            continue
        children = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            inner = scope
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inner = f"{scope}.{child.name}".lstrip(".")
            here = (*way, (field, index))
            yield (scope or "<module>"), here, child
            yield from _walk(child, inner, here)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.AnnAssign) and not (
        isinstance(node, ast.AnnAssign) and node.value is not None
    ):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # docstrings
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and _is_alias(node):
        return True
    if isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id in WORDS for t in node.targets):
        return True
    if isinstance(node, ast.keyword) and node.arg in WORDS:
        return True
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return called.startswith("logg") or called in ("NewType", "TypeVar", "dataclass")


def _is_alias(node: ast.Assign) -> bool:
    """``Address = tuple[str, int]``: a type with a name of its own."""
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id.lstrip("_")[:1].isupper()


def _edits(node: ast.AST, scope: str) -> Iterator[Callable[[ast.AST], ast.AST]]:
    """What is tried on one node. Each edit is given a node of its own to change."""
    match node:
        case ast.Compare(ops=[_]):
            yield _swap_comparison
        case ast.BoolOp(values=values):
            yield _swap_bool_op
            yield from (_without_operand(index) for index in range(len(values)))
        case ast.UnaryOp(op=ast.Not()):
            yield lambda n: n.operand  # type: ignore[attr-defined]
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not (isinstance(op, ast.BitOr) and scope == "<module>"):
            yield _swap_arithmetic
        case ast.AugAssign():
            yield _swap_arithmetic
            yield _left_out
        case ast.Constant(value=bool(value)):
            yield lambda n, value=value: ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield lambda n, value=value: ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield _swap_call
        case ast.If() | ast.IfExp() | ast.While():
            if not isinstance(node.test, ast.Compare | ast.BoolOp) and not _is_not(node.test):
                yield _negate_test
        case ast.comprehension(ifs=[_, *_]):
            yield _without_filter
        case ast.match_case(guard=ast.AST()):
            yield _negate_guard
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Raise():
            yield _left_out
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield _left_out
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            if not isinstance(value, ast.Constant):
                yield lambda n: ast.Return(ast.Constant(None))
        case ast.Continue():
            yield lambda n: ast.Break()
        case ast.Break():
            yield lambda n: ast.Continue()
        case ast.Tuple(elts=elements) | ast.List(elts=elements) if (
            scope == "<module>"
            and len(elements) > 1
            and all(isinstance(e, ast.Call | ast.Attribute | ast.Name) for e in elements)
            and isinstance(node.ctx, ast.Load)
        ):
            yield from (_without_element(index, element) for index, element in enumerate(elements))
        case ast.Dict(keys=keys) if scope == "<module>" or len(keys) > 1:
            yield from (_without_item(index, key) for index, key in enumerate(keys) if key is not None)


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _swap_comparison(node: ast.AST) -> ast.AST:
    node.ops = [COMPARISONS[type(node.ops[0])]()]  # type: ignore[attr-defined]
    return node


def _swap_bool_op(node: ast.AST) -> ast.AST:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()  # type: ignore[attr-defined]
    return node


def _without_operand(index: int) -> Callable[[ast.AST], ast.AST]:
    def edit(node: ast.AST) -> ast.AST:
        del node.values[index]  # type: ignore[attr-defined]
        return node.values[0] if len(node.values) == 1 else node  # type: ignore[attr-defined]

    return edit


def _swap_arithmetic(node: ast.AST) -> ast.AST:
    node.op = ARITHMETIC[type(node.op)]()  # type: ignore[attr-defined]
    return node


def _swap_call(node: ast.AST) -> ast.AST:
    node.func = ast.Name(CALLS[node.func.id], ast.Load())  # type: ignore[attr-defined]
    return node


def _negate_test(node: ast.AST) -> ast.AST:
    node.test = ast.UnaryOp(ast.Not(), node.test)  # type: ignore[attr-defined]
    return node


def _negate_guard(node: ast.AST) -> ast.AST:
    node.guard = ast.UnaryOp(ast.Not(), node.guard)  # type: ignore[attr-defined]
    return node


def _without_filter(node: ast.AST) -> ast.AST:
    node.ifs = []  # type: ignore[attr-defined]
    return node


def _left_out(node: ast.AST) -> ast.AST:
    return ast.Pass()


def _without_element(index: int, element: ast.expr) -> Callable[[ast.AST], ast.AST]:
    def edit(node: ast.AST) -> ast.AST:
        del node.elts[index]  # type: ignore[attr-defined]
        return node

    edit.shown = (_shown(element), LEFT_OUT)  # type: ignore[attr-defined]
    return edit


def _without_item(index: int, key: ast.expr) -> Callable[[ast.AST], ast.AST]:
    def edit(node: ast.AST) -> ast.AST:
        del node.keys[index], node.values[index]  # type: ignore[attr-defined]
        return node

    edit.shown = (f"entry {_shown(key)}", LEFT_OUT)  # type: ignore[attr-defined]
    return edit


def _shown(node: ast.AST) -> str:
    """One line of source. A statement with a body is shown by its head; a long one is cut in its middle."""
    if isinstance(node, ast.If | ast.While):
        text = f"{type(node).__name__.lower()} {ast.unparse(node.test)}"
    elif isinstance(node, ast.comprehension):
        text = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}" + "".join(
            f" if {ast.unparse(test)}" for test in node.ifs
        )
    elif isinstance(node, ast.match_case):
        text = f"case {ast.unparse(node.pattern)} if {ast.unparse(node.guard)}" if node.guard else ""
    else:
        text = ast.unparse(node)
    text = " ".join(text.split())
    if len(text) <= MAX_SHOWN:
        return text
    digest = f"{sum(map(ord, text)) % 9973:04d}"  # what was cut out decides, too
    return f"{text[: MAX_SHOWN // 2]} ..{digest}.. {text[-MAX_SHOWN // 2 :]}"
