"""Conditions that users write in Python, as `jax.export` takes them.

"b % 8 == 0"  ->  "mod(b, 8) == 0"
"""

import ast


class _Export(ast.NodeTransformer):
    """Python's // and % as `jax.export` writes them."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        left, right = self.visit(node.left), self.visit(node.right)
        name = _FUNCTIONS.get(type(node.op))
        if name is None:
            return ast.BinOp(left, node.op, right)
        return ast.Call(ast.Name(name, ast.Load()), [left, right], [])


_FUNCTIONS = {ast.Mod: "mod", ast.FloorDiv: "floordiv"}
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
    export = ast.fix_missing_locations(_Export().visit(node))
    left, right = ast.unparse(export.left), ast.unparse(export.comparators[0])
    if relation == "<":
        return f"{left} <= {right} - 1"
    return f"{left} >= {right} + 1" if relation == ">" else f"{left} {relation} {right}"


_NO_CONSTRAINT = (
    "the condition {0!r} cannot be read.\n"
    'Write one comparison of sizes and integers, "t <= 4096" or "b % 8 == 0".'
)
