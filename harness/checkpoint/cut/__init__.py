"""Some layers of a checkpoint as a checkpoint of its own: true width, less depth. Must not know models or stages."""

from harness.checkpoint.cut.configuration import Known, cut_config, depth_of
from harness.checkpoint.cut.files import Piece, Told, publish_folder, write_tensors
from harness.checkpoint.cut.layers import CUT_FILE, Cut, read_cut, write_cut_file
from harness.checkpoint.cut.model import Plan, plan_cut, renamed_in, write_cut

__all__ = [
    "CUT_FILE",
    "Cut",
    "Known",
    "Piece",
    "Plan",
    "Told",
    "cut_config",
    "depth_of",
    "plan_cut",
    "publish_folder",
    "read_cut",
    "renamed_in",
    "write_cut",
    "write_cut_file",
    "write_tensors",
]
