"""Encoding models: responses to images, predicted from features in nested folds."""
