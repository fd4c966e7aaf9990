"""Conditions that users write in Python, as `jax.export` takes them.

constraint : "b % 8 == 0"  ->  "mod(b, 8) == 0"
in_python  : and back
"""

import ast
import functools
import keyword


class _Export(ast.NodeTransformer):
    """Python's // and % as `jax.export` writes them; nothing but whole numbers."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, _KNOWN) or not _is_whole(node):
            raise ValueError
        return super().generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if not _may_stand_on_the_right(node.op, node.right):
            raise ValueError
        left, right = self.visit(node.left), self.visit(node.right)
        name = _FUNCTIONS.get(type(node.op))
        if name is None:
            self.visit(node.op)
            return ast.BinOp(left, node.op, right)
        return ast.Call(ast.Name(name, ast.Load()), [left, right], [])


_FUNCTIONS = {ast.Mod: "mod", ast.FloorDiv: "floordiv"}
_KNOWN = (ast.Add, ast.Sub, ast.Mult, ast.Pow, ast.USub, ast.UAdd, ast.UnaryOp)
_KNOWN += (ast.Name, ast.Load, ast.Constant, ast.Call)
FUNCTIONS = ("max", "min", "mod", "floordiv")


def _is_whole(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        is_known = getattr(node.func, "id", "") in FUNCTIONS
        return is_known and len(node.args) == 2 and not node.keywords
    return not isinstance(node, ast.Constant) or type(node.value) is int


def _may_stand_on_the_right(operator: ast.operator, node: ast.expr) -> bool:
    """Whether something may divide, or be an exponent, which is at least 1."""
    is_power = isinstance(operator, ast.Pow)
    if not isinstance(node, ast.Constant):
        return not is_power
    if not is_power and not isinstance(operator, ast.Mod | ast.FloorDiv):
        return True
    return type(node.value) is int and node.value >= 1


def is_name(text: str) -> bool:
    """Whether a size may be called so."""
    is_taken = text in FUNCTIONS or keyword.iskeyword(text) or text == "_"
    return text.isidentifier() and not is_taken


def expression(text: str) -> str | None:
    """An expression of sizes in Python, "t // 2", as `jax.export` takes it; or None."""
    try:
        node = _Export().visit(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return None
    return ast.unparse(ast.fix_missing_locations(node)).replace("**", "^")


class _Infix(ast.NodeTransformer):
    """floordiv(t, 2) and mod(t, 2) as Python writes them."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node = ast.Call(node.func, [self.visit(x) for x in node.args], [])
        operator = _PYTHON.get(getattr(node.func, "id", ""))
        return ast.BinOp(node.args[0], operator(), node.args[1]) if operator else node


_PYTHON = {name: operator for operator, name in _FUNCTIONS.items()}


@functools.lru_cache(maxsize=1 << 14)
def in_python(text: str) -> str:
    """An expression or a condition of `jax.export`'s in Python: "t // 2", "t % 2"."""
    tree = ast.parse(text.replace("^", "**"), mode="eval")
    return ast.unparse(ast.fix_missing_locations(_Infix().visit(tree)))


_COMPARISONS = {ast.LtE: "<=", ast.GtE: ">=", ast.Eq: "==", ast.Lt: "<", ast.Gt: ">"}


def constraint(text: str) -> str:
    """A condition written in Python, "b % 8 == 0", as `jax.export` takes it.

    Raises:
        ValueError: if it is not one comparison of integer expressions.
    """
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        node = None
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise ValueError(_NO_CONSTRAINT.format(text))
    relation = _COMPARISONS.get(type(node.ops[0]))
    if relation is None:
        raise ValueError(_NO_CONSTRAINT.format(text))
    left, right = (expression(ast.unparse(x)) for x in (node.left, node.comparators[0]))
    if left is None or right is None:
        raise ValueError(_NO_CONSTRAINT.format(text))
    if relation in ("<", ">"):
        right = _moved(right, -1 if relation == "<" else 1)
    return f"{left} {relation[0]}= {right}"


def _moved(right: str, step: int) -> str:
    """A side of a comparison and 1 more, or 1 less."""
    if right.isdecimal():
        return str(int(right) + step)
    return f"{right} {'+' if step > 0 else '-'} 1"


_NO_CONSTRAINT = (
    "the condition {0!r} cannot be read.\n"
    "Write one comparison of sizes and integers by <=, <, >=, > or ==, "
    '"t <= 4096" or "b % 8 == 0"; several conditions as several strings.'
)
