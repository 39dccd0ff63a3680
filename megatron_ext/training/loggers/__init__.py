"""Destinations of a run's metrics, one file each: record files, progress line, TensorBoard, tracking services."""
