"""Rows that are parts of files: boxes and tiles of pictures, views, frames of videos."""
