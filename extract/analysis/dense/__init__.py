"""Evaluation of tokens by predicting classes or depths of the pixels of pictures.

result = segmentation_probe(reader.tokens("blocks.11"), masks, train, test)
result.metrics["mIoU"].value
"""

from extract.analysis.dense.dense_probe import DEPTH, SEGMENTATION
from extract.analysis.dense.depth import depth_probe
from extract.analysis.dense.segmentation import segmentation_probe

__all__ = ["DEPTH", "SEGMENTATION", "depth_probe", "segmentation_probe"]
