"""What is kept of the compiler's words about a kernel."""

import sys

import pytest

from benchmarks import resources_attention as resources


PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'entry_kernel' for 'sm_90a'
ptxas info    : Function properties for entry_kernel
    328 bytes stack frame, 332 bytes spill stores, 348 bytes spill loads
ptxas info    : Used 128 registers, used 16 barriers, 328 bytes cumulative stack size
"""


def listing(*lines: str) -> list[str]:
    """As nvdisasm prints it: labels, and instructions behind their addresses."""
    return [
        line if line.startswith(".") else f"        /*{16 * n:04x}*/      {line} ;"
        for n, line in enumerate(lines)
    ]


VISIT = (
    ".L_x_1:", "HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4], R8", "MUFU.EX2 R4, R4",
    "FMUL R5, R4, 0.125", "@!P0 LDL R6, [R1+0x10]", "@P1 BRA `(.L_x_1)",
)  # fmt: skip
OUTER = ".L_x_0:", "IADD3 R1, R1, 0x1, RZ", *VISIT, "STL [R1], R2", "BRA `(.L_x_0)"


def test_registers_and_spills_are_those_of_the_kernel():
    assert resources.resources(PTXAS) == {
        "registers": 128,
        "spill_store_bytes": 332,
        "spill_load_bytes": 348,
    }


def test_a_visit_is_an_innermost_loop_with_products_and_its_instructions_are_counted():
    (found,) = resources.visits(listing(*OUTER, "EXIT"))
    assert found == {
        "instructions": 4, "products": 1, "special_functions": 1, "spills": 1,
        "arithmetic": 1,
    }  # fmt: skip


def test_who_waits_behind_the_end_and_comes_back_is_in_no_loop():
    lines = ".L_x_2:", VISIT[1], "EXIT", "BRA `(.L_x_2)"
    assert not [*resources.visits(listing(*lines))]


def test_a_loop_without_products_is_no_visit():
    lines = ".L_x_3:", "FADD R1, R1, R2", "BRA `(.L_x_3)", "EXIT"
    assert not [*resources.visits(listing(*lines))]


@pytest.mark.parametrize(("direction", "count", "names"), [
    ("forward", 1, ["forward"]), ("backward", 1, ["backward"]),
    ("backward", 2, ["dq", "dk and dv"]),
])  # fmt: skip
def test_kernels_are_called_by_what_they_make(direction, count, names):
    assert [*resources.names(direction, count)] == names


@pytest.mark.parametrize(("program", "kernels"), [("causal", 1), ("documents", 2)])
def test_a_pass_has_the_modules_of_its_kernels(program, kernels, monkeypatch):
    monkeypatch.setattr(resources.mosaic_gpu_limits, "refused_device", lambda: None)
    case = resources.attention.Case(program, 512, 64, B=1, H=2)
    assert len(resources.modules(case, "forward", None)) == 1
    assert len(resources.modules(case, "backward", None)) == kernels


def test_an_unknown_program_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["resources", "--programs", "triangle"])
    with pytest.raises(SystemExit):
        resources.main()
    assert "triangle" in capsys.readouterr().err
