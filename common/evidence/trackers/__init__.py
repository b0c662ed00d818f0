"""Runs for TensorBoard, MLflow, Weights & Biases or CSV files, from their logs alone."""
