"""Evaluation of tokens by predicting masks of pictures.

result = segmentation_probe(reader.tokens("blocks.11"), masks, train, test)
result.metrics["mIoU"].value
"""

from extract.analysis.dense.segmentation import SEGMENTATION, segmentation_probe

__all__ = ["SEGMENTATION", "segmentation_probe"]
