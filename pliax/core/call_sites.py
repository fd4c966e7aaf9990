"""What a frame is calling, read off its bytecode: no text of the program is needed.

    callees : a frame  ->  the functions it may be calling, None where that is unknown

A function that is written in C has no frame of its own, and Python keeps what it calls
on a stack that nobody can read. But how the stack came about can be followed: each
instruction is run on expressions instead of values, along all ways through the code,
and the names in the expression of what is called are looked up in the frame. What the
instructions do not tell (a result of another call) is unknown.
"""

import dataclasses
import dis
import functools
import itertools
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Expression:
    """A value on the stack by how it came there.

    Attributes:
        kind: "name", "constant", "attribute", "item", "call", "iterator", or "either".
        parts: the name or the constant, or the expressions that it is made of.
    """

    kind: str
    parts: tuple[Any, ...]


_Stack = tuple[Expression | None, ...]  # None: unknown
_NULL = Expression("null", ())  # what Python puts beside a function that is no method

_ENDS = {"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"}
_JUMPS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}
_POPS = ("POP_", "STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF", "END_FOR")
_NAMES = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")
_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")


def callees(frame: FrameType) -> list[Any] | None:
    """The functions that a frame may be calling now; None where they are unknown.

    A function that is mapped counts, where a loop or a list takes what it gives.
    """
    found = _called(frame.f_code, frame.f_lasti)
    if found is None:
        return None
    try:
        return list(_values(found, frame))
    except Exception:  # whatever attributes of the user's raise
        return None


def is_calling(frame: FrameType) -> bool:
    """Whether a frame is in the midst of a call, not of an operation such as `in`."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _CALLS


# --- the expression of what is called -------------------------------------------------


@functools.lru_cache(maxsize=1 << 10)
def _called(code: CodeType, offset: int) -> Expression | None:
    """The function that an instruction calls, as an expression."""
    stacks = _stacks(code)
    at = next((i for i in dis.get_instructions(code) if i.offset == offset), None)
    if at is None or not stacks.get(offset):
        return None
    stack = stacks[offset]
    if at.opname in _CALLS:
        call = _call(at, stack)
        return call and _function_behind(call)
    if at.opname in ("FOR_ITER", "UNPACK_SEQUENCE"):
        return _mapped(stack[-1])
    return _mapped(stack[-1]) if at.opname == "LIST_EXTEND" else None


def _call(at: dis.Instruction, stack: _Stack) -> Expression | None:
    """A call by its function and arguments; a method's object is not among them."""
    count = 1 - dis.stack_effect(at.opcode, at.arg)
    first, second, *arguments = stack[-count:]
    if first is None or second is None or _NULL not in (first, second):
        return None
    function = second if first == _NULL else first
    known = arguments if at.opname == "CALL" else []
    return Expression("call", (function, *known))


def _function_behind(call: Expression) -> Expression | None:
    """What is called, or mapped by an argument of a function that iterates."""
    function, *arguments = call.parts
    taken = [x for x in map(_mapped, arguments[:1]) if x is not None]
    if taken and function.kind == "name" and function.parts[0] in _TAKERS:
        return taken[0]
    return function


_TAKERS = {"list", "tuple", "next", "sum", "max", "min", "any", "all", "sorted"}


def _mapped(iterator: Expression | None) -> Expression | None:
    """The function of `map(function, …)`."""
    if iterator is None or iterator.kind != "call":
        return None
    function, *arguments = iterator.parts
    is_map = function == Expression("name", ("map",))
    return arguments[0] if is_map and arguments else None


# --- the stack ------------------------------------------------------------------------


@functools.lru_cache(maxsize=1 << 8)
def _stacks(code: CodeType) -> Mapping[int, _Stack]:
    """The stack before each instruction of a function, by offset."""
    instructions = list(dis.get_instructions(code))
    following = dict(itertools.pairwise(instructions))
    by_offset = {i.offset: i for i in instructions}
    found: dict[int, _Stack] = {}
    work: list[tuple[int, _Stack]] = [(0, ())]
    for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
        depth = entry.depth + int(entry.lasti) + 1
        work.append((entry.target, (None,) * depth))
    while work:
        offset, stack = work.pop()
        before = found.get(offset, stack)
        if len(before) != len(stack):
            return {}
        after = tuple(map(_either, before, stack))
        if found.get(offset) == after:
            continue
        found[offset] = after
        at = by_offset[offset]
        for target, is_jump in _next(at, following.get(at)):
            work.append((target, _run(at, after, is_jump)))
    return found


def _next(
    at: dis.Instruction, following: dis.Instruction | None
) -> Iterator[tuple[int, bool]]:
    """Where an instruction may lead, and whether by a jump."""
    if at.opcode in dis.hasjrel or at.opcode in dis.hasjabs:
        yield at.argval, True
    if at.opname not in _ENDS | _JUMPS and following is not None:
        yield following.offset, False


def _either(a: Expression | None, b: Expression | None) -> Expression | None:
    """What is on the stack where two ways meet."""
    if a is None or b is None or a == b:
        return a if a == b else None
    parts = [y for x in (a, b) for y in (x.parts if x.kind == "either" else (x,))]
    unique = tuple(dict.fromkeys(parts))
    return Expression("either", unique) if len(unique) <= 8 else None


def _run(at: dis.Instruction, stack: _Stack, is_jump: bool) -> _Stack:
    """The stack after an instruction."""
    name, effect = at.opname, dis.stack_effect(at.opcode, at.arg, jump=is_jump)
    if name == "COPY":
        return (*stack, stack[-at.argval])
    if name == "SWAP":
        moved = list(stack)
        moved[-1], moved[-at.argval] = stack[-at.argval], stack[-1]
        return tuple(moved)
    if effect == 0 and name in _DO_NOTHING:
        return stack
    if effect >= 0 and name == "FOR_ITER":  # the iterator stays
        return stack + (None,) * effect
    if effect < 0 and name.startswith(_POPS):
        return stack[:effect]
    pushed = _pushed(at, stack)
    if pushed is None:  # at least the deepest that it may touch becomes unknown
        kept = max(len(stack) + min(effect, 0) - 1, 0)
        pushed = (None,) * (len(stack) + effect - kept)
    return (*stack[: len(stack) + effect - len(pushed)], *pushed)


_DO_NOTHING = {"NOP", "RESUME", "CACHE", "KW_NAMES", "PRECALL", "NOT_TAKEN", "GET_ITER"}
_DO_NOTHING |= {"EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "JUMP_FORWARD"}
_DO_NOTHING |= {"JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "DELETE_FAST"}


def _pushed(at: dis.Instruction, stack: _Stack) -> _Stack | None:
    """What an instruction leaves in place of what it takes; None if that is unknown."""
    name = at.opname
    if name == "PUSH_NULL":
        return (_NULL,)
    if name in ("LOAD_CONST", "LOAD_SMALL_INT"):
        is_plain = isinstance(at.argval, int | str | bytes | None)
        return (Expression("constant", (at.argval,)) if is_plain else None,)
    if name.startswith(_NAMES) and name != "LOAD_FAST_AND_CLEAR":
        names = at.argval if isinstance(at.argval, tuple) else (at.argval,)
        return _beside_null(at, *(Expression("name", (n,)) for n in names))
    if name in ("LOAD_ATTR", "LOAD_METHOD") and stack[-1] is not None:
        found = Expression("attribute", (stack[-1], at.argval))
        return _beside_null(at, found)
    if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and at.argrepr == "[]"):
        is_known = None not in stack[-2:]
        return (Expression("item", stack[-2:]) if is_known else None,)
    return (_call(at, stack),) if name in _CALLS else None


def _beside_null(at: dis.Instruction, *found: Expression) -> _Stack:
    """A function to be called has NULL, or its object, beside it."""
    effect = dis.stack_effect(at.opcode, at.arg)
    is_attribute = at.opname in ("LOAD_ATTR", "LOAD_METHOD")
    is_to_be_called = len(found) == 1 and effect == 2 - is_attribute
    return (_NULL, *found) if is_to_be_called else found


# --- its value ------------------------------------------------------------------------


def _values(of: Expression, frame: FrameType) -> Iterator[Any]:
    """What an expression may stand for in a frame; raises where that is unknown."""
    kind, parts = of.kind, of.parts
    if kind == "either":
        for part in parts:
            yield from _values(part, frame)
    elif kind == "constant":
        yield parts[0]
    elif kind == "name":
        scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
        yield next(scope[parts[0]] for scope in scopes if parts[0] in scope)
    elif kind == "attribute":
        for value in _values(parts[0], frame):
            is_object = isinstance(value, Made) and isinstance(value.maker, type)
            yield getattr(value.maker if is_object else value, parts[1])
    elif kind == "item":
        yield from _items(*(list(_values(part, frame)) for part in parts))
    elif kind == "call":
        yield from _made(of, frame)
    else:
        raise LookupError(kind)


def _items(containers: list[Any], keys: list[Any]) -> Iterator[Any]:
    """Elements, if neither key nor container has a method of the user's."""
    for container in containers:
        for key in keys:
            if not isinstance(container, list | tuple | dict):
                raise LookupError(container)
            if type(key) not in (int, str, bytes, bool, type(None)):
                raise LookupError(key)
            yield container[key]


def _made(call: Expression, frame: FrameType) -> Iterator[Any]:
    """What calls of functools.partial give, and of those that make functions."""
    function, *arguments = call.parts
    for maker in _values(function, frame):
        if maker is functools.partial and arguments and arguments[0] is not None:
            yield from _values(arguments[0], frame)
        else:
            yield Made(maker)


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """What a call has given, by the function that was called."""

    maker: Any
