"""Floor 2: optimizers; may use kernels and distributed."""

from .matrix_axes import MatrixAxes as MatrixAxes
from .muon import muon as muon, scale_by_muon as scale_by_muon
from .mup import mup as mup
from .routing import labels as labels
