"""Floor 1: where things live."""

from .meshes import data_parallel_mesh as data_parallel_mesh
from .placements import distribute as distribute
