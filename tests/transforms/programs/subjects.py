"""Programs of our own inventory as subjects of the padding transform."""

from transforms.padding.outcomes import Subject

from . import choose_sizes, make_arguments
from ._program import Program


BUCKET = 16
SIZES = (
    *((5, 7, 6), (16, 13, 11), (1, 2, 3), (15, 16, 12)),
    *((6, 6, 6), (3, 3, 3), (8, 4, 2)),  # equal to each other, or to a constant
)  # then whatever `where` asks
OTHERS = (12, 11, 8, 7, 6, 5, 4, 3, 2, 1, 16, 24)


def subject_of(program: Program) -> Subject:
    """The program at sizes that it admits."""
    return Subject(
        name=program.name,
        function=program.function,
        shapes=tuple(argument.shape for argument in program.arguments),
        draw=lambda sizes, seed: make_arguments(program, dict(sizes), seed),
        choices=choices(program),
        draw_dyadic=lambda sizes, seed: make_arguments(
            program, dict(sizes), seed, dyadic=True
        ),
        where=program.where,
        tolerance=program.tolerance,
    )


def choices(program: Program) -> tuple[dict[str, int], ...]:
    """Different sizes that the program admits."""
    found: list[dict[str, int]] = []
    for sizes in SIZES:
        rest = [(*sizes[i:], *sizes[:i], *OTHERS) for i in range(len(sizes))]
        chosen = choose_sizes(program, *rest)
        if chosen not in found:
            found.append(chosen)
    return tuple(found)
